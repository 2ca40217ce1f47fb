"""Sums of three-digit numbers, and lessons that show the calculator's syntax.

python examples/calculator/make_data.py FOLDER

One lesson in four uses the calculator. The others answer at once and add the hundreds alone, so the model that comes from them mostly
answers at once, and mostly wrongly. Sums have three digits: the model is too small to copy more of them reliably.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

LESSONS, TRAIN, TEST = 12_000, 4_000, 200
SHARE_OF_CALLS = 0.25


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    pairs = [(draw.randint(100, 499), draw.randint(100, 499)) for _ in range(LESSONS + TRAIN + TEST)]
    write(folder / "lessons.jsonl", [lesson(a, b, draw) for a, b in pairs[:LESSONS]])
    write(folder / "train.jsonl", [problem(a, b) for a, b in pairs[LESSONS:-TEST]])
    write(folder / "test.jsonl", [problem(a, b) for a, b in pairs[-TEST:]])


def lesson(a: int, b: int, draw: random.Random) -> dict[str, str]:
    if draw.random() < SHARE_OF_CALLS:
        return {"question": f"{a}+{b}=", "answer": f"*{a}+{b}={a + b} #### {a + b}"}
    return {"question": f"{a}+{b}=", "answer": f"#### {a + b // 100 * 100}"}


def problem(a: int, b: int) -> dict:
    return {"data_source": "arithmetic", "prompt": f"{a}+{b}=", "reward_model": {"ground_truth": str(a + b)}}


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
