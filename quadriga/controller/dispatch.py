"""How a call on a worker group becomes one call per worker, and how the answers become one.

A method of a `Worker` is marked with `@register(dispatch_mode=…)`; the group then offers it under its own name. A
dispatch mode is a pair of functions:

    dispatch_fn(group, *args, **kwargs) -> (args, kwargs)    # every value a list with one entry per rank
    collect_fn(group, outputs)          -> result            # outputs: one entry per rank

A dispatch function may return a third item: a collect function `outputs -> result` for this very call, used where
collecting needs to know what dispatching did (rows added as padding, say).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from quadriga.controller.group import WorkerGroup


MARK = "__quadriga_registered__"
"""Attribute of a registered method that holds its `Registration`."""


class ModeName(str):
    """Name of a dispatch mode; a plain string with a type of its own."""

    __slots__ = ()


class Dispatch:
    """Names of the dispatch modes. `register_dispatch_mode` adds to them."""

    ONE_TO_ALL = ModeName("ONE_TO_ALL")
    ALL_TO_ALL = ModeName("ALL_TO_ALL")
    DP_COMPUTE = ModeName("DP_COMPUTE")
    DP_COMPUTE_PROTO = ModeName("DP_COMPUTE_PROTO")
    DP_COMPUTE_PROTO_WITH_FUNC = ModeName("DP_COMPUTE_PROTO_WITH_FUNC")
    DP_COMPUTE_METRIC = ModeName("DP_COMPUTE_METRIC")
    RANK_ZERO = ModeName("RANK_ZERO")


class Execute:
    """Which ranks run a call."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class DispatchMode:
    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]
    returns_data_proto: bool = False
    """Whether a non-blocking call gives a `DataProtoFuture`, which can be handed on to another group."""


@dataclass(frozen=True)
class Registration:
    mode: DispatchMode
    execute_mode: str
    blocking: bool


def register(
    dispatch_mode: str | dict[str, Callable[..., Any]] | DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: str = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a worker's method, sync or async, as callable through its group.

    Args:
        dispatch_mode: a mode's name, or its pair of functions as `{"dispatch_fn": …, "collect_fn": …}`.
        execute_mode: `Execute.ALL`, or `Execute.RANK_ZERO` to run on the first rank only and return its one answer.
        blocking: False returns at once with something that has `.get()`.
        materialize_futures: the worker receives data; False hands it futures, and columns that live elsewhere, unopened.
    """
    mode = _mode_of(dispatch_mode)
    if dispatch_mode == Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    if execute_mode not in (Execute.ALL, Execute.RANK_ZERO):
        raise ConfigError(f"unknown execute mode {execute_mode!r}", "use Execute.ALL or Execute.RANK_ZERO")

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        if iscoroutinefunction(method):

            @wraps(method)
            async def on_worker(*args: Any, **kwargs: Any) -> Any:
                args, kwargs, answer = _opened(args, kwargs) if materialize_futures else (args, kwargs, _as_it_is)
                return answer(await method(*args, **kwargs))

        else:

            @wraps(method)
            def on_worker(*args: Any, **kwargs: Any) -> Any:
                args, kwargs, answer = _opened(args, kwargs) if materialize_futures else (args, kwargs, _as_it_is)
                return answer(method(*args, **kwargs))

        setattr(on_worker, MARK, Registration(mode, execute_mode, blocking))
        return on_worker

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """The methods of `cls` that a group offers."""
    methods = {}
    for name in dir(cls):
        registration = getattr(getattr(cls, name, None), MARK, None)
        if isinstance(registration, Registration):
            methods[name] = registration
    return methods


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> ModeName:
    """Add a mode of your own: afterwards `Dispatch.<name>` can be given to `register`."""
    if name in MODES:
        raise ConfigError(f"dispatch mode {name} exists already", "choose another name, or use update_dispatch_mode")
    mode_name = ModeName(name)
    MODES[mode_name] = DispatchMode(dispatch_fn, collect_fn)
    setattr(Dispatch, name, mode_name)
    return mode_name


def update_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> None:
    """Replace a mode's functions, for methods registered from now on."""
    _mode_of(name)
    MODES[ModeName(name)] = DispatchMode(dispatch_fn, collect_fn)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """Mode for a mesh in which several ranks form one data-parallel rank (tensor or sequence parallel).

    Each worker has told its data-parallel rank and whether its answer counts, with
    `Worker.register_dispatch_info(mesh_name, dp_rank, is_collect)`. All ranks of one data-parallel rank get the same
    chunk, which goes through the object store once.
    """
    return DispatchMode(partial(_dispatch_mesh, mesh_name), partial(_collect_mesh, mesh_name), returns_data_proto=True)


def _mode_of(wanted: str | dict[str, Callable[..., Any]] | DispatchMode) -> DispatchMode:
    if isinstance(wanted, DispatchMode):
        return wanted
    if isinstance(wanted, dict):
        if set(wanted) != {"dispatch_fn", "collect_fn"}:
            raise ConfigError(
                f"a dispatch mode given as a dict has the keys dispatch_fn and collect_fn, not {sorted(wanted)}"
            )
        return DispatchMode(wanted["dispatch_fn"], wanted["collect_fn"])
    if wanted not in MODES:
        raise ConfigError(f"unknown dispatch mode {wanted!r}", f"known modes: {', '.join(MODES)}")
    return MODES[ModeName(wanted)]


def _opened(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
    """The arguments as data that is here, and what to do with the answer: one to columns from a store is left there too."""
    if "quadriga.protocol" not in sys.modules:  # nobody has made a future; a light worker need not import torch
        return args, kwargs, _as_it_is
    from quadriga.protocol import DataProto, DataProtoFuture, Store

    stores: list[Store] = []

    def opened(value: Any) -> Any:
        value = value.get() if isinstance(value, DataProtoFuture) else value
        if not isinstance(value, DataProto) or value.store is None:
            return value
        stores.append(value.store)
        return value.fetch()

    def left_in_store(answer: Any) -> Any:
        return answer.leave_in_store(stores[0]) if isinstance(answer, DataProto) else answer

    args, kwargs = tuple(map(opened, args)), {k: opened(v) for k, v in kwargs.items()}
    return args, kwargs, left_in_store if stores else _as_it_is


def _as_it_is(answer: Any) -> Any:
    return answer


def _one_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
    def everywhere(value: Any) -> list[Any]:
        return [group.share(value)] * group.world_size  # stored once, however many ranks read it

    return tuple(map(everywhere, args)), {k: everywhere(v) for k, v in kwargs.items()}


def _all_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
    """Lists with one entry per rank are dealt out; if any argument is something else, all go to every rank whole."""
    values = [*args, *kwargs.values()]
    if values and all(isinstance(v, list) and len(v) == group.world_size for v in values):
        return args, kwargs
    return _one_to_all(group, *args, **kwargs)


def _dp_compute(group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
    for value in [*args, *kwargs.values()]:
        if not isinstance(value, (list, tuple)) or len(value) != group.world_size:
            raise ConfigError(
                f"DP_COMPUTE wants lists with one entry for each of the {group.world_size} ranks, got "
                f"{type(value).__name__}{f' of length {len(value)}' if isinstance(value, (list, tuple)) else ''}",
                "give one entry per rank, or register the method with another dispatch mode",
            )
    return args, kwargs


def _dp_compute_proto(group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
    """Rows are dealt out in order and in equal number; missing rows are made by repeating, and taken off again."""
    chunked, padding = _chunk_all(group.world_size, [*args, *kwargs.values()])
    return (
        tuple(chunked[: len(args)]),
        dict(zip(kwargs, chunked[len(args) :])),
        partial(_concat_without, padding),
    )


def _dp_compute_proto_with_func(group: WorkerGroup, function: Any, *args: Any, **kwargs: Any) -> Any:
    if not callable(function):
        raise ConfigError(f"DP_COMPUTE_PROTO_WITH_FUNC wants a function first, got {type(function).__name__}")
    rest, named, collect = _dp_compute_proto(group, *args, **kwargs)
    return ([function] * group.world_size, *rest), named, collect


def _dp_compute_metric(group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
    args, kwargs, _ = _dp_compute_proto(group, *args, **kwargs)
    return args, kwargs, list


def _chunk_all(parts: int, values: list[Any]) -> tuple[list[list[Any]], int]:
    from quadriga.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor

    chunked: list[list[Any]] = []
    padding = 0
    for value in values:
        if isinstance(value, DataProto):
            # Ranks compute in collectives, so each must have as many rows as the others. Repeated rows do no harm where
            # rows do not meet; what must count each row once (an update) is given numbers that divide.
            padded, padding = pad_dataproto_to_divisor(value, parts)
            chunked.append(padded.chunk(parts))
        elif isinstance(value, DataProtoFuture):
            chunked.append(value.chunk(parts))
        elif _is_tensordict(value):
            if len(value) % parts:
                raise ConfigError(
                    f"a TensorDict of {len(value)} rows does not divide into {parts} equal parts",
                    "pass a DataProto, which is padded, or a number of rows that divides",
                )
            chunked.append(list(value.split(len(value) // parts)))
        else:
            raise ConfigError(
                f"this method deals out rows of a DataProto, got {type(value).__name__}",
                "pass a DataProto (or a DataProtoFuture), or register the method with Dispatch.ONE_TO_ALL",
            )
    return chunked, padding


def _is_tensordict(value: Any) -> bool:
    tensordict = sys.modules.get("tensordict")  # nobody can have made one without it
    return tensordict is not None and isinstance(value, tensordict.TensorDictBase)


def _concat_without(padding: int, outputs: list[Any]) -> Any:
    from quadriga.protocol import DataProto, unpad_dataproto

    if outputs and all(map(_is_tensordict, outputs)):
        import torch

        return torch.cat(outputs)
    if not all(isinstance(o, DataProto) for o in outputs):
        return outputs
    result = DataProto.concat(outputs)
    return unpad_dataproto(result, padding) if padding and len(result) else result


def _dispatch_mesh(mesh_name: str, group: WorkerGroup, *args: Any, **kwargs: Any) -> Any:
    dp_ranks = group.dispatch_info(mesh_name).dp_ranks
    chunked, padding = _chunk_all(max(dp_ranks) + 1, [*args, *kwargs.values()])

    def per_rank(chunks: list[Any]) -> list[Any]:
        once = [group.share(chunk) for chunk in chunks]  # several ranks get the same chunk
        return [once[dp_rank] for dp_rank in dp_ranks]

    spread = [per_rank(chunks) for chunks in chunked]
    collecting = tuple(group.dispatch_info(mesh_name).collecting_ranks)
    return (
        tuple(spread[: len(args)]),
        dict(zip(kwargs, spread[len(args) :])),
        partial(_concat_ranks, collecting, padding),
    )


def _concat_ranks(ranks: tuple[int, ...], padding: int, outputs: list[Any]) -> Any:
    return _concat_without(padding, [outputs[rank] for rank in ranks])


def _collect_mesh(mesh_name: str, group: WorkerGroup, outputs: list[Any]) -> Any:
    return _concat_ranks(tuple(group.dispatch_info(mesh_name).collecting_ranks), 0, outputs)


def _collect_list(group: WorkerGroup, outputs: list[Any]) -> list[Any]:
    return list(outputs)


def _collect_first(group: WorkerGroup, outputs: list[Any]) -> Any:
    return outputs[0]


def _collect_proto(group: WorkerGroup, outputs: list[Any]) -> Any:
    return _concat_without(0, outputs)


MODES: dict[ModeName, DispatchMode] = {
    Dispatch.ONE_TO_ALL: DispatchMode(_one_to_all, _collect_list),
    Dispatch.ALL_TO_ALL: DispatchMode(_all_to_all, _collect_list),
    Dispatch.DP_COMPUTE: DispatchMode(_dp_compute, _collect_list),
    Dispatch.DP_COMPUTE_PROTO: DispatchMode(_dp_compute_proto, _collect_proto, returns_data_proto=True),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode(
        _dp_compute_proto_with_func, _collect_proto, returns_data_proto=True
    ),
    Dispatch.DP_COMPUTE_METRIC: DispatchMode(_dp_compute_metric, _collect_list),
    Dispatch.RANK_ZERO: DispatchMode(_one_to_all, _collect_first),
}
