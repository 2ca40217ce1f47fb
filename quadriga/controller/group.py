"""What every worker group does, whatever its workers run on: offer their methods, deal out calls, collect answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quadriga.controller.dispatch import MODES, Dispatch, Execute, Registration, registered_methods
from quadriga.errors import ConfigError


@dataclass(frozen=True)
class DispatchInfo:
    """Where each rank stands in a mesh: its data-parallel rank, and which ranks' answers count."""

    dp_ranks: list[int]
    collecting_ranks: list[int]


class PendingCall(list):
    """Answers under way, one per rank; `get()` waits for them with the group's deadline and errors."""

    def __init__(self, pending: Sequence[Any], fetch: Callable[..., list[Any]], collect: Callable[..., Any]) -> None:
        super().__init__(pending)
        self._fetch, self._collect = fetch, collect

    def get(self, timeout_s: float | None = None) -> Any:
        return self._collect(self._fetch(list(self), timeout_s=timeout_s))


class WorkerGroup:
    """Base of the groups. A subclass says how one call reaches one worker (`submit`) and how to wait (`fetch`)."""

    world_size: int

    def submit(self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start `method` on one worker; returns what `fetch` takes."""
        raise TypeError(f"{type(self).__name__} does not say how to reach a worker")

    def fetch(self, pending: list[Any], method: str, timeout_s: float | None = None) -> list[Any]:
        """Wait for calls started with `submit`, in order."""
        raise TypeError(f"{type(self).__name__} does not say how to wait for a worker")

    def share(self, value: Any) -> Any:
        """`value` in the form in which it is cheapest to give to several workers."""
        return value

    def prepare_call(self) -> None:
        """Called before each call; a group that starts its workers lazily does so here."""

    # ---- calls by name ----

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_all_async(method, *args, **kwargs)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Start `method` on all workers. Lists with one entry per rank are dealt out, if every argument is one."""
        self.prepare_call()
        args, kwargs = MODES[Dispatch.ALL_TO_ALL].dispatch_fn(self, *args, **kwargs)
        return PendingCall(
            self._start(method, range(self.world_size), args, kwargs), partial(self.fetch, method=method), list
        )

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method, *args, **kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        self.prepare_call()
        return PendingCall([self.submit(0, method, args, kwargs)], partial(self.fetch, method=method), _only)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    # ---- registered methods ----

    def bind(self, worker_class: type, prefix: str = "") -> None:
        """Offer the registered methods of `worker_class` as attributes of this group, named `{prefix}{method}`."""
        for method, registration in registered_methods(worker_class).items():
            name = prefix + method
            if hasattr(type(self), name):
                raise ConfigError(
                    f"{worker_class.__name__}.{method} cannot be offered: every worker group has its own `{name}`",
                    "rename the worker's method",
                )
            setattr(self, name, partial(self._call, name, registration))

    def start(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method without waiting for it, whatever it was registered as; the answer has `.get()`."""
        bound = getattr(self, method)
        name, registration = bound.args
        return self._call(name, replace(registration, blocking=False), *args, **kwargs)

    def _call(self, method: str, registration: Registration, *args: Any, **kwargs: Any) -> Any:
        self.prepare_call()
        mode = registration.mode
        args, kwargs, *rest = mode.dispatch_fn(self, *args, **kwargs)
        collect = rest[0] if rest else partial(mode.collect_fn, self)
        ranks = range(self.world_size)
        if registration.execute_mode == Execute.RANK_ZERO:
            ranks, collect = range(1), _only
        pending = self._start(method, ranks, args, kwargs)
        fetch = partial(self.fetch, method=method)
        if registration.blocking:
            return collect(fetch(pending))
        if mode.returns_data_proto:
            from quadriga.protocol import DataProtoFuture

            return DataProtoFuture(collect_fn=collect, futures=pending, fetch=fetch)
        return PendingCall(pending, fetch, collect)

    def _start(self, method: str, ranks: range, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        for value in [*args, *kwargs.values()]:
            if len(value) != self.world_size:
                raise ConfigError(
                    f"dispatching {method} gave {len(value)} entries for {self.world_size} ranks",
                    "a dispatch function returns lists with one entry per rank",
                )
        return [
            self.submit(rank, method, tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()})
            for rank in ranks
        ]

    def dispatch_info(self, mesh_name: str) -> DispatchInfo:
        """What the workers said about their place in a mesh; asked once."""
        known: dict[str, DispatchInfo] = self.__dict__.setdefault("_dispatch_info", {})
        if mesh_name not in known:
            answers = self.execute_all_sync("get_dispatch_info", mesh_name)
            known[mesh_name] = DispatchInfo(
                dp_ranks=[dp_rank for dp_rank, _ in answers],
                collecting_ranks=[rank for rank, (_, collects) in enumerate(answers) if collects],
            )
        return known[mesh_name]


def _only(outputs: list[Any]) -> Any:
    return outputs[0]
