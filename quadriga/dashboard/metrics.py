"""The curves of runs: metrics.jsonl as columns, read on from where it was left, and thinned to what a screen can show."""

from __future__ import annotations

import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import Unreadable, finite, open_inside, parse_line, read_lines
from quadriga.tracking.metric_names import SECTIONS, describe, section_of

X_AXES = ("step", "tokens", "time")
_LARGEST = 3.4e38
"""Of what four bytes hold."""
MOST_METRICS = 4096
"""Names of one run beyond these are not taken up: a file that invents a new name in every line stays small."""


@dataclass
class Column:
    """One metric: the numbers of the lines that have it, its values in the seven digits that a picture shows, and its newest."""

    lines: range | array[int]
    """A range as long as no line lacks the metric."""
    values: array[float] = field(default_factory=lambda: array("f"))
    last: float = 0.0

    def add(self, line: int, value: float) -> None:
        if isinstance(self.lines, range):
            if line == self.lines.stop:
                self.lines = range(self.lines.start, line + 1)
            else:
                self.lines = array("I", self.lines)
        if not isinstance(self.lines, range):
            self.lines.append(line)
        self.values.append(max(min(value, _LARGEST), -_LARGEST))
        self.last = value

    def halved(self) -> Column:
        """Without every second line; the others have half their numbers."""
        kept = [(line // 2, value) for line, value in zip(self.lines, self.values) if line % 2 == 0]
        numbers = array("I", (line for line, _ in kept))
        whole = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
        is_dense = len(whole) == len(numbers)
        return Column(whole if is_dense else numbers, array("f", (value for _, value in kept)), self.last)

    @property
    def bytes(self) -> int:
        return 4 * len(self.values) * (1 if isinstance(self.lines, range) else 2) + 300


@dataclass
class Table:
    """The columns of one run, and how far its file has been read."""

    inode: int = 0
    offset: int = 0
    axes: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in X_AXES})
    columns: dict[str, Column] = field(default_factory=dict)
    skipped: int = 0
    """Lines that were no metrics."""
    seen: int = 0
    every: int = 1
    """Only one line in so many is kept, of a file that would take too much memory."""
    ends: tuple[float, float, float] = (-math.inf, 0.0, -math.inf)
    """Step, tokens and time of the newest line, kept or not."""

    @property
    def bytes(self) -> int:
        return sum(column.bytes for column in self.columns.values()) + 24 * len(self.axes["step"]) + 1000

    def add(self, line: dict[str, Any]) -> None:
        step, when = finite(line.get("step")), finite(line.get("time"))
        last_step, tokens, before = self.ends
        if step is None or step <= last_step:
            self.skipped += 1
            return
        # A clock that is set back does not turn the curve back.
        time = max(before, when) if when is not None else before if self.seen else 0.0
        self.ends = step, tokens + _tokens(line), time
        self.seen += 1
        if (self.seen - 1) % self.every:
            for name, kept in self.columns.items():
                known = finite(line.get(name))
                kept.last = kept.last if known is None else known
            return
        number = len(self.axes["step"])
        for axis, value in zip(X_AXES, self.ends):
            self.axes[axis].append(value)
        for name, value in line.items():
            known = finite(value)
            if known is None or name in ("step", "time"):
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= MOST_METRICS:
                    continue
                column = self.columns[name] = Column(range(number, number))
            column.add(number, known)

    def halve(self) -> None:
        """Keep every second line, in half the memory."""
        self.every *= 2
        self.axes = {name: values[::2] for name, values in self.axes.items()}
        self.columns = {name: column.halved() for name, column in self.columns.items()}


@dataclass
class Held:
    """A table, and whose turn it is to read or extend it."""

    table: Table = field(default_factory=Table)
    lock: threading.Lock = field(default_factory=threading.Lock)
    bytes: int = 0


class Metrics:
    """Tables of the runs that are being looked at; those looked at last are kept, up to `most_bytes` in all."""

    def __init__(self, most_bytes: int = 96 << 20) -> None:
        self._most_bytes = most_bytes
        self._tables: OrderedDict[str, Held] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def table(self, run: Run) -> Iterator[Table]:
        """The run's metrics as they are now; they do not change inside the block. Unreadable: it has none."""
        with self._lock:
            held = self._tables.setdefault(run.id, Held())
            self._tables.move_to_end(run.id)
        with held.lock:  # of this run alone: another one is answered while a long file is read
            try:
                with open_inside(run.path, "metrics.jsonl") as file:
                    held.table = _read_on(held.table, file, self._most_bytes)
            except OSError as error:
                raise Unreadable(f"metrics.jsonl cannot be read: {error.strerror}") from None
            held.bytes = held.table.bytes
            yield held.table
        with self._lock:
            while len(self._tables) > 1 and sum(held.bytes for held in self._tables.values()) > self._most_bytes:
                self._tables.popitem(last=False)

    def names(self, run: Run) -> list[dict[str, Any]]:
        """Every metric of the run with its section, meaning, unit and newest value, in the order of the metric table."""
        with self.table(run) as table:
            newest = {name: (len(column.values), column.last) for name, column in table.columns.items()}
        order = {title: k for k, title in enumerate(SECTIONS)}
        found = []
        for name, (points, last) in newest.items():
            metric = describe(name)
            told = {"name": name, "section": section_of(name), "meaning": metric.meaning, "unit": metric.unit}
            found.append({**told, "points": points, "last": last})
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
        number, `x` where the last of these lines ends: the same for all metrics of the run, so that they can be added up.
        """
        found = {}
        with self.table(run) as table:
            axis = table.axes[x]
            origin = axis[0] if x == "time" and axis else 0.0
            lines = range(
                *(find(axis, x, key=lambda v: v - origin) for find, x in ((bisect_left, low), (bisect_right, high)))
            )
            for name in names:
                if name in table.columns:
                    found[name] = _points(table.columns[name], axis, origin, lines, points)
        return found


def _points(column: Column, axis: array[float], origin: float, lines: range, points: int) -> dict[str, list[float]]:
    """The values of these lines as they are; where they are many, those of equally many neighbouring lines together."""
    first, last = bisect_left(column.lines, lines.start), bisect_left(column.lines, lines.stop)
    if last - first <= points:
        xs = [axis[line] - origin for line in column.lines[first:last]]
        return {"x": xs, "y": [_short(y) for y in column.values[first:last]]}
    found: dict[str, list[float]] = {name: [] for name in ("x", "y", "lo", "hi", "n")}
    start = first
    for k in range(1, points + 1):
        edge = lines.start + k * len(lines) // points
        end = bisect_left(column.lines, edge, start)
        if end > start:
            values = column.values[start:end]
            numbers = (math.fsum(values) / len(values), min(values), max(values))
            point = (axis[edge - 1] - origin, *map(_short, numbers), float(len(values)))
            for name, value in zip(found, point):
                found[name].append(value)
        start = end
    return found


def _read_on(table: Table, file: Any, most_bytes: int) -> Table:
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
        if table.seen % 1024 == 0 and table.bytes > most_bytes:
            table.halve()
    return table


def _short(value: float) -> float:
    """0.1, not 0.10000000149011612, which is what its four bytes hold."""
    return float(f"{value:.7g}")


def _tokens(line: dict[str, Any]) -> float:
    """Tokens of one step, whatever kind of run it is of."""
    tokens = finite(line.get("perf/total_num_tokens"))
    if tokens is not None:
        return tokens
    speed, seconds = finite(line.get("train/tokens_per_s")), finite(line.get("train/time_s"))
    return speed * seconds if speed is not None and seconds is not None else 0.0
