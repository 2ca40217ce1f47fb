"""Which runs there are, and where each of them stands."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quadriga.dashboard.files import Unreadable, encodable, finite, last_line, open_inside, parse_line, plain, read_json
from quadriga.errors import QuadrigaError
from quadriga.tracking.metric_names import format_value
from quadriga.tracking.run_record import RESTART, process_mark
from quadriga.tracking.run_state import MAIN_METRICS

STATES = ("running", "stalled", "finished", "interrupted", "failed")
RUN_KINDS = ("train", "sft", "rm", "dpo", "eval")
MARKERS = ("status.json", "metrics.jsonl")
"""A folder with one of these is a run."""
DEPTH = 4
"""So many folders below a root are searched."""
MOST_FOLDERS = 100_000
SIGN_OF_LIFE_S = 20.0
"""A live run renews its status every few seconds; on another machine, clocks and file systems may add to that. While new
workers take the place of dead ones, nobody does."""
SIGN_OF_LIFE_ELSEWHERE_S = RESTART_S = 180.0
STALLED_S, STALLED_FACTOR = 60.0, 5.0
"""A phase that takes longer than both, the second in its usual time, is stalled: as in the watchdog's soft deadline."""
SPARK_POINTS = 32
TAIL_BYTES = 1 << 20
"""So much of a metrics file is searched for a metric that its last line lacks."""


@dataclass
class Run:
    """One run directory. What was read of it is kept until its files change."""

    path: Path
    name: str
    id: str
    root: str = ""
    """The folder that was searched."""
    stamp: tuple[Any, ...] = ()
    status: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    changed_at: float = 0.0
    spark: tuple[int, list[float]] = (0, [])
    _newest: dict[str, Any] | None = None
    _older: dict[str, float | None] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Read anew what has changed since the last time. False: this is no run (any more)."""
        stats = [_stat(f"{self.path}/{name}") for name in MARKERS]
        stamp = tuple((s.st_ino, s.st_size, s.st_mtime_ns) if s else None for s in stats)
        if stamp == self.stamp:
            return any(stats)
        self.changed_at = max((s.st_mtime for s in stats if s), default=0.0)
        self.status = read_json(self.path, MARKERS[0]) or {}
        self.size, self._newest, self._older = stats[1].st_size if stats[1] else 0, None, {}
        self.stamp = stamp
        return any(stats)

    @property
    def newest(self) -> dict[str, Any]:
        """The last line of metrics.jsonl; read when somebody asks, because a table of a thousand runs need not."""
        if self._newest is None:
            try:
                with open_inside(self.path, MARKERS[1]) as file:
                    self._newest = last_line(file, self.size) or {}
            except (Unreadable, OSError):
                self._newest = {}
        return self._newest

    def newest_of(self, name: str) -> float | None:
        """The newest value of a metric that not every step has, such as one of the validation; None: not in the last steps."""
        if (value := finite(self.newest.get(name))) is not None:
            return value
        if name not in self._older:
            key, self._older[name] = json.dumps(name).encode() + b":", None
            try:
                with open_inside(self.path, MARKERS[1]) as file:
                    file.seek(max(self.size - TAIL_BYTES, 0))
                    lines = file.read(min(self.size, TAIL_BYTES)).splitlines(keepends=True)
            except (Unreadable, OSError):
                lines = []
            for raw in reversed(lines):
                if key in raw and (known := finite((parse_line(raw) or {}).get(name))) is not None:
                    self._older[name] = known
                    break
        return self._older[name]

    @property
    def kind(self) -> str:
        """One of `RUN_KINDS`."""
        told = self.status.get("kind")
        if told in RUN_KINDS:
            return told
        return "sft" if "train/loss" in self.newest else "train"

    @property
    def step(self) -> int:
        step = finite(self.status.get("step"))
        return int(step if step is not None else finite(self.newest.get("step")) or 0)

    @property
    def updated(self) -> float:
        return finite(self.status.get("updated")) or finite(self.newest.get("time")) or self.changed_at

    def state(self, now: float) -> str:
        """One of `STATES`, told from what the run wrote last and, on this machine, from its process."""
        told = self.status.get("state")
        if told in ("finished", "failed"):
            return told
        total = finite(self.status.get("total_steps"))
        if told != "running":  # stopped as asked, or written by another program
            return "finished" if told is None and total is not None and self.step >= total else "interrupted"
        age = now - self.updated
        if self.status.get("host") == socket.gethostname():
            if self._is_copy():
                return "interrupted"
            pid = self.status.get("pid")
            lives = isinstance(pid, int) and process_mark(pid) == self.status.get("process") and _exists(pid)
            if not lives:
                return "interrupted"
            if age > (RESTART_S if self.status.get("phases") == [RESTART] else SIGN_OF_LIFE_S):
                return "stalled"
        elif age > SIGN_OF_LIFE_ELSEWHERE_S:
            return "interrupted"
        began, usual = finite(self.status.get("phase_since")), finite(self.status.get("phase_usual_s"))
        deadline = max(STALLED_S, STALLED_FACTOR * (usual or 0.0))
        is_known = bool(self.status.get("phases")) and began is not None and usual is not None
        return "stalled" if is_known and now - began > deadline else "running"  # type: ignore[operator]

    def _is_copy(self) -> bool:
        """Whether the files were written elsewhere on this machine and are still there: the run lives there, not here."""
        origin = self.status.get("folder")
        try:
            return isinstance(origin, str) and os.path.isdir(origin) and not os.path.samefile(origin, self.path)
        except (OSError, ValueError):
            return False

    def main_metric(self) -> str | None:
        return next((name for name in MAIN_METRICS if finite(self.newest.get(name)) is not None), None)

    def validations(self) -> dict[str, dict[str, Any]]:
        """Held-out accuracy by data source: first and last value, with their steps; of those that are told in full."""
        told = self.status.get("validations")
        if not isinstance(told, dict):
            return {}
        names = ("first_step", "first", "last_step", "last")
        found = {
            encodable(str(s)): {n: finite(v.get(n)) for n in names} for s, v in told.items() if isinstance(v, dict)
        }
        return {source: seen for source, seen in found.items() if None not in seen.values()}

    def row(self, now: float, with_metric: bool = True) -> dict[str, Any]:
        """What a table of runs shows, but for the spark line; without its main metric it is made from the status alone."""
        status, state, step = self.status, self.state(now), self.step
        total, pace = finite(status.get("total_steps")), finite(status.get("seconds_per_step"))
        alive = state in ("running", "stalled")
        main = self.main_metric() if with_metric else None
        alarms, changed = status.get("alarms"), status.get("changed")
        phases = status.get("phases")
        return {
            "id": self.id,
            "name": self.name,
            "folder": encodable(str(self.path)),
            "root": encodable(self.root),
            "kind": self.kind,
            "state": state,
            "error": encodable(str(status.get("error") or ""))[:4000],
            "step": step,
            "total": total,
            "eta_s": pace * max(total - step, 0) if alive and pace is not None and total is not None else None,
            "seconds_per_step": pace,
            "started": finite(status.get("started")),
            "updated": self.updated,
            "phase": encodable(str(phases[-1])) if alive and isinstance(phases, list) and phases else "",
            "phase_s": now - (finite(status.get("phase_since")) or now) if alive else None,
            "main": None if main is None else _shown_metric(main, self.newest),
            "validations": self.validations(),
            "intervals": _intervals(status.get("intervals")),
            "changed": plain(changed) if isinstance(changed, dict) else {},
            "alarms": {encodable(str(k)): encodable(str(v)) for k, v in alarms.items()}
            if isinstance(alarms, dict)
            else {},
            "steering": bool(status.get("steering")),
            "host": encodable(str(status.get("host") or "")),
        }

    def spark_line(self) -> list[float]:
        """The course of the main metric in a few points: lines at even distances in the file, without reading the rest."""
        name = self.main_metric()
        if name is None or not self.size:
            return []
        if self.spark[0] != self.size:
            self.spark = (self.size, self._sampled(name))
        return self.spark[1]

    def _sampled(self, name: str) -> list[float]:
        found = []
        key = json.dumps(name).encode() + b": "
        try:
            with open_inside(self.path, MARKERS[1]) as file:
                whole = self.size <= 256 << 10
                pieces = [file.read(self.size)] if whole else []
                if not whole:
                    for k in range(SPARK_POINTS):
                        file.seek(self.size * k // SPARK_POINTS)
                        file.readline(64 << 10)
                        pieces.append(file.readline(64 << 10))
        except (Unreadable, OSError):
            return []
        for raw in (line for piece in pieces for line in piece.splitlines()):
            at = raw.find(key)
            if at < 0:
                continue
            end = raw.find(b",", at + len(key))
            try:
                number = finite(float(raw[at + len(key) : end if end > 0 else -1]))
            except ValueError:
                continue
            if number is not None:
                found.append(number)
        return _thinned(found)


class Catalog:
    """The runs below some folders. Looking again is cheap, and done at most once a second; safe in several threads.

    Args:
        roots: folders to search, or runs themselves.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self.roots = [Path(os.path.abspath(root)) for root in roots]
        self.runs: dict[str, Run] = {}
        self.problems: list[str] = []
        self._at: dict[str, Run] = {}
        """Folder → run."""
        self._lock = threading.Lock()
        self._looked, self._cost_s = -1e9, 0.0

    def look(self) -> list[Run]:
        """All runs as they are now, in no particular order."""
        with self._lock:
            began = time.monotonic()
            if began - self._looked > max(1.0, 10 * self._cost_s):
                self.problems = []
                self._at = {os.fspath(run.path): run for run in self._search()}
                self.runs = {run.id: run for run in self._at.values()}
                self._looked = time.monotonic()
                self._cost_s = self._looked - began
            return list(self.runs.values())

    def get(self, run_id: str) -> Run:
        """Unreadable: there is no such run (any more)."""
        run = self.runs.get(run_id) or {run.id: run for run in self.look()}.get(run_id)
        if run is None or not run.path.is_dir():
            raise Unreadable("this run is not here (any more)")
        return run

    def find(self, text: str) -> Run:
        """The run that somebody means by its folder, its name, or the end of its name.

        Raises:
            QuadrigaError: none, or several.
        """
        folder = Path(os.path.abspath(os.path.expanduser(text)))
        if any((folder / marker).is_file() for marker in MARKERS):
            run = Run(folder, _name(folder, folder.parent.parent), _id(folder), str(folder.parent.parent))
            run.refresh()
            return run
        runs = self.look()
        fits = [r for r in runs if r.name == text] or [r for r in runs if r.name.endswith(f"/{text}")]
        if len(fits) == 1:
            return fits[0]
        where = ", ".join(map(str, self.roots))
        if fits:
            names = [run.name for run in fits]
            which = names if len(set(names)) == len(names) else [str(run.path) for run in fits]
            raise QuadrigaError(f"{text} is the name of {len(fits)} runs", f"say which: {', '.join(which)}")
        raise QuadrigaError(
            f"there is no run {text} in {where}", "`quadriga runs` lists those that there are; a run is a folder"
        )

    def _search(self) -> Iterable[Run]:
        """Every run, read anew where it has changed. Paths are texts here: with thousands of runs, `Path` takes most of the time."""
        left = MOST_FOLDERS
        for root in self.roots:
            if not root.is_dir():
                self.problems.append(f"{encodable(str(root))} is not there")
                continue
            folders = [(str(root), 0)]
            while folders and left:
                folder, depth = folders.pop()
                left -= 1
                run = self._at.get(folder)
                if run is not None and run.refresh():
                    folders += _earlier(folder, depth)
                    yield run
                    continue
                names, inner = _listing(folder, self.problems)
                if names.intersection(MARKERS):
                    path = Path(folder)
                    run = Run(path, _name(path, root), _id(path), str(root))
                    run.refresh()
                    folders += _earlier(folder, depth)
                    yield run
                elif depth < DEPTH:
                    folders += [(one, depth + 1) for one in inner]
        if not left:
            self.problems.append(f"only the first {MOST_FOLDERS:,} folders were searched")


def _listing(folder: str, problems: list[str]) -> tuple[set[str], list[str]]:
    """Names of what is in a folder, and the paths of the folders among it; hidden ones are passed over."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
        return {entry.name for entry in found}, [e.path for e in found if not e.name.startswith(".") and e.is_dir()]
    except OSError as error:
        problems.append(f"{encodable(folder)}: {error.strerror}")
        return set(), []


def _earlier(folder: str, depth: int) -> list[tuple[str, int]]:
    """The folder in which a run keeps those that were started before it in its place, to be searched."""
    earlier = f"{folder}/earlier"
    return [(earlier, max(depth, DEPTH - 1))] if os.path.isdir(earlier) else []


def _name(folder: Path, root: Path) -> str:
    """Path below the root; of a root that is a run itself, its last two parts."""
    inner = folder.relative_to(root) if folder.is_relative_to(root) else folder
    return encodable(inner.as_posix() if inner.parts else "/".join(folder.parts[-2:]))


def _id(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _shown_metric(name: str, line: dict[str, Any]) -> dict[str, Any]:
    value = finite(line.get(name))
    return {"name": name, "label": MAIN_METRICS[name], "value": value, "text": format_value(name, value)}


def _intervals(told: Any) -> dict[str, list[float]]:
    """The 95 % interval of held-out accuracies, where somebody has computed one."""
    pairs = told.items() if isinstance(told, dict) else ()
    found = {encodable(str(s)): [finite(one) for one in v] for s, v in pairs if isinstance(v, list) and len(v) == 2}
    return {source: interval for source, interval in found.items() if None not in interval}  # type: ignore[misc]


def _thinned(values: list[float]) -> list[float]:
    if len(values) <= SPARK_POINTS:
        return values
    return [values[k * (len(values) - 1) // (SPARK_POINTS - 1)] for k in range(SPARK_POINTS)]
