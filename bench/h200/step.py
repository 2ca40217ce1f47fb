"""The whole step through `run_ppo` on Ray: GRPO (or PPO with a critic) on one GPU, from launch.

    python bench/h200/step.py --tokenizer FOLDER --data FOLDER [--case grpo] [--steps 3] [--json FILE]

Writes a model of the shape with random weights into `--work`, starts `quadriga.trainer.main_ppo` as a user would, reads its
metrics.jsonl, and ends it after `--steps` steps. The data folder holds train.parquet and test.parquet (`quadriga prep gsm8k`);
the tokenizer is Qwen2.5's. 512 new tokens, end tokens ignored, one optimiser step; in the cases with a long tail up to 2,048 new
tokens, and one token of 506 ends a sample, so that most are short and a few of them long.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shapes import MATRIX_RATE, config_of, make_model, train_flops

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"shape": "0.5B", "prompts": 128, "samples": 8},
    "ppo with critic, half batch": {"shape": "0.5B", "prompts": 64, "samples": 8, "estimator": "gae"},
    "grpo, exact": {"shape": "0.5B", "prompts": 128, "samples": 8, "settings": ["trainer.deterministic=exact"]},
    "1.5B": {"shape": "1.5B", "prompts": 128, "samples": 8},
    "long tail": {"shape": "0.5B", "prompts": 128, "samples": 8, "end_tokens": 300, "response": 2048},
}
CASES["long tail, free, 1 ahead"] = CASES["long tail"] | {
    "settings": ["async_training.staleness=1", "async_training.mode=free"]
}
CASES["long tail, ordered, 1 ahead"] = CASES["long tail"] | {"settings": ["async_training.staleness=1"]}
STOP_S = 90.0
"""A run that is told to stop gets this long: it writes a checkpoint first."""
PHASES = ("gen", "reward", "values", "adv", "update_critic", "update_actor", "update_weights", "step")


def write_model(shape: str, folder: Path, tokenizer: Path, end_tokens: int) -> None:
    """Random weights make all tokens about as likely, so the number of those that end a sample says how long samples get."""
    if not (folder / "model.safetensors").exists():
        model = make_model(shape, torch.bfloat16)
        if end_tokens:
            model.generation_config.eos_token_id = list(range(1000, 1000 + end_tokens))
        model.save_pretrained(folder)
        for file in tokenizer.iterdir():
            shutil.copy(file, folder)
    torch.cuda.empty_cache()


def overrides(case: dict[str, Any], model: Path, data: Path, run: Path, steps: int) -> list[str]:
    rollout, rows = "actor_rollout_ref.rollout", case["prompts"] * case["samples"]
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        f"data.train_batch_size={case['prompts']}",
        "data.max_prompt_length=512",
        f"data.max_response_length={case.get('response', 512)}",
        f"algorithm.adv_estimator={case.get('estimator', 'grpo')}",
        f"{rollout}.n={case['samples']}",
        f"{rollout}.ignore_eos={'end_tokens' not in case}",
        f"{rollout}.max_num_seqs={rows}",
        f"{rollout}.max_num_batched_tokens=16384",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={steps + 3}",
        f"trainer.default_local_dir={run}",
        "trainer.logger=[console]",
        *case.get("settings", ()),
    ]


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    work = Path(options.work)
    ends = case.get("end_tokens", 0)
    model, run = work / f"model-{case['shape']}-{ends}", Path(tempfile.mkdtemp(dir=work))
    write_model(case["shape"], model, Path(options.tokenizer), ends)
    command = [sys.executable, "-m", "quadriga.trainer.main_ppo"]
    command += overrides(case, model, Path(options.data).resolve(), run, options.steps)
    started = time.time()
    with open(run / "console.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        peak = watch(process, run / "metrics.jsonl", options.steps, started + options.limit)
    lines = read(run / "metrics.jsonl")
    if not lines:
        raise SystemExit(f"{name}: no step was done.\n" + (run / "console.log").read_text()[-6000:])
    return {"case": name, "first_step_done_s": round(lines[0]["time"] - started, 1), "peak_gib": peak} | figures(
        case, lines
    )


def watch(process: subprocess.Popen, metrics: Path, steps: int, deadline: float) -> float:
    """Wait for `steps` lines of metrics, then end the run; returns the most GPU memory seen in use, in GiB."""
    peak = 0.0
    try:
        while process.poll() is None and time.time() < deadline and len(read(metrics)) < steps:
            free, total = torch.cuda.mem_get_info()
            peak = max(peak, (total - free) / 2**30)
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # the run ends by itself, and takes its cluster with it
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    return round(peak, 1)


def read(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def figures(case: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the last step: seconds of each phase, speeds, and the share of the matrix rate in the update."""
    last = lines[-1]
    seconds = {phase: round(last[f"timing_s/{phase}"], 3) for phase in PHASES if f"timing_s/{phase}" in last}
    rows, config = case["prompts"] * case["samples"], config_of(case["shape"])
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    length = last["prompt_length/mean"] + last["response_length/mean"]
    tokens, update = rows * length, seconds["update_actor"]
    return {
        "steps": [round(line["timing_s/step"], 2) for line in lines],
        "seconds": seconds,
        "tokens_trained": round(tokens),
        "rollout_tokens_per_s": round(rows * last["response_length/mean"] / max(1e-3, seconds["gen"])),
        "update_tokens_per_s": round(tokens / update),
        "update_mfu": round(train_flops(count, config, [round(length)] * rows) / update / MATRIX_RATE, 3),
        "logprob_gap": last.get("rollout/logprob_diff_mean"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", default=tempfile.gettempdir())
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one case")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: run this on a GPU machine")
    results = []
    for name in options.case:
        results.append(run_case(name, options))
        print(json.dumps(results[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
