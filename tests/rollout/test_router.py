"""Many engines behind one queue: nobody idles while requests wait, nobody writes with the wrong weights, nothing is lost."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quadriga.errors import WorkerError
from quadriga.rollout.interface import Request, SamplingParams, WeightsEcho
from quadriga.rollout.router import Delivered, Died, Joined, Router
from quadriga.rollout.service import Delivery, Sample

NOTHING = np.zeros(0, np.int32)


class Simulated:
    """Engines that need as many turns for a sample as the request's `max_new_tokens`; a turn is a call of `events`."""

    def __init__(self, engines: int, capacity: int) -> None:
        self.capacities = [capacity] * engines
        self.queued: list[deque[tuple[Request, int]]] = [deque() for _ in range(engines)]
        self.running: list[list[list[Any]]] = [[] for _ in range(engines)]
        self.version = [0] * engines
        self.held: dict[int, int] = {}
        self.idle_turns, self.turns = 0, 0
        self.written: list[tuple[str, int, int, int]] = []
        self.kill: int | None = None
        self.dead: set[int] = set()
        self.aborted: list[str] = []

    def submit(self, rank: int, requests: list[Request]) -> None:
        assert rank not in self.dead
        for r in requests:
            assert r.version in (None, self.version[rank]), "given to an engine with other weights"
            self.queued[rank] += [(r, k) for k in r.sample_indices]

    def abort(self, rank: int, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def take_weights(self, rank: int, version: int) -> None:
        self.held[rank] = version

    def events(self, timeout_s: float) -> list[Any]:
        self.turns += 1
        events: list[Any] = []
        if self.kill is not None:
            rank, self.kill = self.kill, None
            self.dead.add(rank)
            self.queued[rank].clear()
            self.running[rank].clear()
            return [Died(rank, WorkerError("it died"))]
        for rank in range(len(self.capacities)):
            if rank in self.dead:
                continue
            while self.queued[rank] and len(self.running[rank]) < self.capacities[rank]:
                request, k = self.queued[rank].popleft()
                self.running[rank].append([request, k, request.params.max_new_tokens])
            self.idle_turns += not self.running[rank]
            done = []
            for job in self.running[rank]:
                job[2] -= 1
                if job[2] == 0:
                    done.append(job)
            self.running[rank] = [job for job in self.running[rank] if job[2] > 0]
            held = None
            if rank in self.held:
                self.version[rank] = self.held.pop(rank)
                held = WeightsEcho(self.version[rank], 0)
            samples = [
                Sample(r.request_id, k, NOTHING, NOTHING, NOTHING, "stop", ((self.version[rank], 1),))
                for r, k, _ in done
            ]
            self.written += [(s.request_id, s.sample_index, self.version[rank], rank) for s in samples]
            if samples or held:
                events.append(Delivered(rank, Delivery(samples, held, 0.0, 0.0, [])))
        return events

    def join(self, rank: int, version: int) -> Joined:
        self.dead.discard(rank)
        self.version[rank] = version
        return Joined(rank, version)


def ask(name: str, turns: int = 3, n: int = 1, version: int | None = 0) -> Request:
    return Request(name, [1], SamplingParams(max_new_tokens=turns), (0, 0), tuple(range(n)), 0, None, version)


def router_of(engines: Simulated) -> tuple[Router, list[Sample]]:
    came: list[Sample] = []
    return Router(engines, came.extend, threaded=False), came


def test_ragged_lengths_leave_no_engine_idle_while_requests_wait() -> None:
    draw = random.Random(0)
    engines = Simulated(2, 8)
    router, came = router_of(engines)
    router.holds(0)
    router.submit([ask(f"r{i}", draw.choice([2, 3, 5, 60])) for i in range(400)])
    idle_while_waiting = turns = 0
    while len(came) < 400:
        waiting, before = router.waiting(), engines.idle_turns
        router.pump()
        if waiting:
            turns += 2
            idle_while_waiting += engines.idle_turns - before
    assert idle_while_waiting <= 0.05 * turns
    assert sorted(s.request_id for s in came) == sorted(f"r{i}" for i in range(400))


def test_a_request_is_written_by_the_weights_it_names() -> None:
    engines = Simulated(3, 4)
    router, came = router_of(engines)
    router.publish(0)
    router.wait(lambda: router.all_hold(0))
    router.submit(ask(f"a{i}", 1 + i % 7, version=0) for i in range(40))
    router.publish(1)
    router.submit(ask(f"b{i}", 1 + i % 5, version=1) for i in range(40))
    router.publish(2)
    router.submit(ask(f"c{i}", 2, version=2) for i in range(10))
    assert router.oldest_needed() == 0
    router.wait(lambda: len(came) == 90)
    assert {(name[0], version) for name, _, version, _ in engines.written} == {("a", 0), ("b", 1), ("c", 2)}
    assert router.oldest_needed() == 2


def test_what_comes_first_is_dealt_first() -> None:
    engines = Simulated(1, 1)
    router, came = router_of(engines)
    router.holds(0)
    router.submit(ask(f"later{i}", 1) for i in range(5))
    router.submit([ask("first", 1)], first=True)
    router.wait(lambda: len(came) == 6)
    assert [s.request_id for s in came[:2]] == ["later0", "first"]


def test_requests_of_one_affinity_go_to_the_engine_that_had_the_last() -> None:
    engines = Simulated(3, 4)
    router, came = router_of(engines)
    router.holds(0)
    for call in range(5):
        router.submit(replace(ask(f"{e}.{call}", 1 + (e + call) % 3), call=call, affinity=f"e{e}") for e in range(6))
        router.wait(lambda wanted=6 * (call + 1): len(came) == wanted)
    ranks = {e: {rank for name, _, _, rank in engines.written if name.startswith(f"{e}.")} for e in range(6)}
    assert all(len(found) == 1 for found in ranks.values())
    assert {rank for found in ranks.values() for rank in found} == {0, 1, 2}


def test_an_engine_that_is_full_dead_or_has_other_weights_is_no_place_for_its_affinity() -> None:
    engines = Simulated(2, 2)
    router, came = router_of(engines)
    router.holds(0)
    router.submit([replace(ask("first", 1), affinity="e")])
    router.wait(lambda: len(came) == 1)
    (home,) = (rank for *_, rank in engines.written)
    router.submit([replace(ask(f"more{i}", 9), affinity="e") for i in range(3)])
    assert sorted(router.loads().items()) == [(home, 2), (1 - home, 1)]  # the third found it full
    router.wait(lambda: len(came) == 4)
    last = 1 - home
    engines.kill = last
    router.pump()
    router.submit([replace(ask("elsewhere", 1), affinity="e")])
    router.wait(lambda: len(came) == 5)
    assert engines.written[-1] == ("elsewhere", 0, 0, home)


def test_weights_that_a_request_names_come_before_its_affinity() -> None:
    engines = Simulated(2, 2)
    router, came = router_of(engines)
    router.holds(0)
    router.submit([replace(ask("first", 20), affinity="e")])
    router.pump()
    ((home, _),) = router.loads().items()
    router.publish(1)
    router.submit([replace(ask("second", 1, version=1), affinity="e"), replace(ask("third", 1), affinity="f")])
    router.wait(lambda: len(came) == 3)
    assert [(name, rank) for name, *_, rank in engines.written] == [
        ("third", home),
        ("second", 1 - home),
        ("first", home),
    ]


def test_a_dead_engine_loses_nothing_and_doubles_nothing() -> None:
    engines = Simulated(2, 4)
    router, came = router_of(engines)
    router.holds(0)
    router.submit(ask(f"r{i}", 2 + i % 9, n=3) for i in range(30))
    for _ in range(5):
        router.pump()
    engines.kill = 1
    router.pump()
    assert router.samples_again > 0
    for _ in range(3):
        router.pump()
    assert all(rank == 0 for *_, rank in engines.written[-3:])
    real = engines.events
    engines.events = lambda timeout_s: [engines.join(1, 0)]  # type: ignore[method-assign]
    router.pump()
    engines.events = real  # type: ignore[method-assign]
    router.wait(lambda: len(came) == 90)
    keys = [(s.request_id, s.sample_index) for s in came]
    assert len(set(keys)) == len(keys) == 90
    assert {rank for *_, rank in engines.written[-10:]} == {0, 1}


def test_an_engine_goes_back_to_older_weights_for_those_who_need_them() -> None:
    engines = Simulated(1, 4)
    router, came = router_of(engines)
    router.publish(0)
    router.publish(1)
    router.wait(lambda: router.all_hold(1))
    router.submit([ask("old", version=0)])
    router.wait(lambda: len(came) == 1)
    assert engines.written == [("old", 0, 0, 0)]


@pytest.mark.parametrize("drains", [False, True])
def test_weights_without_a_name_are_taken_at_once_or_after_what_runs(drains: bool) -> None:
    engines = Simulated(1, 2)
    router, came = router_of(engines)
    router.publish(0, drains)
    router.wait(lambda: router.all_hold(0))
    router.submit(ask(f"r{i}", 10, version=None) for i in range(4))
    router.pump()
    router.publish(1, drains)
    router.wait(lambda: router.all_hold(1))
    assert (len(came) == 2) is drains
    router.wait(lambda: len(came) == 4)


def test_aborted_requests_that_wait_are_forgotten_and_others_are_told() -> None:
    engines = Simulated(1, 1)
    router, came = router_of(engines)
    router.holds(0)
    router.submit([ask("runs", 3), ask("waits", 3), ask("stays", 1)])
    router.abort(["runs", "waits"])
    assert engines.aborted == ["runs"]
    router.wait(lambda: len(came) == 2)
    assert [s.request_id for s in came] == ["runs", "stays"]


def test_what_an_engine_raises_reaches_whoever_waits() -> None:
    engines = Simulated(1, 1)

    def broken(timeout_s: float) -> list[Any]:
        raise WorkerError("the logits are not finite")

    engines.events = broken  # type: ignore[method-assign]
    router = Router(engines, lambda samples: None, threaded=True)
    with pytest.raises(WorkerError, match="not finite"):
        router.wait(lambda: False)
    router.close()
