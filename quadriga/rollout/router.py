"""Many engines behind one queue: whoever has room takes the next request, and nobody generates with the wrong weights.

Requests wait here, not in the engines: an engine is given what it can run at once and a little more, so that short samples on
one and long samples on another leave none of them idle while requests wait. A request may name the weights that must write it;
an engine moves on to other weights when it has nothing left to do for those it holds and somebody waits for others.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from quadriga.errors import QuadrigaError
from quadriga.rollout.interface import Request
from quadriga.rollout.reuse import ReuseMeter
from quadriga.rollout.service import Delivery, Sample

PUMP_S = 5.0
"""The router looks up from waiting for engines at least so often."""


REMEMBERED = 65_536
"""So many affinities are remembered, the latest."""
NAP_S = 0.005
"""Who pumps himself and got nothing sleeps so long: it is others, agents or scorers, that he waits for."""

CLOSING_S = 0.2
"""Its thread may wait for engines when the router is closed; it ends with them, so nobody need wait for it."""


class Delivered(NamedTuple):
    """An engine gave samples out, maybe none, or tells of weights that it has taken."""

    rank: int
    delivery: Delivery


class Joined(NamedTuple):
    """A new engine is there in place of one that died, with these weights."""

    rank: int
    version: int


class Died(NamedTuple):
    """An engine is gone. The others go on; a `Joined` of the same rank may follow."""

    rank: int
    cause: QuadrigaError


class Engines(Protocol):
    """The engines of a run, as the router reaches them. Nothing here waits for an engine but `events`."""

    @property
    def capacities(self) -> Sequence[int]:
        """Samples that each engine can run at the same time, by rank."""

    def submit(self, rank: int, requests: list[Request]) -> None: ...

    def abort(self, rank: int, request_ids: list[str]) -> None: ...

    def take_weights(self, rank: int, version: int) -> None:
        """Let an engine begin to take the weights of a version that was published."""

    def events(self, timeout_s: float) -> list[Delivered | Joined | Died]:
        """What happened; waits for the first, but not longer than that. Raises what an engine raised."""


@dataclass(eq=False)
class _Seat:
    """What the router knows of an engine."""

    rank: int
    capacity: int
    alive: bool = True
    version: int | None = None
    """None: it holds no weights yet."""
    taking: int | None = None
    """The weights that are on their way to it."""
    load: int = 0
    """Samples that it has been given and has not finished."""
    running: dict[str, _Ticket] = field(default_factory=dict)
    stepping_s: float = 0.0
    idle_s: float = 0.0


@dataclass(eq=False)
class _Ticket:
    request: Request
    missing: set[int]
    """Samples of it that are not finished."""


class Router:
    """Deals requests to engines and samples to whoever asked.

    Args:
        engines: how they are reached.
        on_samples: called with samples as they come, in the thread that pumps, without a lock of the router held.
        threaded: a thread of the router pumps all the time. Else whoever waits does, for a debugger.
    """

    def __init__(self, engines: Engines, on_samples: Callable[[list[Sample]], None], threaded: bool = True) -> None:
        self._engines, self._on_samples = engines, on_samples
        self.changed = threading.Condition(threading.RLock())
        """Notified whenever samples or weights have come. Those who keep state in step with the router hold it."""
        self._seats = [_Seat(rank, capacity) for rank, capacity in enumerate(engines.capacities)]
        self._queues: dict[int | None, deque[Request]] = {}
        self._last_of: OrderedDict[str, int] = OrderedDict()
        """Affinity → rank of the engine that was given its last request, the latest last."""
        self._newest: int | None = None
        self._reserved: Counter[int] = Counter()
        self._drains = True
        self._failure: BaseException | None = None
        self._closed = False
        self.samples_again = 0
        """Samples that were generated again because their engine had died."""
        self.reuse = ReuseMeter()
        self._thread = threading.Thread(target=self._pump_on, name="router", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # ---- what goes in ----

    def submit(self, requests: Iterable[Request], first: bool = False) -> None:
        """Have requests generated; with `first` before those of the same version that wait already."""
        with self.changed:
            for request in reversed(list(requests)) if first else requests:
                queue = self._queues.setdefault(request.version, deque())
                (queue.appendleft if first else queue.append)(request)
            self._deal()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests. Those that have begun come out as they are; those that wait here are forgotten."""
        ids = set(request_ids)
        with self.changed:
            for version, queue in self._queues.items():
                self._queues[version] = deque(r for r in queue if r.request_id not in ids)
            for seat in self._seats:
                if begun := ids & seat.running.keys():
                    self._engines.abort(seat.rank, sorted(begun))

    def publish(self, version: int, drains: bool = True) -> None:
        """Weights that engines can take: at once, or with `drains` when the samples they are at are finished."""
        with self.changed:
            self._newest, self._drains = version, drains
            self._deal()

    def holds(self, version: int) -> None:
        """All engines hold these weights already."""
        with self.changed:
            self._newest = version
            for seat in self._seats:
                seat.version, seat.taking = version, None
            self._deal()
            self.changed.notify_all()

    def reserve(self, version: int | None, episodes: int = 1) -> None:
        """Say that so many episodes will go on asking for the weights of `version`: engines that hold them keep them.

        A negative number takes it back.
        """
        if version is None:
            return
        with self.changed:
            self._reserved[version] += episodes
            if not self._reserved[version]:
                del self._reserved[version]
                self._deal()

    def fail(self, error: BaseException) -> None:
        """Let everybody who waits raise `error`."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    # ---- what comes out ----

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until `ready()`, which is asked whenever something has come. Raises what an engine raised.

        The wait itself has no deadline: it is the caller's phase that the watchdog looks at.
        """
        while True:
            with self.changed:
                if self._failure is not None:
                    raise self._failure
                if ready():
                    return
                if self._thread is not None:
                    self.changed.wait(PUMP_S)
                    continue
            if not self.pump():
                with self.changed:
                    if self._failure is None and not ready():
                        self.changed.wait(NAP_S)

    @property
    def is_new(self) -> bool:
        """Whether no engine holds weights yet."""
        return all(seat.version is None for seat in self._seats)

    def all_hold(self, version: int) -> bool:
        return all(seat.version == version for seat in self._seats)

    def oldest_needed(self) -> int:
        """The oldest weights that a request needs which is not finished, or that an engine is yet to take."""
        with self.changed:
            needed = [version for version, queue in self._queues.items() if queue and version is not None]
            for seat in self._seats:
                needed += [t.request.version for t in seat.running.values() if t.request.version is not None]
                needed += [seat.taking] if seat.taking is not None else []
            needed += self._reserved
            return min(needed, default=self._newest or 0)

    def waiting(self) -> int:
        """Samples that no engine has taken up."""
        with self.changed:
            return sum(len(r.sample_indices) for queue in self._queues.values() for r in queue)

    def running(self) -> int:
        """Samples that engines are at."""
        with self.changed:
            return sum(seat.load for seat in self._seats)

    def loads(self) -> dict[int, int]:
        """Rank → samples to finish, of the engines that have some."""
        with self.changed:
            return {seat.rank: seat.load for seat in self._seats if seat.load}

    def seconds(self) -> tuple[float, float]:
        """Engine time spent with steps and with nothing to do, over all engines, since the run began."""
        with self.changed:
            return sum(s.stepping_s for s in self._seats), sum(s.idle_s for s in self._seats)

    def close(self) -> None:
        """Stop pumping."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSING_S)

    # ---- the pump ----

    def pump(self, timeout_s: float = PUMP_S) -> bool:
        """Take note of what engines tell. False: no sample was among it."""
        events = self._engines.events(timeout_s)
        samples: list[Sample] = []
        with self.changed:
            for event in events:
                if isinstance(event, Delivered):
                    samples += self._delivered(self._seats[event.rank], event.delivery)
                elif isinstance(event, Joined):
                    seat = self._seats[event.rank]
                    seat.alive, seat.version = True, event.version
                else:
                    self._died(self._seats[event.rank])
            self._deal()
        if samples:
            self._on_samples(samples)
        if events:
            with self.changed:
                self.changed.notify_all()
        return bool(samples)

    def _pump_on(self) -> None:
        while not self._closed:
            try:
                self.pump()
            except BaseException as error:  # whoever waits raises it
                with self.changed:
                    if not self._closed:
                        self._failure = error
                    self.changed.notify_all()
                return

    def _delivered(self, seat: _Seat, delivery: Delivery) -> list[Sample]:
        seat.stepping_s, seat.idle_s = delivery.stepping_s, delivery.idle_s
        if delivery.held is not None:
            seat.version, seat.taking = delivery.held.version, None
        for sample in delivery.samples:
            ticket = seat.running[sample.request_id]
            ticket.missing.remove(sample.sample_index)
            self.reuse.note(ticket.request, sample)
            seat.load -= 1
            if not ticket.missing:
                del seat.running[sample.request_id]
        return delivery.samples

    def _died(self, seat: _Seat) -> None:
        """What the engine had not finished goes back to the head of the queue."""
        for ticket in reversed(seat.running.values()):
            again = replace(ticket.request, sample_indices=tuple(sorted(ticket.missing)))
            self._queues.setdefault(again.version, deque()).appendleft(again)
            self.samples_again += len(ticket.missing)
        seat.running, seat.load, seat.alive, seat.version, seat.taking = {}, 0, False, None, None

    def _deal(self) -> None:
        """Give waiting requests to engines that have room, and new weights to engines that may take them."""
        given: dict[int, list[Request]] = {}
        for version in sorted(self._queues, key=lambda v: -1 if v is None else v):
            queue = self._queues[version]
            ready = [s for s in self._seats if s.version is not None and s.taking is None]
            able = [s for s in ready if version in (None, s.version) and not self._must_drain(s, version)]
            while queue and able:
                seat = min(able, key=lambda s: s.load / s.capacity)
                if seat.load >= seat.capacity:
                    break  # the emptiest is full
                request = queue.popleft()
                if request.affinity is not None:
                    seat = self._seat_for(request.affinity, able, seat)
                seat.running[request.request_id] = _Ticket(request, set(request.sample_indices))
                seat.load += len(request.sample_indices)
                given.setdefault(seat.rank, []).append(request)
            if not queue:
                del self._queues[version]
        for rank, requests in given.items():
            self._engines.submit(rank, requests)
        for seat in self._seats:
            if seat.alive and seat.taking is None and (wanted := self._wanted(seat)) is not None:
                seat.taking = wanted
                self._engines.take_weights(seat.rank, wanted)

    def _seat_for(self, affinity: str, able: list[_Seat], emptiest: _Seat) -> _Seat:
        """The engine that had the last request of this affinity, if it is among the `able` and has room; else the emptiest."""
        rank = self._last_of.pop(affinity, None)
        seat = next((s for s in able if s.rank == rank and s.load < s.capacity), emptiest)
        self._last_of[affinity] = seat.rank
        if len(self._last_of) > REMEMBERED:
            self._last_of.popitem(last=False)
        return seat

    def _must_drain(self, seat: _Seat, version: int | None) -> bool:
        """Whether an engine is to be given nothing more until it has taken new weights."""
        return version is None and self._drains and self._newest != seat.version

    def _is_kept(self, seat: _Seat) -> bool:
        """Whether an engine is the only one with weights that episodes, which wait for something else now, will ask for again."""
        if seat.version not in self._reserved:
            return False
        others = [s for s in self._seats if s is not seat and s.alive and s.taking is None]
        return all(s.version != seat.version for s in others)

    def _wanted(self, seat: _Seat) -> int | None:
        """The weights that an engine should take now."""
        if seat.version == self._newest and None in self._queues:
            return None
        if seat.load and (self._drains or self._newest == seat.version):
            return None
        needed = [version for version in self._queues if version is not None and version != seat.version]
        if self._is_kept(seat) and not (needed and min(needed) < (seat.version or 0) and not seat.load):
            return None
        if needed and not seat.load:
            return min(needed)
        return self._newest if self._newest != seat.version and seat.version not in self._queues else None
