"""Preferences that a tiny model can learn: answers of vowels are better than answers of consonants."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"


def word(letters: str, draw: random.Random) -> str:
    return "".join(draw.choice(letters) for _ in range(draw.randint(2, 6)))


def write_pairs(file: Path, count: int = 64, seed: int = 0) -> Path:
    draw = random.Random(seed)
    rows = [
        {"prompt": f"say {draw.choice('abcxyz')}", "chosen": word(VOWELS, draw), "rejected": word(CONSONANTS, draw)}
        for _ in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def pair_job(pairs: Path, model: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a small run on pairs, for rm and dpo."""
    config: dict[str, dict[str, Any]] = {
        "data": {"train_files": str(pairs), "val_files": str(pairs), "train_batch_size": 16, "max_length": 32},
        "model": {"partial_pretrain": str(model)},
        "optim": {"lr": 3e-3},
        "trainer": {
            "total_training_steps": 12,
            "device": "cpu",
            "default_local_dir": str(run_dir),
            "resume_mode": "disable",
        },
    }
    return {name: {**config.get(name, {}), **changes.get(name, {})} for name in {**config, **changes}}
