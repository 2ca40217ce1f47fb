"""The curves of runs: metrics.jsonl as columns, read on from where it was left, and thinned to what a screen can show."""

from __future__ import annotations

import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import Unreadable, finite, open_inside, parse_line, read_lines
from quadriga.tracking.metric_names import SECTIONS, describe, section_of

X_AXES = ("step", "tokens", "time")
MOST_METRICS = 4096
"""Names of one run beyond these are not taken up: a file that invents a new name in every line stays small."""


@dataclass
class Column:
    """One metric: the numbers of the lines that have it, and its values."""

    lines: array[int] = field(default_factory=lambda: array("I"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Table:
    """The columns of one run, and how far its file has been read."""

    inode: int = 0
    offset: int = 0
    axes: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in X_AXES})
    columns: dict[str, Column] = field(default_factory=dict)
    skipped: int = 0
    """Lines that were no metrics."""

    @property
    def bytes(self) -> int:
        return sum(12 * len(c.lines) + 200 for c in self.columns.values()) + 24 * len(self.axes["step"]) + 1000

    def add(self, line: dict[str, Any]) -> None:
        step, when = finite(line.get("step")), finite(line.get("time"))
        axes = self.axes
        number = len(axes["step"])
        if step is None or (number and step <= axes["step"][-1]):
            self.skipped += 1
            return
        axes["step"].append(step)
        axes["tokens"].append((axes["tokens"][-1] if number else 0.0) + _tokens(line))
        before = axes["time"][-1] if number else -math.inf  # a clock that is set back does not turn the curve back
        axes["time"].append(max(before, when) if when is not None else before if number else 0.0)
        for name, value in line.items():
            known = finite(value)
            if known is None or name in ("step", "time"):
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= MOST_METRICS:
                    continue
                column = self.columns[name] = Column()
            column.lines.append(number)
            column.values.append(known)


class Metrics:
    """Tables of the runs that are being looked at; those looked at last are kept, up to `most_bytes` in all."""

    def __init__(self, most_bytes: int = 96 << 20) -> None:
        self._most_bytes = most_bytes
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, run: Run) -> Table:
        """The run's metrics as they are now. Unreadable: it has none."""
        with self._lock:
            table = self._tables.pop(run.id, Table())
            try:
                with open_inside(run.path, "metrics.jsonl") as file:
                    table = _read_on(table, file)
            except OSError as error:
                raise Unreadable(f"metrics.jsonl cannot be read: {error.strerror}") from None
            self._tables[run.id] = table
            while len(self._tables) > 1 and sum(t.bytes for t in self._tables.values()) > self._most_bytes:
                self._tables.popitem(last=False)
            return table

    def names(self, run: Run) -> list[dict[str, Any]]:
        """Every metric of the run with its section, meaning, unit and newest value, in the order of the metric table."""
        table = self.table(run)
        order = {title: k for k, title in enumerate(SECTIONS)}
        found = []
        for name, column in table.columns.items():
            metric = describe(name)
            told = {"name": name, "section": section_of(name), "meaning": metric.meaning, "unit": metric.unit}
            found.append({**told, "points": len(column.values), "last": column.values[-1]})
        return sorted(found, key=lambda m: (order.get(m["section"], len(order)), m["section"]))

    def series(
        self,
        run: Run,
        names: list[str],
        x: str = "step",
        low: float = -math.inf,
        high: float = math.inf,
        points: int = 1000,
    ) -> dict[str, dict[str, list[float]]]:
        """Points of some metrics with `x` (one of `X_AXES`; time in seconds since the first line) in `[low, high]`.

        Where there are more than `points`, each stands for several: `y` is their mean, `lo` and `hi` their bounds, `n` their
        number.
        """
        table = self.table(run)
        axis = table.axes[x]
        origin = axis[0] if x == "time" and axis else 0.0
        found = {}
        for name in names:
            column = table.columns.get(name)
            if column is not None:
                first = bisect_left(column.lines, low, key=lambda line: axis[line] - origin)
                last = bisect_right(column.lines, high, key=lambda line: axis[line] - origin)
                xs = array("d", (axis[line] - origin for line in column.lines[first:last]))
                found[name] = thinned(xs, column.values[first:last], points)
        return found


def thinned(xs: array[float], ys: array[float], points: int) -> dict[str, list[float]]:
    """At most `points` buckets of equally many neighbours; as they are where they are few."""
    if len(xs) <= points:
        return {"x": xs.tolist(), "y": ys.tolist()}
    found: dict[str, list[float]] = {name: [] for name in ("x", "y", "lo", "hi", "n")}
    edges = [k * len(xs) // points for k in range(points + 1)]
    for start, end in pairwise(edges):
        values = ys[start:end]
        bucket = (xs[end - 1], math.fsum(values) / len(values), min(values), max(values), float(len(values)))
        for name, value in zip(found, bucket):
            found[name].append(value)
    return found


def _read_on(table: Table, file: Any) -> Table:
    about = os.fstat(file.fileno())
    if about.st_ino != table.inode or about.st_size < table.offset:
        table = Table(inode=about.st_ino)
    file.seek(table.offset)
    for _, raw in read_lines(file):
        line = parse_line(raw)
        if line is None:
            table.skipped += 1
        else:
            table.add(line)
        table.offset = file.tell()
    return table


def _tokens(line: dict[str, Any]) -> float:
    """Tokens of one step, whatever kind of run it is of."""
    tokens = finite(line.get("perf/total_num_tokens"))
    if tokens is not None:
        return tokens
    speed, seconds = finite(line.get("train/tokens_per_s")), finite(line.get("train/time_s"))
    return speed * seconds if speed is not None and seconds is not None else 0.0
