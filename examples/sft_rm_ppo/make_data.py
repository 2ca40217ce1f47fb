"""Data for three stages: lessons to imitate, pairs to compare, prompts to answer. All are sums, all generated.

python examples/sft_rm_ppo/make_data.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from quadriga.data import generate_arithmetic
from quadriga.data.prep.sources import write_parquet

LESSONS, PAIRS = 64, 3000


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train, test = generate_arithmetic(max_value=79, ops="+", train_size=None, test_size=256)
    draw = random.Random(0)
    draw.shuffle(train)
    questions = [(row["extra_info"]["question"], int(row["reward_model"]["ground_truth"])) for row in train]
    lessons = [{"question": question, "answer": f"#### {total}"} for question, total in questions[:LESSONS]]
    pairs = [
        {"prompt": question, "chosen": f"#### {total}", "rejected": f"#### {wrong(total, draw)}"}
        for question, total in questions[LESSONS : LESSONS + PAIRS]
    ]
    write(folder / "lessons.jsonl", lessons)
    write(folder / "pairs.jsonl", pairs[: -len(pairs) // 10])
    write(folder / "pairs_test.jsonl", pairs[-len(pairs) // 10 :])
    write_parquet(train, folder / "train.parquet")
    write_parquet(test, folder / "test.parquet")


def wrong(total: int, draw: random.Random) -> int:
    """A sum that is off: mostly by a forgotten or an extra ten, as the model's own mistakes are."""
    off = draw.choice([-10, -10, -10, 10, -1, 1, draw.randint(2, 9)])
    return total + off if total + off >= 0 else total + 10


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
