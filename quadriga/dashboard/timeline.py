"""What the workers of a run did when, and how busy they were: parts of timeline.json, found by step without reading the rest."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import finite, open_inside, read_lines
from quadriga.tracking.phases import PHASE_OF_METHOD
from quadriga.tracking.timeline import MAX_BYTES

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

    def steps(self, run: Run) -> dict[str, Any]:
        """The steps that the timeline has events of, and whether its file is too full for more."""
        index = self._index(run)
        return {"steps": sorted(index.places), "full": index.offset > 0.95 * MAX_BYTES}

    def events(self, run: Run, first: int, last: int) -> dict[str, Any]:
        """What happened in the steps from `first` to `last`: lanes, and events with start and length in seconds.

        Raises:
            Unreadable: the run has no timeline.
        """
        index = self._index(run)
        places = [index.places[step] for step in range(first, min(last, first + 1000) + 1) if step in index.places]
        if not places:
            return {"lanes": [], "events": [], "busy": [], "more": False}
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
            {
                "lane": lanes.index(lane),
                "name": name,
                "phase": PHASE_OF_METHOD.get(name, name),
                "start": ts - (origin or 0.0),
                "seconds": dur,
                "step": step,
            }
            for lane, name, ts, dur, step in found
        ]
        return {
            "lanes": [index.lanes.get(lane, str(lane)) for lane in lanes],
            "events": events,
            "busy": _busy_shares(events, len(lanes)),
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


def _busy_shares(events: list[dict[str, Any]], lanes: int) -> list[float]:
    """The share of the time from the first event to the end of the last in which something happened on each lane."""
    whole = max((e["start"] + e["seconds"] for e in events), default=0.0)
    busy, reached = [0.0] * lanes, [0.0] * lanes
    for event in sorted(events, key=lambda e: e["start"]):
        lane, end = event["lane"], event["start"] + event["seconds"]
        busy[lane] += max(end - max(event["start"], reached[lane]), 0.0)
        reached[lane] = max(reached[lane], end)
    return [seconds / whole if whole else 0.0 for seconds in busy]


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
