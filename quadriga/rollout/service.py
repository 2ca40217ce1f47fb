"""Generation as a service: one loop around an engine, in a thread of its own. Anybody may submit, results are a stream.

The loop: take in what was submitted, one step of the engine, give out what has finished. Where the engine shares its device
with training, a gate lets the loop step only between the driver's calls; new weights come in such a call, so always between two
steps. It is the same service whether the engine borrows the training module or has a process to itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from quadriga.rollout.interface import Completion, Progress, Request, RolloutEngine, WeightsEcho

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_WAIT_S = 10.0
"""`take` comes back after so long without a result, so that who waits for it learns that the process lives."""
LOOK_S = 0.02
"""Seconds between two looks at the tokens of samples that are being written: often enough for a reader's eye."""


class Gate(Protocol):
    """Says when a step may begin."""

    def step(self) -> AbstractContextManager[None]: ...


class Meter(Protocol):
    """Measures a stretch of work."""

    def record(self) -> Any: ...


class Sample(NamedTuple):
    """A finished sample on its way to whoever asked for it."""

    request_id: str
    sample_index: int
    token_ids: np.ndarray
    """`[R]` int32"""
    log_probs: np.ndarray
    """`[R]` float32, of the distribution that was sampled from."""
    full_log_probs: np.ndarray
    """`[R]` float32, of softmax(logits / temperature)."""
    finish_reason: str
    versions: tuple[tuple[int, int], ...]
    """Runs `(version, tokens)`."""
    cached_tokens: int = 0
    """Of its prompt, see `Completion`."""

    @classmethod
    def of(cls, done: Completion) -> Sample:
        return cls(
            done.request_id,
            done.sample_index,
            np.array(done.token_ids, np.int32),
            np.array(done.log_probs, np.float32),
            np.array(done.full_log_probs, np.float32),
            done.finish_reason,
            done.versions,
            done.cached_tokens,
        )


class Delivery(NamedTuple):
    """What has come out of a service since the last time, and what its time went into since it began."""

    samples: list[Sample]
    held: WeightsEcho | None
    """The newest weights that it has taken since the last time; None: none."""
    stepping_s: float
    idle_s: float
    """Seconds in which there was nothing to generate."""
    records: list[Any]
    """What its meter says of each stretch of work that has ended."""
    progress: Sequence[Progress] = ()
    """New tokens of running samples that were submitted to be watched."""


class GenerationService:
    """Owns an engine and answers many callers.

    Args:
        engine: nobody else steps it.
        gate: lets a step begin; None: always.
        frees_cache: let the engine sleep whenever it has nothing to do, and wake it for the next request.
        threaded: run the loop in a thread. Else somebody calls `advance`.
        meter: made when work begins after a rest, asked to `record` when there is nothing to do any more.
        choose_device: called first in the loop's thread: which device torch uses is a matter of each thread.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        gate: Gate | None = None,
        *,
        frees_cache: bool = False,
        threaded: bool = True,
        meter: Callable[[], Meter] | None = None,
        choose_device: Callable[[], None] | None = None,
    ) -> None:
        self.engine, self._gate, self._frees_cache = engine, gate, frees_cache
        self._make_meter, self._choose_device = meter, choose_device
        self._meter: Meter | None = None
        self._records: list[Any] = []
        self._changed = threading.Condition()
        self._submitted: list[Request] = []
        self._aborted: set[str] = set()
        self._finished: list[Sample] = []
        self._watched: dict[tuple[str, int], int] = {}
        self._progress: list[Progress] = []
        self._next_look = 0.0
        self._held: WeightsEcho | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._stepping_s = self._idle_s = 0.0
        self._idle_since: float | None = time.monotonic()
        if frees_cache:
            engine.sleep()
        self._thread = threading.Thread(target=self._loop, name="generation", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # ---- for callers, from any thread ----

    def submit(self, requests: Iterable[Request], watched: bool = False) -> None:
        """Take requests up. One that can never run ends the service: whoever calls `take` gets the reason.

        Of those that are `watched`, `take` also gives the tokens of unfinished samples, as they come.
        """
        requests = list(requests)
        with self._changed:
            self._submitted += requests
            if watched:
                self._watched.update({(r.request_id, i): 0 for r in requests for i in r.sample_indices})
            self._changed.notify_all()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their samples come out with what they have, with the finish reason "aborted"."""
        with self._changed:
            self._aborted.update(request_ids)
            self._changed.notify_all()

    def take(self, timeout_s: float = LONGEST_WAIT_S) -> Delivery:
        """What has finished since the last time; waits for the first, but not longer than that. Raises what broke the loop."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            if self._failure is not None:
                raise self._failure
            samples, self._finished = self._finished, []
            waiting = time.monotonic() - self._idle_since if self._idle_since is not None else 0.0
            held, self._held = self._held, None
            records, self._records = self._records, []
            progress, self._progress = self._progress, []
            return Delivery(samples, held, self._stepping_s, self._idle_s + waiting, records, progress)

    def take_weights(
        self, version: int, weights: Iterable[tuple[str, Tensor]] | None, tells: bool = True
    ) -> WeightsEcho:
        """Give the engine new weights; with `tells` who listens hears of it.

        The caller has the gate, so the loop is between two steps.
        """
        echo = self.engine.update_weights(version, weights)
        with self._changed:
            if tells:
                self._held = echo
            self._changed.notify_all()  # the loop too: samples may have been found finished
        return echo

    def close(self) -> None:
        """Stop after the step at hand."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LONGEST_WAIT_S)

    # ---- the loop ----

    def advance(self) -> bool:
        """One turn of the loop: take in, step, give out. False if there was nothing to do."""
        with self._changed:
            requests, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, set()
        if not requests and self.engine.idle:
            return False  # there is nothing left of what was aborted
        began = time.monotonic()
        if self._gate is None:
            finished = self._step(requests, aborted)
        else:
            with self._gate.step():
                finished = self._step(requests, aborted)
        self._give_out(finished, time.monotonic() - began)
        return True

    def _give_out(self, finished: Sequence[Completion], stepping_s: float) -> None:
        with self._changed:
            self._stepping_s += stepping_s
            if finished:
                self._finished += map(Sample.of, finished)
                self._changed.notify_all()

    def _step(self, requests: Sequence[Request], aborted: set[str]) -> list[Completion]:
        engine = self.engine
        self._note_idle(False)  # behind the gate: a meter forgets the peak of memory, which a call may be measuring
        engine.wake()
        for request in requests:
            engine.submit(request)
        if aborted:
            engine.abort(aborted)
        finished = engine.step()
        if self._watched:
            self._look(finished)
        if engine.idle:
            self._note_idle(True)
            if self._frees_cache:
                engine.sleep()  # before anybody hears of the last sample: training may want that memory at once
        return finished

    def _look(self, finished: Sequence[Completion]) -> None:
        """Note the new tokens of watched samples; of those that are finished, the sample itself tells."""
        with self._changed:
            for done in finished:
                self._watched.pop((done.request_id, done.sample_index), None)
            seen = dict(self._watched)
        if not seen or time.monotonic() < self._next_look:
            return
        news = self.engine.look(seen)
        self._next_look = time.monotonic() + LOOK_S
        with self._changed:
            for part in news:
                self._watched[part.request_id, part.sample_index] += len(part.token_ids)
            self._progress += news
            self._changed.notify_all()

    def _has_news(self) -> bool:
        return bool(self._finished or self._progress or self._held or self._failure or self._closed)

    def _has_work(self) -> bool:
        return bool(self._submitted or self._closed or not self.engine.idle)

    def _loop(self) -> None:
        import torch

        torch.set_grad_enabled(False)  # holds for this thread alone
        try:
            if self._choose_device is not None:
                self._choose_device()
            while not self._closed:
                if not self.advance():
                    with self._changed:
                        self._changed.wait_for(self._has_work, LONGEST_WAIT_S)
        except BaseException as error:  # whoever waits for samples raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _note_idle(self, idle: bool) -> None:
        with self._changed:
            if idle and self._idle_since is None:
                self._idle_since = time.monotonic()
                if self._meter is not None:
                    self._records.append(self._meter.record())
            elif not idle and self._idle_since is not None:
                self._idle_s += time.monotonic() - self._idle_since
                self._idle_since = None
                self._meter = self._make_meter() if self._make_meter is not None else None
