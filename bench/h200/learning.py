"""A real model learns: SmolLM2-135M-Instruct on sums of two and three numbers, a little SFT and then GRPO.

    python bench/h200/learning.py --model FOLDER --gsm8k FOLDER --work FOLDER [--seeds 1 2] [--steps 240] [--json FILE] [--png FILE]

SFT on generated problems stops as soon as a share of the held-out ones is right, early enough that the policy still tries
things; GRPO goes on from there through `run_ppo` on Ray, the seeds side by side on the same GPU. Reported before, between
and after: held-out exact match and GSM8K test accuracy (first 256 problems, last number of a greedy answer), and the gap
between the log-probs of rollout and trainer in every step.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from quadriga.config.schema_models import ModelConfig, OptimConfig
from quadriga.data.chat import ChatEncoder
from quadriga.data.prep.arithmetic import generate_arithmetic, solve
from quadriga.data.prep.sources import write_parquet
from quadriga.engine import TrainingEngine
from quadriga.engine.weights import host_state_dict
from quadriga.models.load import load_policy, load_tokenizer
from quadriga.models.outline import blank_copy
from quadriga.protocol import DataProto
from quadriga.rewards.scorers import gsm8k
from quadriga.rollout import Request, SamplingParams, create_engine
from quadriga.tracking.curves import Curve, Panel
from quadriga.tracking.plots import write_png

SFT_BATCH, SFT_MAX_STEPS, SFT_EVAL_EVERY = 64, 240, 4
NEW_TOKENS = 40
STOP_S = 60.0
"""A run that is told to stop gets this long: it writes a checkpoint first."""


def problems(max_value: int, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows, half with two operands and half with three, in turn."""
    sizes: dict[str, Any] = {"max_value": max_value, "train_size": 4096, "test_size": 256, "seed": seed}
    both = [generate_arithmetic(operands=n, ops="+-", style="chat", **sizes) for n in (2, 3)]
    train, test = ([row for pair in zip(*(b[part] for b in both)) for row in pair] for part in (0, 1))
    for rows in (train, test):
        for index, row in enumerate(rows):
            row["extra_info"]["index"] = index
    return train, test


def worked_answer(question: str) -> str:
    """`12+7-5=` → `12+7=19, 19-5=14 #### 14`."""
    terms = question.removesuffix("=").replace("-", " -").replace("+", " +").split()
    total, steps = terms[0], []
    for term in terms[1:]:
        result = str(solve(total + term) if not total.startswith("-") else int(total) + int(term))
        steps.append(f"{total}{term}={result}")
        total = result
    return ", ".join(steps) + f" #### {total}"


class Pupil:
    """A policy that is trained in place, with a rollout engine beside it to examine it."""

    def __init__(self, folder: str, lr: float) -> None:
        self.tokenizer = load_tokenizer(folder)
        policy = load_policy(ModelConfig(path=folder, override_config={}, target_modules="all-linear"), self.tokenizer)
        self.engine = TrainingEngine(policy, optim=OptimConfig(lr=lr, betas=[0.9, 0.999]), device="cuda")
        self.encoder = ChatEncoder(self.tokenizer)
        self.rollout = create_engine(
            "native",
            module=blank_copy(self.engine.model.huggingface, "cuda"),
            eos_token_ids=[self.tokenizer.eos_token_id],
            max_num_seqs=512,
            max_model_len=1024,
            memory_fraction=0.2,
        )
        self.version = 0

    def answers(self, prompts: list[Any], new_tokens: int) -> list[str]:
        self.version += 1
        self.rollout.update_weights(self.version, self.engine.full_weights())
        ids = self.encoder.encode_prompts(prompts, lambda row: f"prompt {row}")
        params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens)
        requests = [Request(str(i), p, params, (0, i)) for i, p in enumerate(ids)]
        found = {int(c.request_id): c.token_ids for c in self.rollout.generate(requests)}
        return self.tokenizer.batch_decode([found[i] for i in range(len(prompts))], skip_special_tokens=True)

    def accuracy(self, rows: list[dict[str, Any]], new_tokens: int = NEW_TOKENS) -> float:
        texts = self.answers([row["prompt"] for row in rows], new_tokens)
        truths = [row["reward_model"]["ground_truth"] for row in rows]
        right = [
            gsm8k.score("", text, truth, None, method="flexible")["score"] > 0 for text, truth in zip(texts, truths)
        ]
        return sum(right) / len(right)

    def teach(self, rows: list[dict[str, Any]]) -> float:
        """One step of SFT; its loss."""
        ids = self.encoder.encode_prompts([row["prompt"] for row in rows], lambda row: f"prompt {row}")
        ends = [worked_answer(row["extra_info"]["question"]) for row in rows]
        ends = [[*self.tokenizer(e, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id] for e in ends]
        prompt, response = max(map(len, ids)), max(map(len, ends))
        tokens = torch.zeros(len(rows), prompt + response, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, (before, after) in enumerate(zip(ids, ends)):
            tokens[i, prompt - len(before) : prompt + len(after)] = torch.tensor([*before, *after])
            mask[i, prompt - len(before) : prompt + len(after)] = 1
        data = DataProto.from_dict({"input_ids": tokens, "attention_mask": mask, "response_mask": mask[:, prompt:]})

        def loss(outputs: Any, micro: Any, counts: Any) -> Any:
            return -counts.aggregation("token-mean")(outputs["log_probs"], micro["response_mask"]), {}

        return self.engine.train_mini_batch(data, loss, 32768)["loss"]

    def save(self, folder: Path) -> None:
        self.engine.model.huggingface.save_pretrained(folder, state_dict=host_state_dict(self.engine.model))
        self.tokenizer.save_pretrained(folder)


def sft(
    model: str, target: float, train: list[Any], test: list[Any], word_problems: list[Any], out: Path
) -> dict[str, Any]:
    start = time.time()
    pupil = Pupil(model, lr=2e-5)
    before = {"held_out": pupil.accuracy(test), "gsm8k": pupil.accuracy(word_problems, 256)}
    print("before", before, flush=True)
    accuracy, steps = before["held_out"], 0
    while accuracy < target and steps < SFT_MAX_STEPS:
        at = steps * SFT_BATCH % (len(train) - SFT_BATCH)
        loss = pupil.teach(train[at : at + SFT_BATCH])
        steps += 1
        if steps % SFT_EVAL_EVERY == 0:
            accuracy = pupil.accuracy(test)
            print(f"sft step {steps}: loss {loss:.3f}, held-out {accuracy:.3f}", flush=True)
    after = {"held_out": accuracy, "gsm8k": pupil.accuracy(word_problems, 256)}
    pupil.save(out)
    return {"before": before, "sft": after, "sft_steps": steps, "sft_seconds": round(time.time() - start, 1)}


def reinforce(model: Path, data: Path, run: Path, seed: int, options: argparse.Namespace) -> subprocess.Popen:
    rollout = "actor_rollout_ref.rollout"
    arguments = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.train_batch_size=128",
        "data.val_batch_size=512",
        "data.max_prompt_length=128",
        f"data.max_response_length={NEW_TOKENS}",
        f"data.seed={seed}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.actor.optim.lr={options.lr}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576",  # two runs share the GPU
        f"{rollout}.n={options.samples}",
        f"{rollout}.seed={seed}",
        f"{rollout}.max_num_seqs={128 * options.samples}",
        f"{rollout}.gpu_memory_utilization=0.2",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=True",
        "trainer.test_freq=20",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.save_freq={max(1, options.steps // 4)}",  # a run that is stopped leaves one to examine
        "trainer.max_actor_ckpt_to_keep=1",
        f"trainer.default_local_dir={run}",
        "trainer.logger=[console]",
    ]
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "console.log", "w") as log:
        command = [sys.executable, "-m", "quadriga.trainer.main_ppo", *arguments]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, deadline: float) -> None:
    try:
        process.wait(timeout=max(1.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=STOP_S)


def held_out(line: dict[str, Any]) -> float | None:
    return next((v for k, v in line.items() if k.startswith("val/") and k.endswith("acc/mean@1")), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", required=True, help="folder with test.parquet")
    parser.add_argument("--work", required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--max-value", type=int, default=50, help="largest number in a problem")
    parser.add_argument("--sft-target", type=float, default=0.22, help="held-out share right at which SFT stops")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--samples", type=int, default=16, help="of each of 128 prompts a step")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for the GRPO runs; then they are stopped")
    parser.add_argument("--json")
    parser.add_argument("--png")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: run this on a GPU machine")
    torch.set_num_threads(1)
    work = Path(options.work)
    train, test = problems(options.max_value)
    write_parquet(train, work / "train.parquet")
    write_parquet(test, work / "test.parquet")
    word_problems = pq.read_table(Path(options.gsm8k) / "test.parquet").to_pylist()[:256]
    done = work / "sft.json"
    if not done.exists():
        start_of_rl = sft(options.model, options.sft_target, train, test, word_problems, work / "sft")
        done.write_text(json.dumps(start_of_rl))
    result = json.loads(done.read_text())
    torch.cuda.empty_cache()
    start = time.time()
    runs = {seed: work / f"grpo-{seed}" for seed in options.seeds}
    processes = []
    for seed, run in runs.items():
        processes.append(reinforce(work / "sft", work, run, seed, options))
        time.sleep(5)  # two clusters of Ray that start in the same second look for the same ports
    for process in processes:
        finish(process, start + options.limit)
    result["grpo_seconds"] = round(time.time() - start, 1)
    curves, gaps = [], []
    for color, (seed, run) in enumerate(runs.items()):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        points = [(line["step"], value) for line in lines if (value := held_out(line)) is not None]
        gap = [
            (line["step"], line["rollout/logprob_diff_mean"]) for line in lines if "rollout/logprob_diff_mean" in line
        ]
        curves.append(Curve(f"seed {seed}", points, color, is_sparse=True))
        gaps.append(Curve(f"seed {seed}", gap, color))
        exported = next(run.glob("checkpoints/**/huggingface/config.json"), None)
        word = None if exported is None else Pupil(str(exported.parent), 1e-6).accuracy(word_problems, 256)
        result[f"seed {seed}"] = {
            "held_out": points,
            "gained": round(points[-1][1] - points[0][1], 4),
            "gsm8k": word,
            "mean_logprob_gap": sum(g for _, g in gap) / max(1, len(gap)),
            "largest_mean_logprob_gap": max(g for _, g in gap),
            "seconds_per_step": sorted(line["timing_s/step"] for line in lines if "timing_s/step" in line)[
                len(lines) // 2
            ],
        }
    print(json.dumps(result), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2))
    if options.png:
        span = (0.0, float(options.steps))
        panels = [
            Panel("Held-out problems right", curves, span, is_share=True),
            Panel("|log-prob of rollout − of trainer|", gaps, span),
        ]
        write_png(Path(options.png), panels, "SmolLM2-135M: GRPO after a little SFT", f"one H200, {len(runs)} seeds")


if __name__ == "__main__":
    main()
