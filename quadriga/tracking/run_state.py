"""Where a run stands, put together from its events; what the console draws."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from quadriga.tracking.events import Event

REWARD = "critic/score/mean"
ACCURACY = "reward/correct"
THROUGHPUT = "perf/total_throughput"
SPEEDS = (THROUGHPUT, "train/tokens_per_s")
STEP_SECONDS = "timing_s/step"
MAIN_METRICS = {REWARD: "reward", ACCURACY: "accuracy", "train/loss": "loss", "train/accuracy": "accuracy"}
"""What a viewer draws first, of those that a run records: name → label."""
_VALIDATION_ACCURACY = re.compile(r"val/(?P<source>.+)/acc/mean@(?P<n>\d+)")
_RECENT_STEPS = 20


@dataclass
class Validation:
    """Held-out accuracy of one data source: its first value and its newest."""

    first_step: int
    first: float
    last_step: int
    last: float


@dataclass
class RunState:
    """Give it every event, in order; read the fields."""

    project: str = ""
    experiment: str = ""
    run_directory: str = ""
    start_step: int = 0
    total_steps: int | None = None
    step: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)
    histories: dict[str, deque[float]] = field(default_factory=dict)
    """The course of each of the main metrics."""
    validations: dict[str, Validation] = field(default_factory=dict)
    open_phases: list[str] = field(default_factory=list)
    status: str = ""
    _steps_ended: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS + 1))

    def apply(self, event: Event) -> None:
        """Take one event in."""
        kind = event["kind"]
        if kind == "start":
            for name in ("project", "experiment", "run_directory", "start_step", "total_steps", "validations"):
                setattr(self, name, event.get(name, getattr(self, name)))
            self.step, self.status = self.start_step, ""
            self._steps_ended.append(event["time"])
        elif kind == "phase":
            self.open_phases = list(event["open"])
        elif kind == "step":
            self._take_step(event)
        elif kind == "end":
            self.status = event["status"]
            self.open_phases = []

    def _take_step(self, event: Event) -> None:
        values: dict[str, float | None] = event["metrics"]
        self.step = event["step"]
        note_validations(self.validations, self.step, values)
        if self.step == 0:  # only a validation: no step has been taken
            self._steps_ended.clear()
        else:
            self.metrics = values
        self._steps_ended.append(event["time"])
        for name in MAIN_METRICS:
            if (value := values.get(name)) is not None:
                self.histories.setdefault(name, deque(maxlen=4096)).append(value)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean of the newest steps, with everything between them; None before the first has ended."""
        ended = self._steps_ended
        if self.step <= self.start_step or len(ended) < 2:
            return None
        return max((ended[-1] - ended[0]) / (len(ended) - 1), 0.0)

    @property
    def seconds_left(self) -> float | None:
        """Until the last step has ended, as of the newest event."""
        pace = self.seconds_per_step
        return None if pace is None or self.total_steps is None else pace * max(self.total_steps - self.step, 0)

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase of the newest step, the whole step left out."""
        return {
            name.removeprefix("timing_s/"): value
            for name, value in self.metrics.items()
            if name.startswith("timing_s/") and name != STEP_SECONDS and value is not None
        }


def note_validations(validations: dict[str, Validation], step: int, metrics: Mapping[str, Any]) -> None:
    """Take the held-out accuracies of a step in."""
    for source, accuracy in validation_accuracies(metrics).items():
        seen = validations.setdefault(source, Validation(step, accuracy, step, accuracy))
        seen.last_step, seen.last = step, accuracy


def validation_accuracies(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Held-out accuracy by data source, of those that these metrics hold; with several n, that of the largest."""
    found: dict[str, tuple[int, float]] = {}
    for name, value in metrics.items():
        match = _VALIDATION_ACCURACY.fullmatch(name)
        if match and value is not None:
            source, n = match["source"], int(match["n"])
            if source not in found or n > found[source][0]:
                found[source] = (n, value)
    return {source: value for source, (_, value) in found.items()}


def is_validation_accuracy(name: str) -> bool:
    """Whether `validation_accuracies` looks at the metric."""
    return _VALIDATION_ACCURACY.fullmatch(name) is not None


def sparkline(values: Iterable[float], width: int) -> str:
    """The course of `values` in at most `width` characters; each stands for the mean of an equal share of them."""
    numbers = list(values)
    if not numbers or width < 1:
        return ""
    if len(numbers) > width:
        edges = [round(i * len(numbers) / width) for i in range(width + 1)]
        numbers = [fmean(numbers[a:b]) for a, b in pairwise(edges)]
    low, high = min(numbers), max(numbers)
    bars = "▁▂▃▄▅▆▇█"
    if high == low:
        return bars[3] * len(numbers)
    return "".join(bars[min(int((number - low) / (high - low) * len(bars)), len(bars) - 1)] for number in numbers)
