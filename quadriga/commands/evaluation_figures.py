"""From scored samples to figures with 95 % confidence intervals, to a table of them, and to a run directory.

Prompts are the independent draws; samples of one prompt are not. So an interval is over one value a prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from quadriga.dashboard.files import read_json
from quadriga.errors import ConfigError
from quadriga.tracking import RunDirectory
from quadriga.tracking.run_record import RunRecord
from quadriga.trainer.ppo.validation import prompt_values

Z = 1.959964
"""Standard deviations on either side that hold 95 % of a normal distribution."""


@dataclass(frozen=True)
class Figure:
    """A mean over prompts, and its 95 % interval where there is one."""

    data_source: str
    name: str
    value: float
    low: float | None
    high: float | None
    prompts: int

    def as_text(self) -> tuple[str, str]:
        form = ".1%" if _is_share(self.name) else ".3f"
        between = "" if self.low is None or self.high is None else f"{self.low:{form}} to {self.high:{form}}"
        return f"{self.value:{form}}", between

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(samples: Sequence[dict[str, Any]], n: int) -> list[Figure]:
    """Figures per data source. A sample has data_source, row, score, acc, pred, outcome, finish_reason, response_tokens."""
    figures = []
    for source in dict.fromkeys(s["data_source"] for s in samples):
        own = sorted((s for s in samples if s["data_source"] == source), key=lambda s: (s["row"], s["sample"]))
        groups: dict[int, list[int]] = {}
        for at, sample in enumerate(own):
            groups.setdefault(sample["row"], []).append(at)
        rows = list(groups.values())
        results = {name: [s[name] for s in own] for name in ("acc", "score", "pred")}
        columns = prompt_values(rows, results, n)
        shares = {
            "unparsed": [s["outcome"] == "unparsed" for s in own],
            "errors": [s["outcome"] in ("error", "timeout") for s in own],
            "cut off": [s["finish_reason"] == "length" for s in own],
        }
        for name, flags in shares.items():
            if name == "cut off" or any(flags):
                columns[name] = [sum(flags[at] for at in group) / len(group) for group in rows]
        lengths = [s["response_tokens"] for s in own]
        columns["response_tokens"] = [sum(lengths[at] for at in group) / len(group) for group in rows]
        for name, values in columns.items():
            per_prompt = n if "best@" not in name and "maj@" not in name else 1
            is_share = _is_share(name) and all(0 <= value <= 1 for value in values)  # acc is whatever a scorer says
            interval = share_interval(values, per_prompt) if is_share else mean_interval(values)
            low, high = interval or (None, None)
            figures.append(Figure(source, name, sum(values) / len(values), low, high, len(values)))
    return figures


def _is_share(name: str) -> bool:
    """Whether the figure is between 0 and 1."""
    return not name.startswith(("score/", "response_tokens"))


def print_table(figures: Sequence[Figure]) -> None:
    """A table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("data source", "figure"):
        table.add_column(heading)
    for heading in ("value", "95 % interval", "prompts"):
        table.add_column(heading, justify="right")
    for figure in figures:
        table.add_row(figure.data_source, figure.name, *figure.as_text(), str(figure.prompts))
    Console(width=None if Console().is_terminal else 100).print(table)


def share_interval(values: Sequence[float], samples_per_prompt: int = 1) -> tuple[float, float]:
    """Interval of a mean of values in [0, 1]: Wilson's, which is right near 0 and 1 too, where others have no width.

    With several samples a prompt, values vary less than single right-or-wrong answers would: the interval is that of as
    many independent answers as would vary as little, at most as many as there were samples.
    """
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / n
    draws: float = n
    if 0 < mean < 1:
        most = n * samples_per_prompt
        draws = most if variance == 0 else min(most, n * mean * (1 - mean) / variance)
    centre = (mean + Z * Z / (2 * draws)) / (1 + Z * Z / draws)
    half = Z / (1 + Z * Z / draws) * math.sqrt(mean * (1 - mean) / draws + Z * Z / (4 * draws * draws))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Interval of a mean of any values, from their spread; None for a single one, which has none."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    half = Z * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean - half, mean + half


STEP = 0
"""Nothing is trained: all samples and figures are of this step. The progress that is told counts samples instead."""


class EvaluationRecord:
    """Writes samples as they come, and figures at the end. A context manager around all of it: what ends it is recorded.

    Args:
        folder: the run directory; what an earlier evaluation left there is moved aside.
        options: what the command was given.
        total: samples that are to come.

    Raises:
        ConfigError: the folder is that of another kind of run.
    """

    def __init__(self, folder: Path, options: dict[str, Any], total: int) -> None:
        kind = (read_json(folder, "status.json") or {}).get("kind", "eval")
        if kind != "eval" or any(folder.glob("checkpoints/global_step_*")):
            raise ConfigError(
                f"--run-dir {folder} is the folder of a {kind if kind != 'eval' else 'training'} run",
                "give the evaluation a folder of its own",
            )
        self._directory = RunDirectory(folder)
        self._directory.begin()
        self._directory.write_config(options)
        about = {"kind": "eval", "changed": {"model": options["model"], "data": options["data"]}}
        self._record = RunRecord(folder, about)
        self._total, self._done = total, 0

    def __enter__(self) -> EvaluationRecord:
        self._tell("start", total_steps=self._total, start_step=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        status = "finished" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self._tell("end", status=status, error="" if error is None else f"{type(error).__name__}: {error}")
        self._record.close()
        self._directory.close()

    def add(self, sample: dict[str, Any]) -> None:
        """One more sample has its score."""
        self._directory.append_sample(STEP, sample, "val")
        self._done += 1
        self._tell("step", step=self._done, metrics={})

    def conclude(self, figures: Sequence[Figure]) -> None:
        """All of them have."""
        values = {f"val/{figure.data_source}/{figure.name}": figure.value for figure in figures}
        self._directory.append_metrics(STEP, values)
        accuracies = [figure for figure in figures if figure.name.startswith("acc/mean@")]
        self._record.tell(intervals={f.data_source: [f.low, f.high] for f in accuracies if f.low is not None})
        self._tell("step", step=self._done, metrics=values)

    def _tell(self, kind: str, **payload: Any) -> None:
        self._record.take({"kind": kind, "time": time.time(), **payload})
