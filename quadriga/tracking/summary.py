"""The end of a run: what it achieved, in numbers, pictures and answers.

`report(run_directory, model_path)` writes `curves.svg`, `summary.html` and, with matplotlib, `curves.png` to the run
directory, and prints the summary, the accuracy curve, and three questions before and after.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from quadriga.atomic_file import write_atomically
from quadriga.errors import printable
from quadriga.tracking.before_after import Questions, before_after_of_run, shortened, show_before_after
from quadriga.tracking.curves import Panel, run_panels
from quadriga.tracking.figures import in_words
from quadriga.tracking.metric_names import METRICS
from quadriga.tracking.plots import render_svg, write_png
from quadriga.tracking.run_directory import RunDirectory
from quadriga.tracking.run_state import (
    ACCURACY,
    REWARD,
    STEP_SECONDS,
    THROUGHPUT,
    is_validation_accuracy,
    validation_accuracies,
)
from quadriga.tracking.terminal_chart import draw_chart

_COUNTED_SECONDS = (STEP_SECONDS, "timing_s/testing", "timing_s/save_checkpoint")
_SUPERVISED = ("val/loss", "val/accuracy", "train/loss", "train/accuracy")
_TOLD = {REWARD, ACCURACY, THROUGHPUT, "perf/total_num_tokens", *_COUNTED_SECONDS, *_SUPERVISED}


@dataclass(frozen=True)
class RunSummary:
    """What came out of a run.

    Where two values are meant, the first and the last, there is one if the run has no more, and none if it has none.

    Attributes:
        accuracies: held-out accuracy by data source, at the first and the last validation.
        supervised: loss and accuracy of a supervised run, training and held-out: label → first and last value, each a mean of
            some steps in training; empty for other runs.
        reward: mean of the first and of the last steps (a tenth of them, ten at most).
        seconds: spent in steps, validations and checkpoints.
        tokens_per_second: over the whole run; None if no tokens were counted.
    """

    name: str
    steps: int
    seconds: float
    tokens_per_second: float | None
    accuracies: dict[str, tuple[float, ...]]
    reward: tuple[float, ...]
    supervised: dict[str, tuple[float, ...]] = field(default_factory=dict)
    model_path: Path | None = None
    pictures: tuple[Path, ...] = ()

    @property
    def headline(self) -> str:
        """One line: `held-out accuracy 41.0% → 92.3% · 120 steps in 1 min 42 s`."""
        parts = [f"{_accuracy_label(s, self)} {_change(ends, '.1%')}" for s, ends in self.accuracies.items()]
        if not parts and self.reward:
            parts = [f"reward {_change(self.reward, '.3g')}"]
        if not parts:
            parts = [f"{label} {_change(ends, '.3g')}" for label, ends in list(self.supervised.items())[:2]]
        return " · ".join([*parts, f"{self.steps:,} steps in {in_words(self.seconds)}"])


def summarize(run_directory: RunDirectory, model_path: str | Path | None = None) -> RunSummary:
    """The summary of what metrics.jsonl holds, also of a run that is not over."""
    lines = run_directory.read_metrics(_is_told)
    steps = [line for line in lines if line["step"] > 0]
    accuracies: dict[str, tuple[float, ...]] = {}
    for line in lines:
        for source, accuracy in validation_accuracies(line).items():
            accuracies[source] = (*accuracies.get(source, ())[:1], accuracy)
    rewards = [line[REWARD] for line in steps if line.get(REWARD) is not None]
    return RunSummary(
        name=f"{run_directory.path.parent.name} / {run_directory.path.name}",
        steps=len(steps),
        seconds=_seconds(lines),
        tokens_per_second=_tokens_per_second(steps),
        accuracies=accuracies,
        reward=_first_and_last(rewards),
        supervised={
            METRICS[name].label: ends
            for name in _SUPERVISED
            if (ends := _first_and_last([line[name] for line in steps if line.get(name) is not None]))
        },
        model_path=None if model_path is None else Path(model_path),
    )


@functools.cache
def _is_told(name: str) -> bool:
    """Whether a summary or a curve is made from this metric."""
    return name in _TOLD or is_validation_accuracy(name)


def _first_and_last(values: list[float]) -> tuple[float, ...]:
    """Mean of the first and of the last tenth of them, ten at most."""
    few = max(min(len(values) // 10, 10), 1)
    return (fmean(values[:few]), fmean(values[-few:])) if len(values) > 1 else tuple(values)


def _change(ends: tuple[float, ...], form: str) -> str:
    """`41.0% → 82.0%`."""
    return " → ".join(format(value, form) for value in ends)


def write_page(run_directory: RunDirectory) -> None:
    """`summary.html` of a run that goes on."""
    summary, panels = summarize(run_directory), run_panels(run_directory.read_metrics(_is_told))
    if panels:
        svg = render_svg(panels, summary.name, summary.headline)
        page = _page(summary, svg, before_after_of_run(run_directory))
        write_atomically(run_directory.path / "summary.html", page.encode())


def write_pictures(run_directory: RunDirectory, summary: RunSummary, questions: Questions) -> list[Path]:
    """`curves.svg`, `summary.html` and, with matplotlib, `curves.png`; returns what was written, best to look at first."""
    panels = run_panels(run_directory.read_metrics(_is_told))
    if not panels:
        return []
    svg = render_svg(panels, summary.name, summary.headline)
    html, picture, png = (run_directory.path / name for name in ("summary.html", "curves.svg", "curves.png"))
    write_atomically(html, _page(summary, svg, questions).encode())
    write_atomically(picture, svg.encode())
    return [html, picture] + ([png] if write_png(png, panels, summary.name, summary.headline) else [])


def show_summary(summary: RunSummary, panels: list[Panel], console: Console | None = None) -> None:
    """Print the first panel as a chart, and the summary."""
    console = console or Console()
    if panels:
        console.print()
        console.print(draw_chart(panels[0], width=max(min(console.width - 8, 72), 20)))
    console.print()
    facts = _facts(summary)
    width = max(len(label) for label, _ in facts)
    for label, value in facts:  # soft-wrapped: a long path stays one piece that can be copied
        console.print(Text.assemble((printable(label).ljust(width + 3), "dim"), printable(value)), soft_wrap=True)


def report(
    run_directory: RunDirectory, model_path: str | Path | None = None, console: Console | None = None
) -> RunSummary:
    """Everything that the end of a run has to show, on disk and on the console."""
    console = console or Console()
    summary = summarize(run_directory, model_path)
    questions = before_after_of_run(run_directory)
    summary = replace(summary, pictures=tuple(write_pictures(run_directory, summary, questions)))
    show_summary(summary, run_panels(run_directory.read_metrics(_is_told)), console)
    if questions.pairs:
        console.print()
        show_before_after(questions, console)
    return summary


def _facts(summary: RunSummary) -> list[tuple[str, str]]:
    facts = []
    for source, ends in summary.accuracies.items():
        points = f"  ({(ends[-1] - ends[0]) * 100:+.1f} points)" if len(ends) > 1 else ""
        facts.append((_accuracy_label(source, summary), _change(ends, ".1%") + points))
    facts += [(label, _change(ends, ".3f")) for label, ends in summary.supervised.items()]
    if summary.reward:
        facts.append(("reward", _change(summary.reward, ".3f")))
    speed = "" if summary.tokens_per_second is None else f" · {summary.tokens_per_second:,.0f} tokens/s"
    facts.append(("steps", f"{summary.steps:,} in {in_words(summary.seconds)}{speed}"))
    if summary.model_path is not None:
        facts.append(("model", _shown(summary.model_path)))
    if summary.pictures:
        facts.append(("curves", _shown(summary.pictures[0])))
    return facts


def _shown(path: Path) -> str:
    """Relative to the working directory where it lies inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _accuracy_label(source: str, summary: RunSummary) -> str:
    return "held-out accuracy" if len(summary.accuracies) == 1 else f"accuracy on {source}"


def _seconds(lines: list[dict[str, Any]]) -> float:
    """Steps, validations and checkpoints; the pauses between a stop and a resume are in none of them."""
    return sum(line.get(name) or 0.0 for line in lines for name in _COUNTED_SECONDS)


def _tokens_per_second(steps: list[dict[str, Any]]) -> float | None:
    counted = [
        (line["perf/total_num_tokens"], line[STEP_SECONDS])
        for line in steps
        if line.get("perf/total_num_tokens") and line.get(STEP_SECONDS)
    ]
    if counted:
        return sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)
    speeds = [line[THROUGHPUT] for line in steps if line.get(THROUGHPUT) is not None]
    return fmean(speeds) if speeds else None


_PAGE_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; max-width: 980px; margin: 2rem auto; padding: 0 1rem }
svg { max-width: 100%; height: auto; border: 1px solid #8884; border-radius: 8px }
table { border-collapse: collapse; margin: 1.5rem 0 }
td, th { text-align: left; vertical-align: top; padding: 0.35rem 1rem 0.35rem 0; border-bottom: 1px solid #8884 }
td { white-space: pre-wrap; overflow-wrap: anywhere }
.right { color: #0f9d58 } .wrong { color: #d93025 }
"""


def _page(summary: RunSummary, svg: str, questions: Questions) -> str:
    facts = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in _facts(summary))
    rows = "".join(
        f"<tr><td>{escape(shortened(pair.question))}</td><td>{escape(shortened(pair.ground_truth))}</td>"
        f"{_answer_cell(pair.before, pair.before_is_right)}{_answer_cell(pair.after, pair.after_is_right)}</tr>"
        for pair in questions.pairs
    )
    head = f"<tr>{''.join(f'<th>{escape(heading)}</th>' for heading in questions.headings)}</tr>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(summary.name)}</title>'
        f"<style>{_PAGE_STYLE}</style></head><body>\n{svg}<table>{facts}</table>\n"
        + (f"<table>{head}{rows}</table>\n" if rows else "")
        + "</body></html>\n"
    )


def _answer_cell(text: str, is_right: bool) -> str:
    return f'<td><span class="{"right" if is_right else "wrong"}">{"✓" if is_right else "✗"}</span> {escape(shortened(text))}</td>'
