"""Checkpoints that a step waits for only as long as its state is copied to host memory.

The workers write their copies in threads of their own. A thread of the driver waits for them and commits the checkpoint,
once the step's metrics are on disk as well: what a checkpoint says was done can be seen in the run directory.

A writer that dies takes its part of the copy with it. The driver meets that as the death of a worker (`WorkersDied`) at its
next word with the saver: new workers go on after the checkpoint before, and the one that was lost is written on the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from quadriga.checkpoint.checkpoint import Checkpoint, Draft
from quadriga.checkpoint.disk import readable_disk_errors
from quadriga.checkpoint.store import CheckpointStore
from quadriga.controller.calls import WorkersDied
from quadriga.errors import CheckpointError, QuadrigaError
from quadriga.protocol import DataProto

FIRST_POLL_S, LONGEST_POLL_S = 0.05, 2.0
CLOSING_S = 60.0
"""When the run ends by an error, a checkpoint that is being written gets so long to be finished."""
SILENT_S = 300.0
"""A writer answers beside its other work. One that lives but has said nothing for so long counts as dead."""


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        crew: offers `checkpoint_bytes`, `copy_state`, `begin_writing`, `written` and `death`.
        timeout_s: a checkpoint must be written within.
        flush: makes what was recorded of the steps durable; called before a checkpoint is committed.
        phase: `phase(name)` is around every wait of the driver, for those who watch it.
        on_commit: called by the committing thread with the time it began and the seconds it took.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        crew: Any,
        timeout_s: float,
        phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
        flush: Callable[[], None] = lambda: None,
        on_commit: Callable[[float, float], None] = lambda began, seconds: None,
    ) -> None:
        self._checkpoints, self._crew, self._timeout_s = checkpoints, crew, timeout_s
        self._phase, self._flush, self._on_commit = phase, flush, on_commit
        self._thread: threading.Thread | None = None
        self._recorded = threading.Event()
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._problem: QuadrigaError | None = None

    def rehearse(self, state: dict[str, Any]) -> None:
        """Write the driver's state once for nothing: what cannot be kept (of a sampler of one's own, say), and a disk without
        room for one checkpoint, show before step 1."""
        draft = self._checkpoints.begin(0, self._crew.checkpoint_bytes())
        try:
            draft.write_state(state)
        finally:
            draft.discard()

    def start(self, step: int, state: dict[str, Any], lots: Sequence[DataProto] = ()) -> None:
        """Copy everything, and begin to write it. Waits for the checkpoint before, if that is still being written.

        Args:
            state: of the driver.
            lots: groups that were generated for later steps.
        """
        self.finish()
        need_bytes = self._crew.copy_state()
        draft = self._checkpoints.begin(step, need_bytes)
        try:
            draft.write_state(state)
            write_lots(draft, lots)
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
            with self._phase("wait_for_checkpoint"):
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
            self._thread.join(CLOSING_S)  # at most one question to the workers, or a disk that takes its time
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
            self._flush()
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
        """CheckpointError, and no draft any more, if one of them fails or none gets ready in time; WorkersDied if one dies."""
        heard = time.monotonic()
        deadline, pause = heard + self._timeout_s, FIRST_POLL_S
        problem = ""
        while not problem:
            states = self._crew.written()
            if None not in states:
                heard = time.monotonic()
            if all(state is not None and state.done and not state.problem for state in states):
                return
            failed = [state.problem for state in states if state is not None and state.problem]
            if failed:
                problem = failed[0]
            elif None in states and self._closing.is_set():
                problem = "its writers are gone"
            elif None in states and (death := self._death_of_a_writer(draft, heard)) is not None:
                draft.discard()
                raise death
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

    def _death_of_a_writer(self, draft: Draft, heard: float) -> QuadrigaError | None:
        """Why a writer does not answer, if it is gone for good. `heard`: when all of them last answered."""
        during = f"the writing of the checkpoint of step {draft.step}"
        if (death := self._crew.death(during)) is not None:
            return death
        if time.monotonic() - heard > SILENT_S:
            return WorkersDied(
                f"a worker has not answered for {SILENT_S:g} s in {during}", "see `stalls/` for its stack"
            )
        return None


WINDOW = "window"
"""The part of a checkpoint that holds what was generated for later steps."""


def write_lots(draft: Draft, lots: Sequence[DataProto]) -> None:
    """CheckpointError, naming the column, for prompts with columns that are no plain data."""
    for lot in lots:
        file = draft.folder(WINDOW) / f"step_{lot.meta_info['step']:08d}.dataproto"
        try:
            with readable_disk_errors("write", file):
                lot.save_to_disk(file)
        except TypeError as error:
            raise CheckpointError(
                f"prompts that were drawn ahead cannot be kept: {error}",
                "use plain data in the rows of the dataset, or set async_training.staleness=0",
            ) from error


def read_lots(checkpoint: Checkpoint) -> list[DataProto]:
    """What `write_lots` wrote, in the order of their steps."""
    if WINDOW not in checkpoint.roles:
        return []
    return [DataProto.load_from_disk(file) for file in sorted(checkpoint.folder(WINDOW).iterdir())]
