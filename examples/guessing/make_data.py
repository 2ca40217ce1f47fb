"""Secrets to guess, and lessons of games by somebody who guesses at random.

python examples/guessing/make_data.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

LESSONS, TRAIN = 4_000, 640


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    write(folder / "lessons.jsonl", [{"question": "=", "answer": game(draw)} for _ in range(LESSONS)])
    write(folder / "train.jsonl", [secret(draw.randrange(10)) for _ in range(TRAIN)])
    write(folder / "test.jsonl", [secret(number) for number in range(10)])


def game(draw: random.Random) -> str:
    number, text = draw.randrange(10), ""
    for _ in range(10):
        guess = draw.randrange(10)
        text += str(guess)
        if guess == number:
            break
        text += "+" if guess < number else "-"
    return text


def secret(number: int) -> dict:
    return {"data_source": "guessing", "prompt": "=", "extra_info": {"secret": number}}


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
