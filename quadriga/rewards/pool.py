"""The reward pool: scoring in processes that can be killed.

    with RewardPool("my_rewards:score", num_workers=4, timeout_s=10) as pool:
        results = pool.score_all(samples)            # or:
        handles = pool.submit(samples)               # returns at once
        for handle in pool.as_completed(handles):    # as they finish
            handle.result()

User code runs in the scoring processes only, its import included; whatever it does there, the driver goes on.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import math
import os
import pickle
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from quadriga.errors import ConfigError, RewardError
from quadriga.rewards.calls import Call
from quadriga.rewards.dispatcher import Dispatcher
from quadriga.rewards.functions import RewardFunction, default_function, from_callable, reward_function
from quadriga.rewards.launch import Nursery
from quadriga.rewards.result import ERROR, RewardResult, RewardSample
from quadriga.rewards.scorers import modules_for

_SPARE_SLOTS = 128  # so many hanging calls can run out side by side
_WINDOW = 256  # the error rate of streamed results is taken over the last so many …
_WINDOW_FILLED = 64  # … once there are so many


class RewardPool:
    """Scores samples in worker processes.

    Args:
        function: a `RewardFunction`, `"pkg.mod:fn"`, `"file.py:fn"` or a top-level function; None scores by data source.
        num_workers: scoring processes. Calls that hang do not count: others take their place meanwhile.
        timeout_s: deadline of one call, from the moment a worker takes it up.
        max_retries: how often a call that failed or timed out is tried again.
        on_error: score of a sample whose scoring failed or timed out, or `"stop"` to fail the pool.
        max_error_rate: fail the pool when a larger share of a batch (of the last 256 results when streaming) failed.
        memory_limit_mb: memory of one scoring process with all its children; None for no limit.
        chunk_size: most calls handed to a worker at once.
        start_timeout_s: how long importing the function may take.
        log_file: where prints of user code go, cut at 4 MB; a temporary file when not given.

    The function is imported before the constructor returns; RewardError carries its traceback if that fails.
    """

    def __init__(
        self,
        function: RewardFunction | str | Callable[..., Any] | None = None,
        *,
        num_workers: int = 2,
        timeout_s: float = 30.0,
        max_retries: int = 0,
        on_error: float | str = 0.0,
        max_error_rate: float = 0.5,
        memory_limit_mb: int | None = 4096,
        chunk_size: int = 32,
        start_timeout_s: float = 60.0,
        log_file: str | None = None,
    ) -> None:
        _check(num_workers, timeout_s, max_retries, on_error, max_error_rate, memory_limit_mb, chunk_size)
        self.function = _resolve(function)
        self._on_error, self._max_error_rate = on_error, max_error_rate
        self._lock = threading.Lock()
        self._open: set[Call] = set()
        self._counts: Counter[str] = Counter()
        self._failures: deque[bool] = deque(maxlen=_WINDOW)
        self._first_error: str | None = None
        self._ended = False
        self._error: RewardError | None = None
        self._preloaded: set[str] = set()
        self._pid = os.getpid()
        nursery = Nursery(
            self.function,
            slots=num_workers + _SPARE_SLOTS,
            memory_limit_mb=memory_limit_mb,
            start_timeout_s=start_timeout_s,
            log_file=log_file,
        )
        self._dispatcher = Dispatcher(
            nursery,
            num_workers=num_workers,
            timeout_s=timeout_s,
            max_retries=max_retries,
            chunk_size=1 if self.function.batched else chunk_size,
            start_timeout_s=start_timeout_s,
            on_reply=self._on_reply,
            on_failure=self._on_failure,
            on_end=self._on_end,
        )
        _open_pools.add(self)

    # -- scoring

    def submit(self, samples: Iterable[RewardSample]) -> list[Future[RewardResult]]:
        """Queue samples and return at once, one handle per sample, in order.

        A handle is a `concurrent.futures.Future`; it can be awaited through `asyncio.wrap_future`. Callbacks on it run
        in the pool's own thread and must be quick. A batched function is called once for all samples of one submit.
        """
        rows = [(s.data_source, s.solution_str, s.ground_truth, s.extra_info) for s in samples]
        preload = self._to_preload(rows)
        handles: list[Future[RewardResult]] = [Future() for _ in rows]
        for handle in handles:
            handle.set_running_or_notify_cancel()
        if self.function.batched:
            columns = tuple([row[k] for row in rows] for k in range(4))
            calls = [Call(_pickled(columns), handles)] if rows else []
        else:
            calls = [Call(_pickled(row), [handle]) for row, handle in zip(rows, handles)]
        with self._lock:
            if self._ended:
                raise self._error or RewardError("the reward pool is closed", "open a new one")
            self._open.update(calls)
        self._dispatcher.put(calls, preload)
        return handles

    @staticmethod
    def as_completed(
        handles: Iterable[Future[RewardResult]], timeout: float | None = None
    ) -> Iterator[Future[RewardResult]]:
        """Yield handles as they finish; TimeoutError when some are not done after `timeout` seconds."""
        return concurrent.futures.as_completed(handles, timeout)

    def score_all(
        self, samples: Sequence[RewardSample], on_result: Callable[[int, RewardResult], None] | None = None
    ) -> list[RewardResult]:
        """Score a batch and wait for it; `on_result(index, result)` is told of each as it finishes."""
        handles = self.submit(samples)
        if on_result is not None:
            index = {handle: k for k, handle in enumerate(handles)}
            for handle in self.as_completed(handles):
                on_result(index[handle], handle.result())
        return self.collect(handles)

    def collect(self, handles: Sequence[Future[RewardResult]]) -> list[RewardResult]:
        """The results of a batch that was submitted, in one go or in parts; the batch's error rate is checked."""
        results = [handle.result() for handle in handles]
        failed = sum(result.failed for result in results)
        if failed > self._max_error_rate * len(results):
            first = next(result.error for result in results if result.failed)
            error = self._too_many(failed, len(results), first)
            self._dispatcher.stop(error)
            self._dispatcher.join()
            raise error
        return results

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the pool was opened: outcomes, retries, and processes started and lost."""
        return {**self._counts, **self._dispatcher.counters}

    # -- the end

    def close(self) -> None:
        """End all scoring processes and wait for it; calls that are not finished fail. Closing twice is no error."""
        if os.getpid() != self._pid:
            return  # a fork of the driver has no part in the pool
        self._dispatcher.stop()
        self._dispatcher.join()
        _open_pools.discard(self)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- called in the dispatcher's thread

    def _on_reply(self, call: Call, reply: dict[str, Any]) -> None:
        results = []
        for entry in reply["results"]:
            result = self._failure(ERROR, entry["error"]) if "error" in entry else RewardResult(**entry)
            result.seconds = reply["seconds"]
            results.append(result)
        self._deliver(call, results)

    def _on_failure(self, call: Call, outcome: str, message: str) -> None:
        self._deliver(call, [self._failure(outcome, message) for _ in call.owner])

    def _failure(self, outcome: str, message: str) -> RewardResult:
        self._first_error = self._first_error or message
        score = math.nan if isinstance(self._on_error, str) else float(self._on_error)
        return RewardResult(score, outcome, error=message)

    def _deliver(self, call: Call, results: list[RewardResult]) -> None:
        for result in results:
            result.attempts = call.attempts
            self._counts[result.outcome] += 1
            self._failures.append(result.failed)
        if any(result.failed for result in results):
            if self._on_error == "stop":
                self._dispatcher.stop(
                    RewardError(f"scoring a sample failed and reward.on_error is 'stop':\n{self._first_error}")
                )
                return  # the handles of this call, like all open ones, get that error when the pool has ended
            failed, seen = sum(self._failures), len(self._failures)
            if seen >= _WINDOW_FILLED and failed > self._max_error_rate * seen:
                self._dispatcher.stop(self._too_many(failed, seen, self._first_error))
        with self._lock:
            self._open.discard(call)
        for handle, result in zip(call.owner, results):
            handle.set_result(result)

    def _too_many(self, failed: int, seen: int, first: str | None) -> RewardError:
        return RewardError(
            f"{failed} of {seen} samples could not be scored, more than reward.max_error_rate={self._max_error_rate:g} "
            f"allows. The first failure:\n{first}",
            "mend the reward function, or raise reward.max_error_rate",
        )

    def _on_end(self, error: RewardError | None) -> None:
        with self._lock:
            self._ended, self._error = True, error
            unfinished, self._open = self._open, set()
        closed = error or RewardError("the reward pool was closed before this sample was scored")
        for call in unfinished:
            for handle in call.owner:
                if not handle.done():
                    handle.set_exception(closed)

    # -- details

    def _to_preload(self, rows: list[tuple[Any, ...]]) -> list[str]:
        """Modules to import once, before workers are forked; also where an unknown data source is found out."""
        if not self.function.is_default:
            return []
        wanted = set(modules_for({row[0] for row in rows}, self.function.kwargs.get("targets")))
        new = wanted - self._preloaded
        self._preloaded |= new
        return sorted(new)


def _pickled(values: Any) -> bytes:
    try:
        return pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as problem:
        raise RewardError(
            f"ground truth or extra_info cannot be sent to the scoring processes: {problem}",
            "use plain data in the rows",
        ) from problem


def _resolve(function: RewardFunction | str | Callable[..., Any] | None) -> RewardFunction:
    if function is None:
        return default_function()
    if isinstance(function, RewardFunction):
        return function
    if isinstance(function, str):
        return reward_function(function)
    return from_callable(function)


def _check(
    num_workers: int,
    timeout_s: float,
    max_retries: int,
    on_error: float | str,
    max_error_rate: float,
    memory_limit_mb: int | None,
    chunk_size: int,
) -> None:
    wrong = None
    if num_workers < 1:
        wrong = f"num_workers={num_workers} must be at least 1"
    elif not timeout_s > 0 or math.isinf(timeout_s):
        wrong = f"timeout_s={timeout_s} must be above 0 and finite"
    elif max_retries < 0:
        wrong = f"max_retries={max_retries} must not be negative"
    elif isinstance(on_error, str) and on_error != "stop":
        wrong = f"on_error={on_error!r} must be a score or 'stop'"
    elif not isinstance(on_error, str) and not math.isfinite(on_error):
        wrong = f"on_error={on_error} must be finite"
    elif not 0.0 <= max_error_rate <= 1.0:
        wrong = f"max_error_rate={max_error_rate} must lie between 0 and 1"
    elif memory_limit_mb is not None and memory_limit_mb < 64:
        wrong = f"memory_limit_mb={memory_limit_mb} is too little to run Python; give at least 64"
    elif chunk_size < 1:
        wrong = f"chunk_size={chunk_size} must be at least 1"
    if wrong:
        raise ConfigError(f"reward.{wrong}")


_open_pools: weakref.WeakSet[RewardPool] = weakref.WeakSet()


@atexit.register
def _close_open_pools() -> None:
    for pool in list(_open_pools):
        pool.close()
