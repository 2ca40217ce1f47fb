"""What the run spends its time on.

phases.start_step(12)
with phases("step"):
    with phases("gen"):
        …
metrics |= phases.take_timings()        # {"timing_s/gen": 0.61, "timing_s/step": 0.61}
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from quadriga.tracking.events import EventLog
from quadriga.tracking.timeline import Timeline

PHASE_OF_METHOD = {
    "generate": "gen",
    "compute_rm_score": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "compute_teacher": "teacher",
    "compute_self_teacher": "teacher",
    "push_weights": "update_weights",
    "take_weights": "update_weights",
    "copy_checkpoint": "save_checkpoint",
    "write_checkpoint": "save_checkpoint",
}
"""Which phase of a step a worker's method belongs to, where their names differ."""
REMEMBERED = 20
"""Times that each phase took, of which the newest are kept."""


class Phases:
    """Times nested phases, in several threads if need be, at a cost of a few microseconds each.

    The time of a phase includes the phases inside it. A phase that comes several times in a step has the sum.

    Args:
        timeline: gets an event for every phase.
        events: told which phases are running whenever that changes, so that a viewer can say what a run waits for.
    """

    def __init__(self, timeline: Timeline | None = None, events: EventLog | None = None) -> None:
        self.step = 0
        self._timeline = timeline
        self._events = events
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._open: list[Phase] = []
        self._history: dict[str, deque[float]] = {}
        self._driver = threading.get_ident()
        self._clock_offset = time.time() - time.perf_counter()

    def __call__(self, name: str, lane: str = "", whole: bool = False, timed: bool = True) -> Phase:
        """A context manager that times its body as `timing_s/<name>`.

        Args:
            lane: row of the timeline; by default "driver" in the thread that made this object, the thread's name in others.
            whole: phases inside it are in the timeline only; for validation, whose generation is not the step's.
            timed: False for what a watchdog and the timeline should see, though it is no metric of a step.
        """
        return Phase(self, name, lane or self._lane_of_this_thread(), whole, timed)

    def start_step(self, step: int) -> None:
        """From now on, phases belong to this step."""
        self.step = step

    def take_timings(self) -> dict[str, float]:
        """`timing_s/<phase>` of the phases that have ended since the last call; the timeline is written."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        if self._timeline is not None:
            self._timeline.flush()
        return {f"timing_s/{name}": value for name, value in seconds.items()}

    def open_phases(self) -> list[Phase]:
        """The phases that have not ended, outermost first: where a run hangs."""
        with self._lock:
            return list(self._open)

    def history(self, path: str) -> list[float]:
        """Seconds that the newest phases at `path` (their names from the outermost on, `step/gen`) took."""
        with self._lock:
            return list(self._history.get(path, ()))

    def record(self, name: str, start: float, seconds: float, lane: str, **details: Any) -> None:
        """A phase measured elsewhere, e.g. by a worker: into the timeline only. `start` is seconds since 1970."""
        if self._timeline is not None:
            self._timeline.add(name, start, seconds, lane, step=self.step, **details)

    def _enter(self, phase: Phase) -> None:
        with self._lock:
            around = [other.name for other in self._open if other.thread == phase.thread]
            phase.path = "/".join([*around, phase.name])
            self._open.append(phase)
        self._announce()
        phase.began = time.perf_counter()

    def _leave(self, phase: Phase, failed: bool) -> None:
        seconds = time.perf_counter() - phase.began
        with self._lock:
            self._open.remove(phase)
            around = [other for other in self._open if other.thread == phase.thread]
            counted_there = any(other.whole or other.name == phase.name for other in around)
            if phase.timed and not counted_there:
                self._seconds[phase.name] = self._seconds.get(phase.name, 0.0) + seconds
            if not failed:
                self._history.setdefault(phase.path, deque(maxlen=REMEMBERED)).append(seconds)
        if self._timeline is not None:
            details = {"failed": True} if failed else {}
            start = phase.began + self._clock_offset
            self._timeline.add(phase.name, start, seconds, phase.lane, step=phase.step, **details)
            if failed:
                self._timeline.flush()
        self._announce()

    def _lane_of_this_thread(self) -> str:
        thread = threading.current_thread()
        return "driver" if thread.ident == self._driver else thread.name

    def _announce(self) -> None:
        if self._events is not None:
            with self._lock:
                names = [phase.name for phase in self._open]
            self._events.append("phase", {"step": self.step, "open": names})


class Phase:
    """One use of `with phases(name)`. `path` has the names of the phases around it before its own."""

    __slots__ = ("_phases", "began", "lane", "name", "path", "step", "thread", "timed", "whole")

    def __init__(self, phases: Phases, name: str, lane: str, whole: bool, timed: bool) -> None:
        self._phases = phases
        self.name = self.path = name
        self.lane = lane
        self.whole = whole
        self.timed = timed
        self.step = phases.step
        self.thread = threading.get_ident()
        self.began = 0.0

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.began

    def __enter__(self) -> Phase:
        self.began = time.perf_counter()
        self._phases._enter(self)
        return self

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        self._phases._leave(self, failed=error_type is not None)
