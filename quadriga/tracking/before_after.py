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
_JUDGED = {"acc", "score"}
_MARGIN = {"chosen_reward", "rejected_reward"}


@dataclass(frozen=True)
class BeforeAfter:
    """One question, its answer, and what the model said to it, or which answer it preferred, before and after."""

    question: str
    ground_truth: str
    before: str
    before_is_right: bool
    after: str
    after_is_right: bool


@dataclass(frozen=True)
class Questions:
    """Some questions of two validations of a run, the first and the newest."""

    steps: tuple[int, int] = (0, 0)
    pairs: tuple[BeforeAfter, ...] = ()

    @property
    def headings(self) -> tuple[str, str, str, str]:
        """Of the columns of a table of them."""
        before, after = ("before training" if step == 0 else f"after step {step:,}" for step in self.steps)
        return "question", "answer", before, after


def choose_before_after(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]], count: int = 3
) -> tuple[BeforeAfter, ...]:
    """The first questions, in the order of the validation set, that the model had wrong before.

    How it answers them afterwards has no say in the choice. Where it had too few wrong, others fill up. Rows that nobody
    judged are passed over, such as those of supervised fine-tuning, which has no answers of the model.

    Args:
        before, after: sample rows: `prompt`, `response` and `score`, and if there, `acc` and `ground_truth`; or `prompt`,
            `chosen`, `rejected`, their rewards, and `acc`.
    """
    later = _by_prompt(after)
    both = [(row, later[prompt]) for prompt, row in _by_prompt(before).items() if prompt in later]
    both.sort(key=lambda pair: _is_right(pair[0]))  # stable: wrong ones first, else in order
    return tuple(
        BeforeAfter(
            question=str(one["prompt"]).strip(),
            ground_truth=str(one.get("ground_truth", one.get("chosen", ""))),
            before=_said(one),
            before_is_right=_is_right(one),
            after=_said(other),
            after_is_right=_is_right(other),
        )
        for one, other in both[:count]
    )


def before_after_of_run(run_directory: RunDirectory, count: int = 3) -> Questions:
    """From the first and the last validation of a run; none where there were not two."""
    steps = list(run_directory.sample_files("val"))
    if len(steps) < 2:
        return Questions()
    before, after = (run_directory.read_samples(step, "val") for step in (steps[0], steps[-1]))
    return Questions((steps[0], steps[-1]), choose_before_after(before, after, count))


def show_before_after(questions: Questions, console: Console | None = None) -> None:
    """Print them as a table; nothing where there are none."""
    if not questions.pairs:
        return
    table = Table(title="Before and after", title_justify="left", title_style="bold", show_lines=True)
    for column in questions.headings:
        table.add_column(column, overflow="fold")
    for pair in questions.pairs:
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
    """The first judged row of each prompt, in order."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if "prompt" in row and ("response" in row or row.keys() >= _MARGIN) and _JUDGED & row.keys():
            found.setdefault(str(row["prompt"]), row)
    return found


def _said(row: Mapping[str, Any]) -> str:
    """The response; of a pair of answers, which of them the model prefers, and by how much."""
    if "response" in row:
        return str(row["response"]).strip()
    margin = row["chosen_reward"] - row["rejected_reward"]
    return f"prefers {'this answer' if margin > 0 else 'the rejected one'} by {abs(margin):.3g}"


def _is_right(row: Mapping[str, Any]) -> bool:
    """By the same rule as the reward outcomes: accuracy where the reward gives one, else a score above 0."""
    accuracy = row.get("acc")
    return bool(accuracy > 0.5) if accuracy is not None else (row.get("score") or 0) > 0
