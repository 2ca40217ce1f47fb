"""Sums to calculate, generated: a task that needs no download and that a tiny model can learn in minutes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quadriga.data.files import Row
from quadriga.data.prep.sources import make_row, user_turn
from quadriga.data.sampler import raw_stream, seeded_order
from quadriga.errors import DataError

DATA_SOURCE = "arithmetic"
INSTRUCTION = 'Output the result after "####".'
STYLES = ("plain", "chat")
_MAX_LISTED = 2**22  # problem spaces up to this size are shuffled as a whole, larger ones are drawn from
_STREAM = 0
BUILTIN_TASK: dict[str, Any] = {"operands": 2, "max_value": 79, "ops": "+", "test_size": 256, "seed": 0}
"""The problems of `builtin:arithmetic/…`, which the embedded model was made for."""


def generate_arithmetic(
    *,
    operands: int = 2,
    max_value: int = 99,
    ops: str = "+-",
    train_size: int | None = 4096,
    test_size: int = 512,
    seed: int = 0,
    style: str = "plain",
) -> tuple[list[Row], list[Row]]:
    """(training rows, test rows), all different; a test problem is not in training in another order either (3+4, 4+3).

    The test rows depend on everything but `train_size`. `extra_info` holds `question` ("12+7=") and `answer`
    ("#### 19"), so that the same file serves supervised training.

    Args:
        operands: numbers in a problem.
        max_value: each of them is in 0 … max_value.
        ops: operators to draw from, of `+-*`; `*` binds stronger.
        train_size: None: all problems that are left, where there are few enough to list.
        style: `plain`: the prompt is the text "12+7="; `chat`: a user message that asks for it.
    """
    _check(operands, max_value, ops, train_size, test_size, style)
    test: list[str] = []
    train: list[str] = []
    held_out: set[str] = set()
    for problem in _problems(operands, max_value, ops, seed):
        if len(test) < test_size:
            test.append(problem)
            held_out.add(_canonical(problem))
        elif len(train) == train_size:
            break
        elif _canonical(problem) not in held_out:
            train.append(problem)
    if not train or (train_size is not None and len(train) < train_size):
        raise DataError(
            f"there are only {len(test) + len(train)} distinct problems with {operands} operands up to {max_value} and "
            f"operators {ops!r}, {test_size + (train_size or 1)} were asked for",
            "allow larger values, more operands or more operators, or ask for fewer rows",
        )
    return _rows(train, "train", style), _rows(test, "test", style)


def _check(operands: int, max_value: int, ops: str, train_size: int | None, test_size: int, style: str) -> None:
    if operands < 2 or max_value < 1 or (train_size is not None and train_size < 1) or test_size < 1:
        raise DataError(
            f"no dataset has {operands=}, {max_value=}, {train_size=}, {test_size=}",
            "use at least 2 operands, and at least 1 for the others",
        )
    if not ops or set(ops) - set("+-*"):
        raise DataError(f"operators {ops!r} are unknown", "use one or more of + - *")
    if train_size is None and _num_problems(operands, max_value, ops) > _MAX_LISTED:
        raise DataError("there are too many problems of this kind to list them all", "give train_size")
    if style not in STYLES:
        raise DataError(f"style {style!r} is unknown", f"use one of {', '.join(STYLES)}")


def _problems(operands: int, max_value: int, ops: str, seed: int) -> Iterator[str]:
    """Distinct problems in the order of the seed; all of them where they can be listed."""
    ops = "".join(dict.fromkeys(ops))
    values = max_value + 1
    for code in _codes(_num_problems(operands, max_value, ops), seed):
        code, first = divmod(code, values)
        problem = str(first)
        for _ in range(operands - 1):
            code, op = divmod(code, len(ops))
            code, value = divmod(code, values)
            problem += f"{ops[op]}{value}"
        yield problem


def _num_problems(operands: int, max_value: int, ops: str) -> int:
    return (max_value + 1) ** operands * len(set(ops)) ** (operands - 1)


def _codes(total: int, seed: int) -> Iterator[int]:
    if total <= _MAX_LISTED:
        yield from seeded_order(total, seed, _STREAM).tolist()
        return
    seen: set[int] = set()
    stream = raw_stream(seed, _STREAM)
    words = -(-total.bit_length() // 64) + 1  # one word more than needed makes the bias of % negligible
    while True:
        code = int.from_bytes(np.asarray(stream.random_raw(words), dtype="<u8").tobytes(), "little") % total
        if code not in seen:
            seen.add(code)
            yield code


def _canonical(problem: str) -> str:
    """The same text for problems that differ only in the order of factors and of added or subtracted terms."""
    terms = problem.replace("-", "+-").split("+")
    ordered = []
    for term in terms:
        factors = sorted(term.lstrip("-").split("*"), key=int)
        ordered.append(("-" if term.startswith("-") else "") + "*".join(factors))
    return "+".join(sorted(ordered))


def solve(problem: str) -> int:
    """The value of a problem such as `3+4*2-1`."""
    total = 0
    for term in problem.replace("-", "+-").split("+"):
        product = -1 if term.startswith("-") else 1
        for factor in term.lstrip("-").split("*"):
            product *= int(factor)
        total += product
    return total


def _rows(problems: list[str], split: str, style: str) -> list[Row]:
    rows = []
    for index, problem in enumerate(problems):
        question, answer = f"{problem}=", str(solve(problem))
        prompt = question if style == "plain" else user_turn(f"{question} {INSTRUCTION}")
        rows.append(
            make_row(
                data_source=DATA_SOURCE, prompt=prompt, ability="math", ground_truth=answer,
                split=split, index=index, question=question, answer=f"#### {answer}",
            )
        )  # fmt: skip
    return rows
