"""Checkpoints that a step waits for only as long as its state is copied to host memory.

The workers write their copies in threads of their own. A thread of the driver waits for them and commits the checkpoint,
once the step's metrics are on disk as well: what a checkpoint says was done can be seen in the run directory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from quadriga.checkpoint.draft import Draft
from quadriga.checkpoint.store import CheckpointStore
from quadriga.errors import CheckpointError, QuadrigaError

FIRST_POLL_S, LONGEST_POLL_S = 0.05, 2.0
CLOSING_S = 60.0
"""When the run ends by an error, a checkpoint that is being written gets so long to be finished."""


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        crew: offers `copy_state`, `begin_writing` and `written`.
        timeout_s: a checkpoint must be written within.
        on_commit: called by the committing thread with the time it began and the seconds it took.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        crew: Any,
        timeout_s: float,
        on_commit: Callable[[float, float], None] = lambda began, seconds: None,
    ) -> None:
        self._checkpoints, self._crew, self._timeout_s, self._on_commit = checkpoints, crew, timeout_s, on_commit
        self._thread: threading.Thread | None = None
        self._recorded = threading.Event()
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._problem: QuadrigaError | None = None

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Copy everything, and begin to write it. Waits for the checkpoint before, if that is still being written."""
        self.finish()
        need_bytes = self._crew.copy_state()
        draft = self._checkpoints.begin(step, need_bytes)
        try:
            draft.write_state(state)
            self._crew.begin_writing(draft)
        except BaseException:
            draft.discard()
            raise
        self._recorded.clear()
        self._thread = threading.Thread(target=self._see_to, args=(draft,), name="checkpoint", daemon=True)
        self._thread.start()

    def step_recorded(self) -> None:
        """The metrics of the step are on disk: its checkpoint may be committed. Raises what went wrong with an earlier one."""
        self._recorded.set()
        self._raise_problem()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is committed; raises if it cannot be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_problem()

    def close(self) -> None:
        """The run is over, maybe by an error: finish what can still be finished, and leave nothing half-done."""
        if self._thread is not None:
            self._closing.set()
            if self._recorded.is_set():
                self._thread.join(CLOSING_S)
            self._given_up.set()
            self._thread.join()
            self._thread = None

    def _raise_problem(self) -> None:
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _see_to(self, draft: Draft) -> None:
        began = time.time()
        try:
            self._wait_for_writers(draft)
            while not self._recorded.wait(FIRST_POLL_S):
                if self._given_up.is_set():
                    draft.discard()
                    return
            self._checkpoints.commit(draft)
            self._on_commit(began, time.time() - began)
        except QuadrigaError as error:
            self._problem = error
        except Exception as error:  # not to be lost with this thread
            self._problem = CheckpointError(
                f"the checkpoint of step {draft.step} was not written: {type(error).__name__}: {error}",
                "see the traceback in the log of the runner",
            )

    def _wait_for_writers(self, draft: Draft) -> None:
        """CheckpointError, and no draft any more, if one of them fails or none gets ready in time."""
        deadline, pause = time.monotonic() + self._timeout_s, FIRST_POLL_S
        problem = ""
        while not problem:
            states = self._crew.written()
            if all(state is not None and state.done and not state.problem for state in states):
                return
            failed = [state.problem for state in states if state is not None and state.problem]
            if failed:
                problem = failed[0]
            elif None in states and self._closing.is_set():
                problem = "its writers are gone"
            elif time.monotonic() > deadline:
                problem = f"not written within {self._timeout_s:g} s (controller.call_timeout_s)"
            elif self._given_up.wait(pause):
                problem = "the run ended before it was written"
            pause = min(2 * pause, LONGEST_POLL_S)
        draft.discard()
        raise CheckpointError(
            f"the checkpoint of step {draft.step} was not written: {problem}",
            "the checkpoint before it is as it was; mend the cause, and the same command goes on from there",
        )
