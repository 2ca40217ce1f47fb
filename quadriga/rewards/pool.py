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
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any

from quadriga.config.schema import RewardConfig
from quadriga.config.typed import Problems, build
from quadriga.errors import ConfigError, QuadrigaError, RewardError
from quadriga.rewards.dispatcher import Call, Dispatcher
from quadriga.rewards.functions import (
    RewardFunction,
    as_reward_function,
    with_columns,
    with_scorer_default,
    wrong_columns,
)
from quadriga.rewards.nursery import Nursery, ScoringJob
from quadriga.rewards.result import ERROR, RewardResult, RewardSample
from quadriga.rewards.scorers import modules_for

_WINDOW = 256  # the error rate of streamed results is taken over the last so many …
_WINDOW_FILLED = 64  # … once there are so many


class RewardPool:
    """Scores samples in worker processes.

    Args:
        function: a `RewardFunction`, `"pkg.mod:fn"`, `"file.py:fn"` or a top-level function; None scores by data source.
        chunk_size: most calls handed to a worker at once.
        start_timeout_s: how long importing the function may take.
        log_file: where prints of user code go, cut at 4 MB; a temporary file when not given.
        options: the keys of `reward` in the configuration: `num_workers`, `timeout_s`, `on_error` and so on.

    The function is imported before the constructor returns; RewardError carries its traceback if that fails.
    """

    def __init__(
        self,
        function: RewardFunction | str | Callable[..., Any] | None = None,
        *,
        chunk_size: int = 32,
        start_timeout_s: float = 60.0,
        log_file: str | None = None,
        **options: Any,
    ) -> None:
        self.options = _checked(options)
        if chunk_size < 1:
            raise ConfigError(f"chunk_size={chunk_size} must be at least 1")
        isolation = self.options.require_isolation
        self.function = with_scorer_default(as_reward_function(function), "code", "require_isolation", isolation)
        self._lock = threading.Lock()
        self._open: set[Call] = set()
        self._counts: Counter[str] = Counter()
        self._failures: deque[bool] = deque(maxlen=_WINDOW)
        self._first_error: str | None = None
        self._ended = False
        self._error: QuadrigaError | None = None
        self._preloaded: set[str] = set()
        self._pid = os.getpid()
        self._log: IO[bytes] = open(log_file, "ab+") if log_file else tempfile.TemporaryFile()  # noqa: SIM115
        self._dispatcher = Dispatcher(
            lambda: Nursery(
                ScoringJob(self.function, self.options.memory_limit_mb, self.options.timeout_s),
                start_timeout_s,
                self._log,
            ),
            self.options,
            chunk_size=1 if self.function.batched else chunk_size,
            start_timeout_s=start_timeout_s,
            on_done=self._on_done,
            on_failed=self._on_failed,
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
        if failed > self.options.max_error_rate * len(results):
            first = next(result.error for result in results if result.failed)
            error = self._too_many(failed, len(results), first)
            self._dispatcher.stop(error)
            self._dispatcher.join()
            raise error
        return results

    def check_row(self, row: Mapping[str, Any]) -> None:
        """ConfigError if the function has parameters that rows such as this one, an item of the dataset, do not fill."""
        columns = with_columns(row, row.get("extra_info"))
        if missing := [name for name in self._dispatcher.needed_columns if name not in columns]:
            raise wrong_columns(self.function.target, missing, columns)

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the pool was opened: outcomes, retries, and processes started and lost."""
        return {**self._counts, **self._dispatcher.counters}

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

    def _on_done(self, call: Call, outcomes: list[RewardResult | str]) -> None:
        self._deliver(call, [self._failure(ERROR, said) if isinstance(said, str) else said for said in outcomes])

    def _on_failed(self, call: Call, outcome: str, message: str) -> None:
        self._deliver(call, [self._failure(outcome, message) for _ in call.handles])

    def _failure(self, outcome: str, message: str) -> RewardResult:
        self._first_error = self._first_error or message
        score = math.nan if isinstance(self.options.on_error, str) else float(self.options.on_error)
        return RewardResult(score, outcome, error=message)

    def _deliver(self, call: Call, results: list[RewardResult]) -> None:
        for result in results:
            result.attempts = call.attempts
            self._counts[result.outcome] += 1
            self._failures.append(result.failed)
        if any(result.failed for result in results):
            if self.options.on_error == "stop":
                self._dispatcher.stop(
                    RewardError(f"scoring a sample failed and reward.on_error is 'stop':\n{self._first_error}")
                )
                return  # the handles of this call, like all open ones, get that error when the pool has ended
            failed, seen = sum(self._failures), len(self._failures)
            if seen >= _WINDOW_FILLED and failed > self.options.max_error_rate * seen:
                self._dispatcher.stop(self._too_many(failed, seen, self._first_error))
        with self._lock:
            self._open.discard(call)
        for handle, result in zip(call.handles, results):
            handle.set_result(result)

    def _too_many(self, failed: int, seen: int, first: str | None) -> RewardError:
        return RewardError(
            f"{failed} of {seen} samples could not be scored, more than reward.max_error_rate="
            f"{self.options.max_error_rate:g} allows. The first failure:\n{first}",
            "mend the reward function, or raise reward.max_error_rate",
        )

    def _on_end(self, error: QuadrigaError | None) -> None:
        with self._lock:
            self._ended, self._error = True, error
            unfinished, self._open = self._open, set()
        self._log.close()
        closed = error or RewardError("the reward pool was closed before this sample was scored")
        for handle in (handle for call in unfinished for handle in call.handles):
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


def _checked(options: dict[str, Any]) -> RewardConfig:
    """The options by the rules of the configuration's schema; ConfigError names what cannot be."""
    problems = Problems()
    built: RewardConfig = build(
        RewardConfig,
        options,
        unknown=lambda path, value: problems.add(
            f"unknown key {path}", "docs/configuration.md lists the keys of reward"
        ),
        wrong=lambda path, value, error: problems.add(f"{path}={value!r}: {error}", "choose another value"),
        prefix="reward.",
    )
    if isinstance(built.on_error, str) and built.on_error != "stop":
        problems.add(f"reward.on_error={built.on_error!r} must be a score or 'stop'", "choose another value")
    problems.raise_if_any()
    return built


def _pickled(values: Any) -> bytes:
    try:
        return pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as problem:
        raise RewardError(
            f"ground truth or extra_info cannot be sent to the scoring processes: {problem}",
            "use plain data in the rows",
        ) from problem


_open_pools: weakref.WeakSet[RewardPool] = weakref.WeakSet()


@atexit.register
def _close_open_pools() -> None:
    for pool in list(_open_pools):
        pool.close()
