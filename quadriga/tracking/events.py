"""News of a run for whoever shows it: the runner appends, the driver asks for what is new.

An event is a small dict that survives any transport: `{"kind": …, "time": …, **payload}`. The kinds:

    start     project, experiment, total_steps, start_step, run_directory    before the first step; again after a restart
    phase     step, open: names of the phases that are running, outermost first
    step      step, metrics: {name: number or None}                          as in metrics.jsonl
    message   level: "info" or "warning", text
    alarm     step, name, text, look: a detector fired, see `alarms`
    steered   step, command, result: somebody told the run something, see `steering`
    restart   number, at_most, text: workers have died, and others take their place
    state     state: "running" or "stalled"; made by who watches from outside
    end       status: "finished", "stopped" or "failed"; error: what ended it, where something did
    lost      count: so many events were dropped before they were asked for
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from quadriga.errors import RunStopped

Event = dict[str, Any]


def how_it_ended(error: BaseException | None) -> Event:
    """What an `end` tells of a run that ended with this error; None: it took its last step."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return {"status": "finished" if error is None else "stopped", "error": ""}
    return {
        "status": "stopped" if isinstance(error, RunStopped) else "failed",
        "error": f"{type(error).__name__}: {error}",
    }


class EventLog:
    """A bounded list of events that many threads may append to and read from.

    Args:
        capacity: the newest so many events are kept.
        listener: called with every event at once, in the appending thread; for a view in the same process.
    """

    def __init__(self, capacity: int = 4096, listener: Callable[[Event], None] | None = None) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._appended = 0
        self._lock = threading.Lock()
        self._listeners = [listener] if listener is not None else []

    def append(self, kind: str, payload: dict[str, Any] | None = None) -> None:
        """Add an event; never blocks for long, never fails because nobody reads."""
        event = {"kind": kind, "time": time.time(), **(payload or {})}
        with self._lock:
            self._events.append(event)
            self._appended += 1
        for listener in tuple(self._listeners):
            listener(event)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every further event, in the appending thread. Returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def since(self, cursor: int = 0) -> tuple[list[Event], int]:
        """The events after `cursor` (0: from the start) and the cursor for the next call.

        Where some were dropped in between, the first event returned is a `lost` one that says how many.
        """
        with self._lock:
            new = max(self._appended - cursor, 0)
            held = min(new, len(self._events))
            events = [self._events[i] for i in range(len(self._events) - held, len(self._events))]
            appended = self._appended
        if new > held:
            events.insert(0, {"kind": "lost", "time": events[0]["time"] if events else 0.0, "count": new - held})
        return events, appended
