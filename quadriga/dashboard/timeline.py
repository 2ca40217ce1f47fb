"""What the workers of a run did when: parts of timeline.json, found by step without reading the rest."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import Unreadable, finite, open_inside, parse_line, read_lines

MOST_EVENTS = 5000
"""Of one answer."""
_STEP = re.compile(rb'"step":(\d{1,12})')
_HELD = 64


@dataclass
class Index:
    """How far the file was read, where the events of each step lie, and the names of the lanes."""

    inode: int = 0
    offset: int = 0
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    lanes: dict[int, str] = field(default_factory=dict)


class Timelines:
    """Events of steps of runs; remembers where they lie."""

    def __init__(self) -> None:
        self._indices: OrderedDict[str, Index] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self, run: Run) -> list[int]:
        """The steps that the timeline has events of."""
        return sorted(self._index(run).places)

    def events(self, run: Run, first: int, last: int) -> dict[str, Any]:
        """What happened in the steps from `first` to `last`: lanes, and events with start and length in seconds.

        Raises:
            Unreadable: the run has no timeline.
        """
        index = self._index(run)
        places = [index.places[step] for step in range(first, min(last, first + 1000) + 1) if step in index.places]
        if not places:
            return {"lanes": [], "events": [], "origin": None, "more": False}
        start, end = min(p[0] for p in places), max(p[1] for p in places)
        found: list[tuple[int, str, float, float, int]] = []
        more = False
        with open_inside(run.path, "timeline.json") as file:
            file.seek(start)
            for _, raw in read_lines(file, end):
                event = _event(raw)
                if event is None or event.get("ph") != "X":
                    continue
                ts, dur, step = finite(event.get("ts")), finite(event.get("dur")), finite(_argument(event, "step"))
                if ts is None or dur is None or step is None or not first <= step <= last:
                    continue
                if len(found) == MOST_EVENTS:
                    more = True
                    break
                found.append((_lane(event), str(event.get("name", ""))[:80], ts / 1e6, dur / 1e6, int(step)))
        origin = min((e[2] for e in found), default=None)
        lanes = list(dict.fromkeys(e[0] for e in sorted(found, key=lambda e: index.lanes.get(e[0], "") != "driver")))
        events = [
            {"lane": lanes.index(lane), "name": name, "start": ts - (origin or 0.0), "seconds": dur, "step": step}
            for lane, name, ts, dur, step in found
        ]
        return {
            "lanes": [index.lanes.get(lane, str(lane)) for lane in lanes],
            "events": events,
            "origin": origin,
            "more": more,
        }

    def _index(self, run: Run) -> Index:
        with self._lock, open_inside(run.path, "timeline.json") as file:
            index = self._indices.pop(run.id, Index())
            about = os.fstat(file.fileno())
            if about.st_ino != index.inode or about.st_size < index.offset:
                index = Index(inode=about.st_ino)
            file.seek(index.offset)
            for offset, raw in read_lines(file):
                if raw.strip() == b"]":
                    break  # the end: the next events will stand in its place, after a comma that ends the line before
                if b'"thread_name"' in raw:
                    event = _event(raw) or {}
                    index.lanes[_lane(event)] = str(_argument(event, "name"))[:80]
                elif match := _STEP.search(raw):
                    step, after = int(match[1]), offset + len(raw)
                    before = index.places.get(step, (offset, after))
                    index.places[step] = (min(before[0], offset), max(before[1], after))
                index.offset = file.tell()
            self._indices[run.id] = index
            while len(self._indices) > _HELD:
                self._indices.popitem(last=False)
            return index


def stall_reports(run: Run) -> list[dict[str, Any]]:
    """The reports of phases that took far too long: `step_<step>_<phase>.txt` in stalls/, in order of the steps."""
    found = []
    try:
        names = sorted(os.listdir(run.path / "stalls"))
    except OSError:
        return []
    for name in names[:500]:
        if match := re.fullmatch(r"step_(\d{1,12})_([\w.-]+)\.txt", name):
            found.append({"file": name, "step": int(match[1]), "phase": match[2]})
    return found


def stall_text(run: Run, name: str, most_bytes: int = 1 << 20) -> str:
    """What one of them says. Unreadable: there is no such report."""
    if name not in [report["file"] for report in stall_reports(run)]:
        raise Unreadable("there is no such report")
    with open_inside(run.path, "stalls", name) as file:
        return file.read(most_bytes).decode(errors="replace")


def run_events(run: Run, most: int = 2000) -> list[dict[str, Any]]:
    """The newest lines of events.jsonl, oldest first."""
    try:
        with open_inside(run.path, "events.jsonl") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - (4 << 20), 0))
            if size > 4 << 20:
                file.readline()
            lines = [line for _, raw in read_lines(file) if (line := parse_line(raw)) is not None]
    except (Unreadable, OSError):
        return []
    return [
        {
            "time": finite(line.get("time")),
            "step": finite(line.get("step")),
            "kind": str(line.get("kind", ""))[:20],
            "level": str(line.get("level", ""))[:20],
            "name": str(line.get("name", ""))[:80],
            "text": _event_text(line)[:20_000],
            "look": str(line.get("look", ""))[:2000],
        }
        for line in lines[-most:]
    ]


def _event_text(line: dict[str, Any]) -> str:
    kind = line.get("kind")
    if kind == "start":
        after = finite(line.get("start_step"))
        return f"resumed after step {after:.0f}" if after else "started"
    if kind == "steered":
        return f"{line.get('command')}: {line.get('result')}"
    if kind == "end":
        return str(line.get("status")) + (f": {line['error']}" if line.get("error") else "")
    return str(line.get("text", ""))


def _event(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw.strip().rstrip(b","))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _argument(event: dict[str, Any], name: str) -> Any:
    told = event.get("args")
    return told.get(name) if isinstance(told, dict) else None


def _lane(event: dict[str, Any]) -> int:
    return int(finite(event.get("tid")) or 0)
