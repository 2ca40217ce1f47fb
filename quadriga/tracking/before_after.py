"""The same questions before and after training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quadriga.errors import printable
from quadriga.tracking.run_directory import RunDirectory

_LONGEST_TEXT = 400


@dataclass(frozen=True)
class BeforeAfter:
    """One question, its answer, and what the model said before and after."""

    question: str
    ground_truth: str
    before: str
    before_is_right: bool
    after: str
    after_is_right: bool


def choose_before_after(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]], count: int = 3
) -> list[BeforeAfter]:
    """The first questions, in the order of the validation set, that the model had wrong before training.

    How it answers them afterwards has no say in the choice. Where it had too few wrong, others fill up.

    Args:
        before, after: sample rows (`prompt`, `response`, `score`, and if there, `acc` and `ground_truth`).
    """
    later = _by_prompt(after)
    pairs = [(row, later[prompt]) for prompt, row in _by_prompt(before).items() if prompt in later]
    pairs.sort(key=lambda pair: _is_right(pair[0]))  # stable: wrong ones first, else in order
    return [
        BeforeAfter(
            question=str(one["prompt"]).strip(),
            ground_truth=str(one.get("ground_truth", "")),
            before=str(one["response"]).strip(),
            before_is_right=_is_right(one),
            after=str(other["response"]).strip(),
            after_is_right=_is_right(other),
        )
        for one, other in pairs[:count]
    ]


def before_after_of_run(run_directory: RunDirectory, count: int = 3) -> list[BeforeAfter]:
    """From the first and the last validation of a run; empty where there were not two."""
    steps = list(run_directory.sample_files("val"))
    if len(steps) < 2:
        return []
    before, after = (run_directory.read_samples(step, "val") for step in (steps[0], steps[-1]))
    return choose_before_after(before, after, count)


def show_before_after(pairs: list[BeforeAfter], console: Console | None = None) -> None:
    """Print them as a table; nothing where there are none."""
    if not pairs:
        return
    table = Table(title="Before and after", title_justify="left", title_style="bold", show_lines=True)
    for column in ("question", "answer", "before training", "after training"):
        table.add_column(column, overflow="fold")
    for pair in pairs:
        table.add_row(
            Text(printable(shortened(pair.question))),
            Text(printable(shortened(pair.ground_truth)), "bold"),
            _answer(pair.before, pair.before_is_right),
            _answer(pair.after, pair.after_is_right),
        )
    (console or Console()).print(table)


def shortened(text: str) -> str:
    """The text, its middle left out when it is long."""
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} … {text[-half:]}"


def _answer(text: str, is_right: bool) -> Text:
    mark = ("✓ ", "bold green") if is_right else ("✗ ", "bold red")
    return Text.assemble(mark, printable(shortened(text)))


def _by_prompt(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The first row of each prompt, in order."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault(str(row["prompt"]), row)
    return found


def _is_right(row: Mapping[str, Any]) -> bool:
    """By the same rule as the reward outcomes: accuracy where the reward gives one, else a score above 0."""
    accuracy = row.get("acc")
    return bool(accuracy > 0.5) if accuracy is not None else (row.get("score") or 0) > 0
