"""Problems of reasoning-gym: about a hundred kinds, generated, each with a verifier; no download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quadriga.data.files import Row
from quadriga.data.prep.sources import make_row, user_turn
from quadriga.errors import DataError

INSTRUCTION = "Give your final answer between <answer> and </answer>."
_TRIES = 4
"""So many times the rows asked for are drawn at most, where some are in the test rows."""
_MADE_OF_OTHERS = "composite"


def task_names() -> list[str]:
    """All tasks. Not `composite`, which draws from others: name these instead."""
    return sorted(set(_factory().DATASETS) - {_MADE_OF_OTHERS})


def generate_reasoning_gym(
    tasks: Sequence[str],
    *,
    train_size: int = 4096,
    test_size: int = 512,
    seed: int = 0,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    instruction: str = INSTRUCTION,
) -> tuple[list[Row], list[Row]]:
    """(training rows, test rows), the tasks in turn; no test question is in training.

    Args:
        tasks: names; one row in `len(tasks)` is of each.
        train_size: rows of all tasks together, as is `test_size`.
        configs: for each task, fields of its configuration in reasoning-gym that differ from its defaults.

    Raises:
        DataError: an unknown task or field, sizes that cannot be, or a task with too few different problems.
    """
    configs = configs or {}
    _check(tasks, configs, train_size, test_size)
    train, test = [], []
    for number, task in enumerate(tasks):
        ours, held_out = (size // len(tasks) + (number < size % len(tasks)) for size in (train_size, test_size))
        own_train, own_test = _of_one(task, ours, held_out, seed, dict(configs.get(task, {})))
        train.append(own_train)
        test.append(own_test)
    return (
        _rows(tasks, train, "train", configs, instruction),
        _rows(tasks, test, "test", configs, instruction),
    )


def _check(tasks: Sequence[str], configs: Mapping[str, Any], train_size: int, test_size: int) -> None:
    known = task_names()
    if not tasks or len(set(tasks)) < len(tasks):
        raise DataError(f"--task {','.join(tasks)!r} names no task, or one twice", "give different names, with commas")
    for task in [*tasks, *configs]:
        if task not in known:
            raise DataError(f"reasoning-gym has no task {task!r}", f"it has: {', '.join(known)}")
    if unused := [task for task in configs if task not in tasks]:
        raise DataError(f"the task {unused[0]!r} is configured, but it is not in --task", "add it there")
    if train_size < len(tasks) or test_size < len(tasks):
        raise DataError(f"{train_size=} and {test_size=} do not give every task a row", "ask for more rows")


def _of_one(
    task: str, train_size: int, test_size: int, seed: int, config: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    entries = _entries(task, test_size + _TRIES * train_size, seed, config)
    test = [entry for _, entry in zip(range(test_size), entries)]
    held_out = {entry["question"] for entry in test}
    train: list[dict[str, Any]] = []
    for entry in entries:
        if entry["question"] not in held_out:
            train.append(entry)
            if len(train) == train_size:
                return train, test
    raise DataError(
        f"the task {task!r} has too few different problems: {len(train)} of {train_size} for training",
        "ask for fewer rows, or make its problems larger by its configuration",
    )


def _entries(task: str, size: int, seed: int, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
    except (TypeError, AssertionError, ValueError) as problem:
        raise DataError(
            f"reasoning-gym cannot make the task {task!r} with {config}: {problem}",
            "correct the fields of its configuration",
        ) from problem
    for index in range(size):
        yield dataset[index]


def _rows(
    tasks: Sequence[str], by_task: list[list[Any]], split: str, configs: Mapping[str, Any], instruction: str
) -> list[Row]:
    rows: list[Row] = []
    for place in range(max(map(len, by_task))):
        for task, entries in zip(tasks, by_task):
            if place < len(entries):
                entry = entries[place]
                question = entry["question"].strip()
                rows.append(
                    make_row(
                        data_source=f"reasoning_gym/{task}",
                        prompt=user_turn(f"{question}\n{instruction}" if instruction else question),
                        ability="reasoning",
                        ground_truth=json.dumps({"entry": entry, "config": dict(configs.get(task, {}))}),
                        split=split,
                        index=len(rows),
                        question=question,
                    )
                )
    return rows


def _factory() -> Any:
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise DataError("this needs the package `reasoning-gym`", "pip install 'quadriga[reasoning_gym]'") from error
    return factory
