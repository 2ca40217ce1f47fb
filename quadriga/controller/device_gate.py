"""Who computes in this process: calls come first, generation beside them goes on step by step in between.

A rollout engine may live in the process that trains. Its loop runs in a thread of its own, a step at a time; a call of the
driver (an update, a pass of log-probs) waits for the end of the step at hand and keeps further steps from beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceGate:
    """One for each process, `DEVICE_GATE`; several only in tests. A step never begins while a call runs or waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._stepping = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """The body is a call. It begins when the step at hand has ended."""
        with self._changed:
            self._calls += 1  # from here on no step begins: a loop that never rests cannot keep a call waiting
            while self._stepping:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The body is one step of generation. It begins when no call is running or waiting."""
        while not self.try_step(60.0):
            pass  # calls may take as long as they need: their caller has the deadline
        try:
            yield
        finally:
            self.end_step()

    def try_step(self, timeout_s: float) -> bool:
        """Begin a step if that can be within so long; whoever got True calls `end_step`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._calls or self._stepping), timeout_s):
                return False
            self._stepping = True
        return True

    def end_step(self) -> None:
        with self._changed:
            self._stepping = False
            self._changed.notify_all()


DEVICE_GATE = DeviceGate()
