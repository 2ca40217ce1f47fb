"""Calls to the workers of a group one by one: the death of one leaves the others at their work."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import ray

from quadriga.controller.calls import WorkersDied, fetch
from quadriga.controller.ray_group import RayWorkerGroup


class _Call(NamedTuple):
    pending: Any
    method: str
    deadline: float


class SingleCalls:
    """Calls under way, at most one for each worker of a group."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self.group = group
        self._calls: dict[int, _Call] = {}

    def start(self, rank: int, method: str, *args: Any) -> None:
        self.group.prepare_call()
        pending = self.group.submit(rank, method, args, {})
        self._calls[rank] = _Call(pending, method, time.monotonic() + self.group.call_timeout_s)

    def answers(self) -> dict[int, Any]:
        """Wait until a call has ended; the answers of all that have, by rank.

        In place of the answer of a worker that died, or did not answer in time, stands its WorkersDied. What a worker
        raised is raised.
        """
        pending = {call.pending: rank for rank, call in self._calls.items()}
        patience = min(call.deadline for call in self._calls.values()) - time.monotonic()
        ray.wait(list(pending), num_returns=1, timeout=max(0.0, patience), fetch_local=False)
        ended, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=False)
        late = [rank for rank, call in self._calls.items() if call.deadline <= time.monotonic()]
        return {rank: self._take(rank) for rank in dict.fromkeys([*(pending[ref] for ref in ended), *late])}

    def stop(self) -> bool:
        """End the processes that have not answered, from any thread: they die for whoever waits. False: there are none."""
        ranks = list(self._calls)
        for rank in ranks:
            ray.kill(self.group.workers[rank], no_restart=True)
        return bool(ranks)

    def _take(self, rank: int) -> Any:
        call, group = self._calls.pop(rank), self.group
        waited_s = group.call_timeout_s if call.deadline <= time.monotonic() else 0.0
        try:
            (answer,) = fetch(
                [call.pending],
                lambda: [group.seats[rank]],
                call.method,
                group.call_timeout_s,
                group.doing,
                waited_s=waited_s,
            )
            return answer
        except WorkersDied as death:
            return death
