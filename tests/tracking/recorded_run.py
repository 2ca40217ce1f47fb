"""A small run that learns, for the tests that look at one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quadriga.tracking import RunDirectory

STEPS = 40


def step_metrics(step: int) -> dict[str, Any]:
    """Metrics of a run that learns: accuracy rises from 40% to 80%."""
    accuracy = 0.4 + 0.4 * step / STEPS
    values = {
        "critic/score/mean": accuracy + 0.05 * (-1) ** step,
        "reward/correct": accuracy,
        "actor/ppo_kl": 0.00123,
        "actor/entropy": 0.456,
        "response_length/mean": 11.8,
        "response_length/clip_ratio": 0.0,
        "timing_s/gen": 0.6,
        "timing_s/update_actor": 0.4,
        "timing_s/step": 1.0,
        "perf/total_throughput": 12345.0,
        "perf/total_num_tokens": 12000,
    }
    if step % 10 == 0:
        values["val/arithmetic/acc/mean@1"] = accuracy + 0.02
    return values


def record_run(path: Path) -> RunDirectory:
    """Forty steps with five validations, the first before training; samples of the first and the last."""
    run = RunDirectory(path)
    run.begin()
    run.append_metrics(0, {"val/arithmetic/acc/mean@1": 0.41, "timing_s/testing": 2.0})
    for step in range(1, STEPS + 1):
        run.append_metrics(step, step_metrics(step))
    questions = [("1+1=", "2", True), ("12+7*3=", "33", False), ("88-19=", "69", False), ("9*8=", "72", False)]
    for step in (0, STEPS):
        rows = [
            {
                "prompt": question,
                "response": f"#### {answer if step or knew else '<b>7</b>'}",
                "score": float(bool(step or knew)),
                "ground_truth": answer,
            }
            for question, answer, knew in questions
        ]
        run.write_samples(step, rows, kind="val")
    return run
