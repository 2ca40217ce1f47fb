"""A whole GRPO step on a CPU: Quadriga on Ray beside TRL, each in its own process, taking turns.

    python bench/step_cpu.py --trl-python PATH/TO/python [--rounds 3] [--steps 3]

The job: Qwen2 shape (hidden 256, 6 layers, 4 heads / 2 kv, ffn 1024, vocab 4096, tied, float32, random weights),
32 prompts of 32 tokens, 8 samples each, 128 new tokens, no end token, one optimiser step, no KL. Both use all cores. The
first step of a process is left out (it starts threads and touches memory); of the others the median counts. `update` is
everything of a step but generation. TRL's micro-batch is the fastest of those tried (`--trl-rows`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = {"prompts": 32, "prompt_tokens": 32, "samples": 8, "new_tokens": 128, "vocabulary": 4096}
REWARD = """
def distinct(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str)))
"""


def prepare(folder: Path) -> None:
    """Model, tokenizer (a word per token), prompts and reward."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, JOB["vocabulary"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    # In a folder of its own: beside a Qwen2 model it would be read as Qwen2's.
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder / "words")
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=JOB["vocabulary"],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    ids = torch.randint(3, JOB["vocabulary"], (JOB["prompts"], JOB["prompt_tokens"]))
    rows = [
        {
            "data_source": "words",
            "prompt": " ".join(f"w{i}" for i in row),
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, row in enumerate(ids.tolist())
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "job.json").write_text(json.dumps(JOB))


def quadriga_run(folder: Path, steps: int, turn: int, token_budget: int) -> None:
    """`steps` steps through the same entry as any run; its metrics.jsonl has the times."""
    from quadriga.trainer.main_ppo import run_ppo

    run_ppo(
        {
            "data": {
                "train_files": str(folder / "prompts.jsonl"),
                "val_files": str(folder / "prompts.jsonl"),
                "train_batch_size": JOB["prompts"],
                "max_prompt_length": JOB["prompt_tokens"],
                "max_response_length": JOB["new_tokens"],
                "val_max_samples": 1,
            },
            "actor_rollout_ref": {
                "model": {"path": str(folder), "tokenizer_path": str(folder / "words")},
                "actor": {"optim": {"lr": 1e-6}, "ppo_max_token_len_per_gpu": token_budget},
                "rollout": {"n": JOB["samples"], "ignore_eos": True},
            },
            "algorithm": {"adv_estimator": "grpo"},
            "custom_reward_function": {"path": str(folder / "reward.py"), "name": "distinct"},
            "ray_kwargs": {"ray_init": {"num_cpus": os.cpu_count()}},
            "trainer": {
                "device": "cpu",
                "total_training_steps": steps,
                "total_epochs": steps,
                "val_before_train": False,
                "logger": [],
                "default_local_dir": str(folder / f"run{turn}"),
            },
        }
    )


def times_of_quadriga(folder: Path, steps: int, turn: int, token_budget: int) -> dict[str, list[float]]:
    arguments = [str(folder), str(steps), str(turn), str(token_budget)]
    subprocess.run([sys.executable, __file__, "--ours", *arguments], check=True, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (folder / f"run{turn}" / "metrics.jsonl").read_text().splitlines()]
    tokens = {(m["prompt_length/mean"], m["response_length/mean"]) for m in metrics}
    if tokens != {(JOB["prompt_tokens"], JOB["new_tokens"])}:
        sys.exit(f"this is not the job: prompts and responses have {tokens} tokens")
    return {"gen": [m["timing_s/gen"] for m in metrics], "step": [m["timing_s/step"] for m in metrics]}


def times_of_trl(python: str, folder: Path, steps: int, rows: int) -> dict[str, list[float]]:
    peer = Path(__file__).parent / "peers" / "trl_grpo.py"
    done = subprocess.run([python, str(peer), str(folder), str(steps), str(rows)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="a Python that has TRL; without it only Quadriga is timed")
    parser.add_argument("--trl-rows", default="32", help="rows of TRL's micro-batches, to be tried in turn: 16,32,64")
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a round, the first of which is left out")
    arguments = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for turn in range(arguments.rounds):
            told = {"Quadriga": times_of_quadriga(folder, arguments.steps, turn, arguments.token_budget)}
            if arguments.trl_python:
                for rows in map(int, arguments.trl_rows.split(",")):
                    told[f"TRL, {rows} rows"] = times_of_trl(arguments.trl_python, folder, arguments.steps, rows)
            for who, phases in told.items():
                kept = times.setdefault(who, {"gen": [], "update": [], "step": []})
                kept["gen"] += phases["gen"][1:]
                kept["step"] += phases["step"][1:]
                kept["update"] += [s - g for s, g in zip(phases["step"], phases["gen"])][1:]
                print(f"round {turn} {who:14} gen {phases['gen']} step {phases['step']}", flush=True)
    for phase in ("gen", "update", "step"):
        medians = {who: statistics.median(kept[phase]) for who, kept in times.items()}
        line = " · ".join(f"{who} {m:.2f} s ({m / medians['Quadriga']:.2f} x)" for who, m in medians.items())
        print(f"{phase:6} {line}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        quadriga_run(Path(sys.argv[2]), *map(int, sys.argv[3:6]))
    else:
        main()
