"""A group of workers on Ray: one process per slot of a pool, each hosting one worker or several colocated ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from quadriga.controller.call_record import CallRecord
from quadriga.controller.calls import Seat, WorkersDied, WorkersLost, death_among, fetch
from quadriga.controller.group import WorkerGroup
from quadriga.controller.placement_env import master_address, rank_environments, refuse_protected
from quadriga.controller.pool import RayClassWithInitArgs, role_and_method, roles_of
from quadriga.controller.ray_pool import Bundle, RayResourcePool
from quadriga.controller.slot_process import start_process
from quadriga.errors import ConfigError, QuadrigaError, WorkerError

GRACE_S = 5.0
"""After one rank raised, the others get so long to finish before they count as stuck (in a collective, say)."""

NODE_CHECK_S = 2.0
"""While workers start, their nodes are looked at so often: an actor whose node went away would wait for another for ever."""

LARGE_BYTES = 100_000
"""Ray copies smaller arguments into each call; larger ones are put into the object store once and shared."""


@dataclass
class _Processes:
    """The processes of a group; shared by all groups that `spawn` makes of it."""

    handles: list[Any]
    names: list[str]
    seats: list[Seat]
    bundles: list[Bundle] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    master: tuple[str, int] | None = None
    building: list[Any] = field(default_factory=list)
    ready: bool = False
    lost: str = ""
    abandoned: str = ""


class RayWorkerGroup(WorkerGroup):
    """Workers in the slots of a pool; their registered methods are methods of the group.

    The processes are started at once and in parallel; `wait_ready` (or the first call) waits for them. A worker that dies
    or does not answer in time makes the group unusable: its other workers are stopped, and every later call says why.

    Args:
        resource_pool: the slots; None with `worker_names` attaches to detached workers.
        ray_cls_with_init: a `RayClassWithInitArgs`, or what `create_colocated_worker_cls` made.
        name_prefix: of the Ray actors' names; random by default.
        detached: the workers outlive the driver; find them again with `from_detached`.
        worker_names: names of detached workers to attach to.
        device_name: cuda, npu or cpu; by default the pool's.
        worker_env: environment variables for the workers.
        start_timeout_s: the workers must be up within this time.
        call_timeout_s: any call must return within this time.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        device_name: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
        call_timeout_s: float = 7200.0,
    ) -> None:
        if ray_cls_with_init is None or (resource_pool is None) == (worker_names is None):
            raise ConfigError(
                "a RayWorkerGroup needs ray_cls_with_init, and either a pool to start workers in or the names of detached ones",
                "RayWorkerGroup(pool, RayClassWithInitArgs(MyWorker)) or RayWorkerGroup.from_detached(names, …)",
            )
        refuse_protected(worker_env or {})
        self.start_timeout_s, self.call_timeout_s = start_timeout_s, call_timeout_s
        self.worker_env = dict(worker_env or {})
        self._members = ray_cls_with_init
        self._roles, self._prefixed = roles_of(ray_cls_with_init)
        self._label = "+".join(self._roles)
        self.name_prefix = name_prefix if name_prefix is not None else f"{secrets.token_hex(3)}_"
        self._pool, self._detached = resource_pool, detached
        if resource_pool is not None:
            self.device_name = device_name or resource_pool.device
            self._processes = self._start_processes(resource_pool)
        else:
            self.device_name = device_name or "cpu"
            self._processes = self._attach(list(worker_names or ()))
        self.world_size = len(self._processes.handles)
        for role, member in self._roles.items():
            self.bind(member.worker_class, f"{role}_" if self._prefixed else "")

    @classmethod
    def from_detached(
        cls, worker_names: Sequence[str], ray_cls_with_init: RayClassWithInitArgs, **kwargs: Any
    ) -> RayWorkerGroup:
        """The group of workers that were started detached, maybe by another driver."""
        return cls(None, ray_cls_with_init, worker_names=worker_names, **kwargs)

    # ---- what it is made of ----

    @property
    def workers(self) -> list[Any]:
        """The Ray actors, in rank order."""
        return self._processes.handles

    @property
    def worker_names(self) -> list[str]:
        return self._processes.names

    @property
    def seats(self) -> list[Seat]:
        """Role, rank, node and pid of each worker; complete once the workers have started."""
        return [replace(seat, role=self._label) for seat in self._processes.seats]

    @property
    def master_address(self) -> str:
        self.launch()
        return self._processes.master[0] if self._processes.master else ""

    @property
    def master_port(self) -> int:
        self.launch()
        return self._processes.master[1] if self._processes.master else 0

    # ---- life ----

    def launch(self) -> None:
        """Give every process its place and let it start building its workers; does not wait for that."""
        processes = self._processes
        if processes.ready or processes.building or processes.lost:
            return
        places = self._await([handle.where.remote() for handle in processes.handles], "its start")
        processes.seats = [_seated(seat, place) for seat, place in zip(processes.seats, places)]
        node_slots = self._pool.node_slots if self._pool is not None else None
        (port,) = self._await([processes.handles[0].hold_port.remote(master_address(places))], "its port", ranks=[0])
        processes.environments = rank_environments(
            places, self.device_name, self.name_prefix, node_slots, port, secrets.token_hex(16)
        )
        processes.master = (processes.environments[0]["MASTER_ADDR"], int(processes.environments[0]["MASTER_PORT"]))
        processes.building = self._build(range(len(processes.handles)))

    def wait_ready(self) -> None:
        """Wait until every worker is constructed.

        Raises:
            WorkerError: a constructor raised, or the workers were not up within `start_timeout_s`.
        """
        self.launch()
        while self._processes.building:
            self._await(self._processes.building[0], "its construction")
            self._processes.building.pop(0)
        self._processes.ready = not self._processes.lost

    def replace(self, ranks: Sequence[int]) -> None:
        """End these workers' processes, start new ones in their slots, and construct their workers.

        For workers without collectives, which a new member could not join, and of the whole slot: a group made by `spawn`
        replaces the workers of all its roles. If a new one does not start, the group is unusable, as after any death.

        Raises:
            WorkersLost: the group was shut down, maybe just now by another thread. Then no process and no slot is left over.
        """
        host = self._parent or self
        processes = host._processes
        for rank in ranks:
            self._refuse_if_lost()
            ray.kill(processes.handles[rank], no_restart=True)
            processes.names[rank], processes.handles[rank] = host._start_process(
                processes.bundles[rank], secrets.token_hex(3)
            )
            if processes.lost:  # whoever ended the group knew nothing of this process
                ray.kill(processes.handles[rank], no_restart=True)
            self._refuse_if_lost()
        places = host._await([processes.handles[rank].where.remote() for rank in ranks], "its start", ranks=ranks)
        for rank, place in zip(ranks, places):
            processes.seats[rank] = _seated(processes.seats[rank], place)
        for building in host._build(ranks):
            host._await(building, "its construction", ranks=ranks)

    def _refuse_if_lost(self) -> None:
        if self._processes.lost:
            raise WorkersLost(f"the workers {self._label} are gone: {self._processes.lost}", "make a new worker group")

    def spawn(self, prefix_set: Iterable[Any]) -> dict[str, RayWorkerGroup]:
        """A group for each role of a colocated one, sharing its processes; methods lose their role prefix."""
        groups = {}
        for role in map(str, prefix_set):
            if not self._prefixed or role not in self._roles:
                raise ConfigError(f"this group has no role {role!r}", f"its roles are {', '.join(self._roles)}")
            group = object.__new__(RayWorkerGroup)
            group.__dict__.update({k: v for k, v in self.__dict__.items() if k in _SHARED_BY_SPAWN})
            group._roles, group._label, group._prefixed = {role: self._roles[role]}, role, False
            group._parent = self
            group.bind(self._roles[role].worker_class)
            groups[role] = group
        return groups

    def shutdown(self) -> None:
        """Stop the workers. The pool stays; give it back with its own `shutdown`."""
        self._processes.lost = self._processes.lost or "it was shut down"
        for handle in self._processes.handles:
            ray.kill(handle, no_restart=True)

    def abandon(self, why: str) -> None:
        """Stop the workers at their work, from any thread: whoever waits for them gets a WorkersDied that says why."""
        self._processes.abandoned = why
        self.shutdown()

    def is_alive(self) -> bool:
        """Whether every process answers, even while it is busy."""
        try:
            ray.get([h.where.remote() for h in self._processes.handles], timeout=10)
        except ray.exceptions.RayError:
            return False
        return True

    def death(self, during: str, timeout_s: float = 5.0) -> QuadrigaError | None:
        """The death of one of its processes, if one is gone; a process that is only slow to answer lives.

        Args:
            during: what the workers were at, for the message.
        """
        if self._processes.abandoned:
            return WorkersDied(self._processes.abandoned)
        pending = [h.where.remote() for h in self._processes.handles]
        ray.wait(pending, num_returns=len(pending), timeout=timeout_s)
        return death_among(pending, self.seats, during)

    def stacks(self, timeout_s: float = 10.0) -> list[str]:
        """What each worker is doing right now, as Python stacks; works while they are busy or stuck."""
        pending = [h.stacks.remote() for h in self._processes.handles]
        ray.wait(pending, num_returns=len(pending), timeout=timeout_s)
        answers = []
        for ref, seat in zip(pending, self.seats):
            try:
                answers.append(f"{seat}\n{ray.get(ref, timeout=0)}")
            except ray.exceptions.RayError as error:
                answers.append(f"{seat}\n  no answer: {type(error).__name__}")
        return answers

    def busy(self, timeout_s: float = 5.0) -> list[str]:
        """For each worker that is at a call, or does not answer: who it is and what it is doing."""
        answers = _answers([h.busy.remote() for h in self._processes.handles], timeout_s)
        return [f"{seat}: {doing or 'no answer'}" for seat, doing in zip(self.seats, answers) if doing != ""]

    def ask(self, method: str, *args: Any, timeout_s: float = 10.0) -> list[Any]:
        """What a method of each worker answers beside the call that it is busy with; None where no answer comes.

        The method must be quick and safe to run in a second thread. A worker that is gone is left to the running call.
        """
        role, method = role_and_method(self._roles, self._prefixed, method)
        return _answers([h.ask.remote(role, method, *args) for h in self._processes.handles], timeout_s)

    def take_calls(self, timeout_s: float = 10.0) -> list[list[CallRecord]]:
        """What each process has done since the last time."""
        answers = _answers([h.take_calls.remote() for h in self._processes.handles], timeout_s)
        return [calls or [] for calls in answers]

    # ---- calls ----

    def prepare_call(self) -> None:
        if self._processes.lost:
            raise WorkerError(f"the workers {self._label} are gone: {self._processes.lost}", "make a new worker group")
        if not self._processes.ready:
            (self._parent or self).wait_ready()

    def submit(self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        role, method = role_and_method(self._roles, self._prefixed, method)
        return self._processes.handles[rank].call.remote(role, method, *args, **kwargs)

    def fetch(self, pending: list[Any], method: str, timeout_s: float | None = None) -> list[Any]:
        return self._await(pending, method, self.call_timeout_s if timeout_s is None else timeout_s)

    def fetch_one(self, pending: Any, rank: int, method: str) -> Any:
        """The answer of one worker to a call started with `submit`. Its death leaves the others at their work."""
        (answer,) = fetch([pending], lambda: [self.seats[rank]], method, self.call_timeout_s, self.doing)
        return answer

    def tell(self, rank: int, method: str, *args: Any) -> None:
        """Have a quick method of one worker run beside its calls, without waiting for it."""
        role, method = role_and_method(self._roles, self._prefixed, method)
        self._processes.handles[rank].ask.remote(role, method, *args)

    def listen(self, rank: int, method: str, *args: Any) -> Any:
        """Start a method of one worker that waits, beside its calls, until there is something to tell: Ray's reference."""
        self.prepare_call()
        role, method = role_and_method(self._roles, self._prefixed, method)
        return self._processes.handles[rank].listen.remote(role, method, *args)

    def share(self, value: Any) -> Any:
        return ray.put(value) if _is_large(value) else value

    # ---- inside ----

    _parent: RayWorkerGroup | None = None

    def _start_processes(self, pool: RayResourcePool) -> _Processes:
        bundles = pool.bundles()
        names, handles = zip(*[self._start_process(bundle) for bundle in bundles])
        seats = [Seat(self._label, rank, len(handles)) for rank in range(len(handles))]
        return _Processes(list(handles), list(names), seats, bundles)

    def _start_process(self, bundle: Bundle, suffix: str = "") -> tuple[str, Any]:
        """Name and handle of a process in a slot: one that was started early, else a new one."""
        pool, members = self._pool, self._members
        assert pool is not None
        plain = not (self._detached or members.additional_resources or members.options)
        if plain and (early := pool.take_early(bundle)) is not None:
            return early
        name = f"{self.name_prefix}{self._label}_{bundle.group_number}:{bundle.index}{suffix}"
        resources, options = members.additional_resources, members.options
        return name, start_process(pool, bundle, name, self._label, self._detached, resources, options)

    def _build(self, ranks: Sequence[int]) -> list[list[Any]]:
        """Let processes construct their workers, one list of pending answers for each role."""
        processes = self._processes
        for rank in ranks:
            processes.handles[rank].set_environment.remote({**self.worker_env, **processes.environments[rank]})
        building = []
        for role, member in self._roles.items():
            shared = ray.put((member.args, member.kwargs)) if member.args or member.kwargs else None
            building.append([processes.handles[r].build.remote(role, member.worker_class, shared) for r in ranks])
        return building

    def _attach(self, names: list[str]) -> _Processes:
        try:
            handles = [ray.get_actor(name) for name in names]
        except ValueError as error:
            raise WorkerError(f"a detached worker is not there: {error}", "check the names and the namespace") from None
        processes = _Processes(handles, names, [Seat(self._label, rank, len(names)) for rank in range(len(names))])
        self._processes = processes
        places = self._await([h.where.remote() for h in handles], "attaching", self.start_timeout_s)
        processes.seats = [_seated(seat, place) for seat, place in zip(processes.seats, places)]
        processes.ready = True
        return processes

    def _await(
        self, pending: list[Any], what: str, timeout_s: float | None = None, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Answers in rank order (of all ranks, or `ranks`); a loss, or ranks that stay stuck after another one raised, ends
        the group."""
        starting = timeout_s is None

        def who() -> list[Seat]:
            return self.seats if ranks is None else [self.seats[rank] for rank in ranks]

        try:
            if starting:
                limit_s, waited_s = self.start_timeout_s, self._watch_nodes(pending)
                return fetch(pending, who, what, limit_s, self.doing, "controller.start_timeout_s", waited_s)
            return fetch(pending, who, what, timeout_s, self.doing)
        except QuadrigaError as error:
            if self._processes.abandoned:
                raise WorkersDied(self._processes.abandoned) from None
            unusable = starting or isinstance(error, WorkersLost)
            if not unusable:
                done, _ = ray.wait(pending, num_returns=len(pending), timeout=GRACE_S, fetch_local=False)
                unusable = len(done) < len(pending)
                if (death := death_among(done, self.seats, what)) is not None:  # its peers' collectives fail first
                    error, unusable = death, True
            if unusable:
                self._processes.lost = (
                    error.what.strip().splitlines()[0 if isinstance(error, WorkersLost) else -1].strip()
                )
                self.shutdown()
            raise error from None

    def _watch_nodes(self, pending: list[Any]) -> float:
        """Wait for workers to start, or to fail, as long as their nodes are there. Returns the seconds that took."""
        began = time.monotonic()
        while self._pool is not None and time.monotonic() - began + NODE_CHECK_S < self.start_timeout_s:
            try:
                ray.get(pending, timeout=NODE_CHECK_S)
                break
            except ray.exceptions.GetTimeoutError:
                self._pool.refuse_lost_nodes()
            except ray.exceptions.RayError:
                break  # the caller asks again, and explains it
        return time.monotonic() - began

    def doing(self, rank: int) -> str:
        """Where the call that a worker is busy with stands, as the end of its Python stack."""
        try:
            return ray.get(self._processes.handles[rank].stacks.remote(only_call=True), timeout=3)
        except ray.exceptions.RayError:
            return "  (it does not answer at all)"


_SHARED_BY_SPAWN = frozenset(
    {
        "_processes",
        "world_size",
        "device_name",
        "worker_env",
        "name_prefix",
        "start_timeout_s",
        "call_timeout_s",
        "_members",
    }
)


def _seated(seat: Seat, place: Mapping[str, Any]) -> Seat:
    return replace(seat, **{k: place[k] for k in ("node_ip", "node_id", "pid", "actor_id")})


def _answers(pending: list[Any], timeout_s: float) -> list[Any]:
    """What came within the time; None where nothing did, or the process is gone."""
    ray.wait(pending, num_returns=len(pending), timeout=timeout_s)
    answers = []
    for ref in pending:
        try:
            answers.append(ray.get(ref, timeout=0))
        except ray.exceptions.RayError:
            answers.append(None)
    return answers


def _is_large(value: Any) -> bool:
    size = getattr(value, "nbytes", None)
    if size is None and hasattr(value, "batch") and hasattr(value, "non_tensor_batch"):
        tensors = value.batch.values() if value.batch is not None else ()
        size = sum(t.numel() * t.element_size() for t in tensors)
        size += sum(len(column) * 8 for column in value.non_tensor_batch.values())
    if size is None and isinstance(value, (bytes, bytearray, str)):
        size = len(value)
    return size is not None and size > LARGE_BYTES
