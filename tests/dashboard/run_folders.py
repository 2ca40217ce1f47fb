"""Run directories as runs write them, good and bad, without training anything."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from quadriga.tracking.run_record import process_mark


def write_run(
    folder: Path, steps: int = 20, state: str = "finished", level: float = 0.5, total: int | None = None, **status: Any
) -> Path:
    """A train run of `steps` steps whose score rises by `level`; `status` replaces parts of its status.json."""
    folder.mkdir(parents=True)
    began = time.time() - 2.0 * steps
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics_line(step, steps, level, began + 2.0 * step)) + "\n")
    write_status(folder, state=state, step=steps, total_steps=total or steps, started=began, **status)
    return folder


def write_step(folder: Path, step: int, total: int = 40, state: str = "running") -> None:
    """One more step of a run of this process."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(step, total, 0.5, time.time())) + "\n")
    write_status(folder, state=state, step=step, total_steps=total)


def metrics_line(step: int, steps: int, level: float, when: float) -> dict[str, Any]:
    score = level * (1 - math.exp(-4 * step / steps))
    line = {
        "step": step,
        "time": when,
        "critic/score/mean": score,
        "reward/correct": score,
        "actor/entropy": 1.0 / step,
        "perf/total_num_tokens": 1000,
        "timing_s/gen": 0.5,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 1.6,
    }
    return line | ({"val/arithmetic/acc/mean@1": score} if step % 10 == 0 else {})


def write_status(folder: Path, /, **changes: Any) -> None:
    about = {
        "format": 1,
        "kind": "train",
        "state": "finished",
        "error": "",
        "step": 0,
        "start_step": 0,
        "total_steps": 20,
        "seconds_per_step": 2.0,
        "pid": os.getpid(),
        "process": process_mark(os.getpid()),
        "host": socket.gethostname(),
        "updated": time.time(),
        "phases": [],
        "phase_since": time.time(),
        "phase_usual_s": None,
        "changed": {"actor_rollout_ref.actor.optim.lr": 0.001},
        "validations": {"arithmetic": {"first_step": 0, "first": 0.4, "last_step": 20, "last": 0.5}},
        "alarms": {},
    }
    temporary = folder / ".status.tmp"
    temporary.write_text(json.dumps(about | changes))
    temporary.replace(folder / "status.json")


def write_samples(folder: Path, step: int, rows: list[dict[str, Any]], kind: str = "train") -> Path:
    path = folder / "samples" / f"{kind}_{step:08d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for row in rows))
    return path


def sample(number: int, right: bool, **more: Any) -> dict[str, Any]:
    """One of a group of four answers."""
    response = f"#### {number if right else number + 1}"
    return {
        "uid": f"0:{number // 4}",
        "sample_index": number % 4,
        "data_source": "arithmetic",
        "prompt": f"{number // 4}+1=",
        "response": response,
        "ground_truth": str(number),
        "score": float(right),
        "acc": float(right),
        "outcome": "correct" if right else "wrong",
        "response_tokens": 2,
        "advantage": 1.0 if right else -1.0,
        **more,
    }


def token_sample(texts: list[str], rollout: list[float], trainer: list[float], mask: list[int]) -> dict[str, Any]:
    tokens = {
        "ids": list(range(len(texts))),
        "texts": texts,
        "rollout_log_probs": rollout,
        "trainer_log_probs": trainer,
        "mask": mask,
    }
    return sample(0, False, response="".join(texts), tokens=tokens)
