"""`timeline.json`: what the run did when, in the trace format that chrome://tracing and ui.perfetto.dev open.

The file is valid JSON after every write, also when the process is killed: each write puts the new events in place of
the closing bracket, in one system call.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
MAX_BYTES = 50_000_000
"""Once the file has this size, nothing more is recorded; viewers do not open much larger ones."""
_HEAD, _TAIL = b"[\n", b"\n]\n"


class Timeline:
    """Collects events in memory; `flush` adds them to the file. Safe to use from several threads.

    A lane is a row of the picture: the driver, a role, a worker. Times are seconds since 1970.

    Args:
        path: the file; an existing one, of a run that is resumed, is continued.
        max_bytes: as `MAX_BYTES`.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._lanes: dict[str, int] = {}
        self._waiting: list[dict[str, Any]] = []
        self._full = False

    def add(self, name: str, start: float, seconds: float, lane: str = "driver", **details: Any) -> None:
        """A phase that began at `start` and took `seconds`; `details` appear when it is selected in the viewer."""
        event = {"name": name, "ph": "X", "ts": round(start * 1e6), "dur": max(round(seconds * 1e6), 1)}
        with self._lock:
            if not self._full:
                self._waiting.append(event | {"pid": 1, "tid": self._lane(lane), "args": details})

    def flush(self) -> None:
        """Add what was collected since the last time to the file."""
        with self._lock:
            events, self._waiting = self._waiting, []
            if events and not self._full:
                self._write(b",\n".join(json.dumps(event, separators=(",", ":")).encode() for event in events))

    def _lane(self, lane: str) -> int:
        number = self._lanes.get(lane)
        if number is None:
            number = zlib.crc32(lane.encode()) & 0x7FFFFFFF  # the same after a resume, whatever lane comes first then
            place = len(self._lanes)
            self._lanes[lane] = number
            for what, value in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": place})):
                self._waiting.append({"name": what, "ph": "M", "pid": 1, "tid": number, "args": value})
        return number

    def _write(self, events: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size + len(events) > self.max_bytes:
                self._full = True
                _LOG.warning("%s is full; later phases are not recorded in it", self.path)
                return
            if size > len(_HEAD) and os.pread(descriptor, len(_TAIL), size - len(_TAIL)) == _TAIL:
                new, place = b",\n" + events + _TAIL, size - len(_TAIL)
            else:  # new, or not ours: an unfinished trace cannot be continued
                new, place = _HEAD + events + _TAIL, 0
            try:
                whole = os.pwrite(descriptor, new, place) == len(new)
            except OSError:
                whole = False
            if whole:
                os.ftruncate(descriptor, place + len(new))
                return
            # The disk is full. A picture is no reason to end a run; what is needed says so itself.
            self._full = True
            os.pwrite(descriptor, _TAIL if place else b"", place)
            os.ftruncate(descriptor, place + len(_TAIL) if place else 0)
            _LOG.warning("%s cannot grow; later phases are not recorded in it", self.path)
        finally:
            os.close(descriptor)
