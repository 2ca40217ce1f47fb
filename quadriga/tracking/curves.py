"""The curves that tell how a run went: accuracy, reward and loss over the steps, made from the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from quadriga.tracking.run_state import ACCURACY, REWARD, validation_accuracies

Points = list[tuple[float, float]]
_MAX_POINTS = 600
_TRAINING_COLOR = 1
_HELD_OUT_COLORS = (0, 2, 3, 4)


@dataclass(frozen=True)
class Curve:
    """One line of a panel.

    Attributes:
        label: its name, in a word or two.
        points: `(step, value)` in order of the steps.
        color: index into the palette of whoever draws it; a kind of curve has the same one in every panel.
        is_sparse: few, exact points (validations), drawn with markers; else many noisy ones, drawn smoothed.
    """

    label: str
    points: Points
    color: int
    is_sparse: bool = False

    @property
    def smooth(self) -> Points:
        """The mean of each point and its neighbours on both sides; as it is when sparse or short."""
        reach = 0 if self.is_sparse else len(self.points) // 40
        values = [y for _, y in self.points]
        return [(x, fmean(values[max(i - reach, 0) : i + reach + 1])) for i, (x, _) in enumerate(self.points)]


@dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes. `x_range` is in steps; `is_share`: values from 0 to 1, shown as percent."""

    title: str
    curves: list[Curve]
    x_range: tuple[float, float]
    is_share: bool = False

    def format(self, value: float) -> str:
        return f"{value:.1%}" if self.is_share else f"{value:.3g}"

    @property
    def y_range(self) -> tuple[float, float]:
        """0 to 1 for a share, so that two runs can be compared by eye; else what the values need."""
        if self.is_share:
            return 0.0, 1.0
        ys = [y for curve in self.curves for _, y in curve.points]
        low, high = min(ys), max(ys)
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return low - room, high + room


def run_panels(lines: Iterable[dict[str, Any]]) -> list[Panel]:
    """Accuracy (held-out by data source, four at most, and training), reward, and of supervised runs the loss; those of
    them that were recorded."""
    lines = list(lines)
    training_accuracy: Points = []
    reward: Points = []
    held_out: dict[str, Points] = {}
    for line in lines:
        step = line["step"]
        for points, name in ((training_accuracy, ACCURACY), (reward, REWARD)):
            if step > 0 and line.get(name) is not None:
                points.append((step, line[name]))
        for source, value in validation_accuracies(line).items():
            held_out.setdefault(source, []).append((step, value))
    one = len(held_out) == 1
    accuracy = [
        Curve("held-out" if one else source, points, color, is_sparse=True)
        for (source, points), color in zip(held_out.items(), _HELD_OUT_COLORS)
    ]
    if training_accuracy:
        accuracy.append(Curve("training", _thinned(training_accuracy), _TRAINING_COLOR))
    pairs, losses = _held_out_and_training(lines, "accuracy"), _held_out_and_training(lines, "loss")
    accuracy += pairs
    supervised = [curve.points for curve in (*pairs, *losses)]
    recorded = [x for points in (training_accuracy, reward, *held_out.values(), *supervised) for x, _ in points]
    steps = (min(recorded), max(max(recorded), min(recorded) + 1)) if recorded else (0.0, 1.0)
    panels = [Panel("Accuracy", accuracy, steps, is_share=True)] if accuracy else []
    if reward:
        panels.append(Panel("Reward", [Curve("training", _thinned(reward), _TRAINING_COLOR)], steps))
    if losses:
        panels.append(Panel("Loss", losses, steps))
    return panels


def _held_out_and_training(lines: list[dict[str, Any]], name: str) -> list[Curve]:
    """`val/<name>` and `train/<name>` of a supervised run."""
    points: dict[str, Points] = {
        which: [(x["step"], x[f"{which}/{name}"]) for x in lines if x.get(f"{which}/{name}") is not None]
        for which in ("val", "train")
    }
    curves = [Curve("held-out", points["val"], _HELD_OUT_COLORS[0], is_sparse=True)] if points["val"] else []
    return curves + ([Curve("training", _thinned(points["train"]), _TRAINING_COLOR)] if points["train"] else [])


def ticks(low: float, high: float, about: int, smallest: float = 0.0) -> list[float]:
    """Round numbers within `[low, high]`, roughly `about` of them, evenly spaced by `smallest` or more."""
    raw = (high - low) / max(about, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = max(min((m * magnitude for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw))), smallest)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _thinned(points: Points) -> Points:
    """At most `_MAX_POINTS`: each the mean of its neighbours, so that a long run makes a small picture."""
    if len(points) <= _MAX_POINTS:
        return points
    edges = [round(i * len(points) / _MAX_POINTS) for i in range(_MAX_POINTS + 1)]
    parts = [points[a:b] for a, b in pairwise(edges)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
