"""Samples reach the driver as they finish, while it waits for the others to be generated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quadriga.errors import QuadrigaError
from quadriga.workers.rollout_rows import FinishedSample

POLL_S = 0.1
"""How often the workers are asked for samples that have finished."""
REST = 4
"""Asking a thousand workers takes a while: then it pauses for so many times as long, and the driver can do other work."""


@contextmanager
def listening(
    group: Any, generation: int, listeners: Sequence[Callable[[list[FinishedSample]], None]]
) -> Iterator[None]:
    """While the body waits for `group` to generate, its finished samples are fetched and given to the `listeners`.

    They are called in a thread of their own. What they raise ends the listening: the driver's own thread meets the same error
    when it needs what they were to do.
    """
    over = threading.Event()

    def listen() -> None:
        pause_s = POLL_S
        while not over.wait(pause_s):
            began = time.monotonic()
            try:
                answers = group.ask("take_finished", generation)
                pause_s = max(POLL_S, REST * (time.monotonic() - began))
                finished = [sample for answer in answers for sample in answer or []]
                for listener in listeners:
                    listener(finished)
            except QuadrigaError:
                return

    thread = threading.Thread(target=listen, name="listening", daemon=True)
    if listeners:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if listeners:
            thread.join()
