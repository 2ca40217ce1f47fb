"""How the driver reaches the engines of a run: on Ray or in this process, beside the actor or in a pool of their own.

An engine is a worker, or with tensor parallel a set of neighbouring workers of which the first leads: it answers for all, and they
live and die together. An engine in a pool of its own that dies is replaced alone. The trained state is in other processes, so
nothing of it is lost with an engine: a new process takes the dead one's slot, takes the weights that were published, and the
samples that were not finished are generated again. Their random numbers depend on neither process nor time, so they are the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from quadriga.controller.call_record import CallRecord
from quadriga.controller.calls import WorkersDied, WorkersLost, explain
from quadriga.errors import QuadrigaError, ResourceError
from quadriga.rollout.interface import Request
from quadriga.rollout.rank_set import SetBroken
from quadriga.rollout.router import Delivered, Died, Joined
from quadriga.rollout.service import Delivery
from quadriga.trainer.ppo.restarts import Restarts
from quadriga.workers.weight_push import PushedWeights, require_held

REPLACING_POLL_S = 0.2
"""While a new engine starts, the router looks so often whether it is there."""


class PublishedWeights:
    """Where engines find the weights of each version that somebody may still need."""

    def __init__(self) -> None:
        self._pushed: dict[int, PushedWeights] = {}

    def add(self, pushed: PushedWeights) -> None:
        self._pushed[pushed.echo.version] = pushed

    def forget_before(self, version: int) -> None:
        """Free the memory of older ones."""
        for old in [v for v in self._pushed if v < version]:
            del self._pushed[old]

    def __getitem__(self, version: int) -> PushedWeights:
        return self._pushed[version]

    @property
    def newest(self) -> PushedWeights | None:
        """Whoever holds it has it, also when it is forgotten here; from any thread."""
        pushed = dict(self._pushed)  # the driver's thread adds and forgets meanwhile
        return pushed[max(pushed)] if pushed else None

    def check(self, delivery: Delivery, asked: int | None) -> None:
        """WorkerError if an engine says that it has taken other weights than it was asked to."""
        if delivery.held is not None and asked is not None:
            require_held([self._pushed[asked].echo, delivery.held], asked)


class LocalEngines:
    """One engine in this very process. It generates when somebody waits for its samples, in his thread."""

    def __init__(self, group: Any, weights: PublishedWeights, capacity: int) -> None:
        self._group, self._weights = group, weights
        self._asked: int | None = None
        self.capacities = [capacity]
        self.records: list[tuple[int, CallRecord]] = []

    def submit(self, rank: int, requests: list[Request]) -> None:
        self._group.ask("submit_requests", requests)

    def abort(self, rank: int, request_ids: list[str]) -> None:
        self._group.ask("abort_requests", request_ids)

    def take_weights(self, rank: int, version: int) -> None:
        self._asked = version
        self._group.take_weights(self._weights[version])

    def events(self, timeout_s: float) -> list[Delivered | Joined | Died]:
        (delivery,) = self._group.ask("generate_here")
        self._weights.check(delivery, self._asked)
        self.records += [(0, record) for record in delivery.records]
        return [Delivered(0, delivery)]

    def stop(self, ranks: Sequence[int]) -> bool:
        return False

    def close(self) -> None: ...


def form_sets(group: Any, set_size: int, ranks: Sequence[int] | None = None) -> None:
    """Let the members of each tensor parallel set meet; of all workers of a group, or of the sets that `ranks` are."""
    if set_size == 1:
        return
    ranks = list(range(group.world_size)) if ranks is None else list(ranks)
    meetings = {rank: _call(group, [rank], "open_set")[0] for rank in ranks if rank % set_size == 0}
    _call(group, ranks, "join_set", [(meetings[rank // set_size * set_size],) for rank in ranks])


def _call(group: Any, ranks: Sequence[int], method: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
    """The answers of some workers to a call that they take part in at the same time."""
    pending = [group.submit(rank, method, () if args is None else args[i], {}) for i, rank in enumerate(ranks)]
    return [group.fetch_one(ref, rank, method) for ref, rank in zip(pending, ranks, strict=True)]


class RayEngines:
    """The engines of a worker group on Ray; one call that listens is always under way in each of its workers.

    Args:
        group: the workers that generate.
        set_size: so many neighbouring workers are one engine.
        weights: where those find weights that were published.
        capacity: samples that an engine can run at the same time.
        alone: no other role lives in these processes, so that one that dies can be replaced.
        restarts: the deaths that are healed are counted there.
    """

    def __init__(
        self,
        group: Any,
        weights: PublishedWeights,
        capacity: int,
        alone: bool,
        restarts: Restarts,
        set_size: int = 1,
    ) -> None:
        self._group, self._weights, self._restarts, self._size = group, weights, restarts, set_size
        self.capacities = [capacity] * (group.world_size // set_size)
        self.heals = alone
        self.records: list[tuple[int, CallRecord]] = []
        """Worker and record of each stretch of generation that has ended."""
        self._listening: dict[Any, int] = {
            group.listen(worker, "take_finished"): worker for worker in range(group.world_size)
        }
        self._taking: dict[Any, int] = {}
        self._asked: dict[int, int] = {}
        """Rank → the weights that it was last asked to take."""
        self._lock = (
            threading.Lock()
        )  # weights are offered by the driver's thread, what becomes of it is seen by the router's
        self._notes: queue.SimpleQueue[Joined | BaseException] = queue.SimpleQueue()
        self._replacing = 0

    def leader(self, rank: int) -> int:
        """The worker that answers for an engine."""
        return rank * self._size

    def workers(self, rank: int) -> range:
        """All workers of an engine."""
        return range(rank * self._size, (rank + 1) * self._size)

    def submit(self, rank: int, requests: list[Request]) -> None:
        self._group.tell(self.leader(rank), "submit_requests", requests)

    def abort(self, rank: int, request_ids: list[str]) -> None:
        self._group.tell(self.leader(rank), "abort_requests", request_ids)

    def take_weights(self, rank: int, version: int) -> None:
        asked = (self._weights[version],)
        with self._lock:
            self._asked[rank] = version  # before they are asked: their answer is compared with it as soon as it comes
        taking = {self._group.submit(worker, "take_weights", asked, {}): worker for worker in self.workers(rank)}
        with self._lock:
            self._taking |= taking

    def events(self, timeout_s: float) -> list[Delivered | Joined | Died]:
        import ray

        patience = min(timeout_s, REPLACING_POLL_S) if self._replacing else timeout_s
        pending = [*self._listening]
        if pending:
            ray.wait(pending, num_returns=1, timeout=patience, fetch_local=False)
        else:
            threading.Event().wait(patience)
        events: list[Delivered | Joined | Died] = list(self._joined())
        with self._lock:
            pending = [*self._listening, *self._taking]
        ended, _ = ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
        for ref in ended:
            worker = self._listening.pop(ref, None)
            if worker is None:
                self._took_weights(ref)
                continue
            rank, delivery = worker // self._size, self._fetch(ref, worker)
            if isinstance(delivery, QuadrigaError):
                events.append(self._died(rank, delivery))
                continue
            self._weights.check(delivery, self._asked.get(rank))
            self._listening[self._group.listen(worker, "take_finished")] = worker
            if worker == self.leader(rank):
                self.records += [(worker, record) for record in delivery.records]
                events.append(Delivered(rank, delivery))
        return events

    def stop(self, ranks: Sequence[int]) -> bool:
        """End these engines, from any thread, so that they are replaced. False: they cannot be."""
        import ray

        if not self.heals:
            return False
        for rank in ranks:
            for worker in self.workers(rank):
                ray.kill(self._group.workers[worker], no_restart=True)
        return bool(ranks)

    def close(self) -> None:
        """From now on none is replaced: their processes are about to be ended."""
        self.heals = False

    # ---- inside ----

    def _fetch(self, ref: Any, worker: int) -> Any:
        """What a worker answered, or its death. Raises what it raised."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            problem = explain(error, [self._group.seats[worker]], "generation")
            if isinstance(
                problem, SetBroken
            ):  # who died says more than who missed it; a member that hangs says nothing
                problem = self._group.death("generation") or WorkersDied(problem.what, problem.fix)
            if isinstance(problem, WorkersDied):
                return problem
            raise problem from None

    def _took_weights(self, ref: Any) -> None:
        with self._lock:
            worker = self._taking.pop(ref, None)
        if worker is not None:  # else its engine was found dead a moment ago
            self._fetch(ref, worker)  # a death is told by the call that listens; what was raised is raised here

    def _died(self, rank: int, death: QuadrigaError) -> Died:
        """Begin to replace an engine. Where that cannot be, the death is raised."""
        if not (self.heals and isinstance(death, WorkersDied) and self._restarts.left > 0):
            raise death
        with self._lock:
            self._taking = {ref: worker for ref, worker in self._taking.items() if worker not in self.workers(rank)}
        self._listening = {ref: worker for ref, worker in self._listening.items() if worker not in self.workers(rank)}
        self._replacing += 1
        thread = threading.Thread(target=self._replace, args=(rank, death), name="replacing", daemon=True)
        thread.start()
        return Died(rank, death)

    def _replace(self, rank: int, death: WorkersDied) -> None:
        workers = list(self.workers(rank))
        try:
            self._group.replace(workers)
            _call(self._group, workers, "join")
            form_sets(self._group, self._size, workers)
            _call(self._group, workers, "init_model")
            pushed = self._weights.newest  # now: ahead of training, other weights are published while a process starts
            version = 0 if pushed is None else pushed.echo.version
            if pushed is not None:
                with self._lock:
                    self._asked[rank] = version
                echoes = _call(self._group, workers, "take_weights", [(pushed,)] * self._size)
                require_held([pushed.echo, *echoes], version)
                # They have news of these weights. It is read here: by the time that the router would read it, it may have
                # asked for newer ones, and would take this for the answer.
                for worker in workers:
                    if isinstance(
                        news := self._fetch(self._group.listen(worker, "take_finished"), worker), QuadrigaError
                    ):
                        raise news
            who = " and ".join(str(self._group.seats[worker]) for worker in workers)
            takes = "takes its place and generates" if self._size == 1 else "take the set's place and generate"
            self._restarts.count(death, f"{who} {takes} the samples that are missing")
            self._notes.put(Joined(rank, version))
        except (WorkersLost, ResourceError):
            self._notes.put(death)
        except BaseException as error:  # whoever waits for samples raises it
            self._notes.put(error)

    def _joined(self) -> Sequence[Joined]:
        joined = []
        while not self._notes.empty():
            note = self._notes.get()
            self._replacing -= 1
            if isinstance(note, BaseException):
                raise note
            for worker in self.workers(note.rank):
                self._listening[self._group.listen(worker, "take_finished")] = worker
            joined.append(note)
        return joined
