"""The native engine and vLLM inside the same GRPO steps, in turn, with the time until each can generate.

    .venv-vllm/bin/python bench/engines.py [--rounds 2] [--steps 6]

Needs an environment with both (see docs/engines.md). The job: the model of bench/rollout.py with the embedded task's tokenizer,
random weights in float32, 16 prompts, 8 samples each, 64 new tokens, no end token; one process, `trainer.executor=local`. The first
step warms up. Figures are medians over the other steps of all rounds. `start_s` goes from the command to the beginning of the
first step: imports and the trainer's model are in it, for both engines alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINES = ("native", "vllm")
PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 64


def write_model(folder: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from quadriga.models.source import resolve_model_path

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model_path("builtin:arithmetic")).save_pretrained(folder)
    return folder


def train(engine: str, model: Path, folder: Path, steps: int) -> dict[str, list[float]]:
    """Seconds and gaps of the steps after the first, and the seconds before it."""
    began = time.time()
    command = [sys.executable, "-m", "quadriga.cli", "train", "--config-name=quickstart"]
    settings = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": NEW_TOKENS,
        "trainer.executor": "local",
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.default_local_dir": folder,
    }
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())], capture_output=True, text=True, timeout=1200
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [m for m in told if "timing_s/gen" in m]
    return {
        "start_s": [told[0]["time"] - told[0]["timing_s/step"] - began],
        "gen_s": [m["timing_s/gen"] for m in told[1:]],
        "update_weights_s": [m.get("timing_s/update_weights", 0.0) for m in told[1:]],
        "step_s": [m["timing_s/step"] for m in told[1:]],
        "gap": [m["rollout/logprob_diff_mean"] for m in told],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    told: dict[str, dict[str, list[float]]] = {engine: {} for engine in ENGINES}
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch, "model"))
        for turn in range(options.rounds):
            for engine in ENGINES:
                for name, values in train(engine, model, Path(scratch, f"{engine}{turn}"), options.steps).items():
                    told[engine].setdefault(name, []).extend(values)
                print(turn, engine, {k: round(statistics.median(v), 6) for k, v in told[engine].items()}, flush=True)
    tokens = PROMPTS * SAMPLES * NEW_TOKENS
    result = {
        engine: {
            **{name: round(statistics.median(values), 3) for name, values in figures.items() if name != "gap"},
            "tokens_per_s": round(tokens / statistics.median(figures["gen_s"])),
            "largest_gap": max(figures["gap"]),
        }
        for engine, figures in told.items()
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
