"""A shape, a tokenizer and a few rows, small enough that a supervised run takes a second."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

REPO = Path(__file__).resolve().parents[2]
QUESTIONS = [f"{a}+{b}=" for a in (1, 23, 456) for b in (7, 89, 1000, 55555)]
ROWS = [{"question": q, "answer": f"#### {sum(map(int, q.rstrip('=').split('+')))}"} for q in QUESTIONS]


def make_script() -> ModuleType:
    """scripts/make_arithmetic_model.py as a module."""
    path = REPO / "scripts" / "make_arithmetic_model.py"
    if not path.is_file():
        import pytest

        pytest.skip("needs scripts/ of the checkout; it is not part of the installed package")
    spec = importlib.util.spec_from_file_location("make_arithmetic_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_shape(folder: Path) -> Path:
    script = make_script()
    script.SHAPE.update(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    script.SHAPE.update(num_key_value_heads=1)
    script.write_shape(folder)
    return folder


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def sft_job(rows: Path, shape: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a small run, as nested dicts; `section={...}` changes it."""
    config: dict[str, dict[str, Any]] = {
        "data": {"train_files": str(rows), "val_files": str(rows), "train_batch_size": 4},
        "model": {"from_config": str(shape)},
        "optim": {"lr": 1e-2},
        "trainer": {
            "total_training_steps": 3,
            "device": "cpu",
            "default_local_dir": str(run_dir),
            "resume_mode": "disable",
        },
    }
    return {name: {**section, **changes.get(name, {})} for name, section in config.items()}


def as_arguments(config: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{key}={'null' if value is None else value}"
        for section, keys in config.items()
        for key, value in keys.items()
    ]


def run_module(
    arguments: list[str],
    processes: int = 1,
    module: str = "quadriga.trainer.fsdp_sft_trainer",
    environment: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """A supervised run in processes of its own, by torchrun where there are several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command_line = [sys.executable, *launcher, "-m", module, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), **(environment or {})}
    return subprocess.run(command_line, capture_output=True, text=True, timeout=150, env=env, **options)
