"""Naming, finding and calling a reward function.

A function is named by text, `"package.module:function"` or `"folder/file.py:function"`, because it is imported only
in the scoring processes, never in the driver.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError

_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
_MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
DEFAULT_TARGET = "quadriga.rewards.scorers:score"


@dataclass(frozen=True)
class RewardFunction:
    """A reward function by name.

    Args:
        target: `"package.module:function"` or `"folder/file.py:function"`; the default scores by data source.
        kwargs: extra keyword arguments of every call.
        batched: the function takes lists (`data_sources, solution_strs, ground_truths, extra_infos`) and returns a list.
    """

    target: str = DEFAULT_TARGET
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batched: bool = False

    @property
    def is_default(self) -> bool:
        return self.target == DEFAULT_TARGET

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kwargs": dict(self.kwargs)}


def reward_function(
    path: str | None = None,
    name: str = "compute_score",
    reward_kwargs: Mapping[str, Any] | None = None,
    batched: bool = False,
) -> RewardFunction:
    """From the keys of `custom_reward_function`: a Python file or dotted module with `name`, or `pkg.mod:fn`."""
    if path is None:
        return default_function(reward_kwargs)
    target = path if _has_name(path) else f"{path}:{name}"
    place, _, _ = target.rpartition(":")
    if _is_file(place):
        file = Path(os.path.expandvars(place)).expanduser().resolve()
        if not file.is_file():
            raise ConfigError(
                f"custom_reward_function.path: there is no file {file}", "give the path of a Python file, or pkg.mod:fn"
            )
        target = f"{file}:{target.rpartition(':')[2]}"
    return RewardFunction(target, dict(reward_kwargs or {}), batched)


def default_function(options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Score by data source; `options` per scorer, e.g. `{"gsm8k": {"method": "flexible"}}`."""
    from quadriga.rewards.scorers import check_options, registered_targets

    check_options(options or {})
    return RewardFunction(DEFAULT_TARGET, {"options": dict(options or {}), "targets": registered_targets()})


def from_callable(
    function: Callable[..., Any], reward_kwargs: Mapping[str, Any] | None = None, batched: bool = False
) -> RewardFunction:
    """Name a function object so that a worker can import it; it must stand at the top level of a module or script."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None) or ""
    if not name.isidentifier():
        raise ConfigError(
            f"reward function {name or function!r} cannot be imported by the scoring processes",
            "define it with `def` at the top level of a module, or name it by custom_reward_function.path",
        )
    place = module
    if module == "__main__":
        place = getattr(sys.modules["__main__"], "__file__", None) or ""
        if not place:
            raise ConfigError(f"reward function {name} was typed into an interactive session", "put it into a file")
    return reward_function(f"{place}:{name}", reward_kwargs=reward_kwargs, batched=batched)


def _has_name(path: str) -> bool:
    place, colon, name = path.rpartition(":")
    return bool(colon and place) and name.isidentifier()


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def load(function: RewardFunction) -> Callable[..., Any]:
    """Import the function and return it ready to be called with keyword arguments; runs in scoring processes."""
    place, _, name = function.target.rpartition(":")
    module = import_place(place)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"there is no function {name!r} in {place}", "check custom_reward_function.name")
    return _adapted(found, dict(function.kwargs), _MANY if function.batched else _ONE, function.target)


def import_place(place: str) -> Any:
    """The module at a dotted name or in a Python file."""
    return _import_file(place) if _is_file(place) else importlib.import_module(place)


def _import_file(place: str) -> Any:
    digest = hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest()[:8]
    module_name = f"{Path(place).stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, place)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{place} cannot be imported as Python", "give a file that ends in .py")
    sys.path.append(str(Path(place).parent))  # its neighbours can be imported, as when it is run as a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _adapted(
    function: Callable[..., Any], kwargs: dict[str, Any], names: tuple[str, ...], target: str
) -> Callable[..., Any]:
    """By keyword where the function knows our names, else by position; a coroutine is awaited."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: no signature to look at
        parameters = inspect.signature(lambda *given: None).parameters.values()
    keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    takes_any_position = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if takes_any_keyword or keyword.issuperset(names):
        by_keyword = True
    elif takes_any_position or positional >= len(names):
        by_keyword = False
    else:
        raise ConfigError(
            f"reward function {target} takes ({', '.join(p.name for p in parameters)})",
            f"it must take ({', '.join(names)})",
        )
    runner: Any = None

    def call(*values: Any) -> Any:
        nonlocal runner
        if by_keyword:
            result = function(**dict(zip(names, values)), **kwargs)
        else:
            result = function(*values, **kwargs)
        if inspect.isawaitable(result):
            if runner is None:  # made in the worker that uses it: an event loop does not survive a fork
                import asyncio

                runner = asyncio.Runner()
            result = runner.run(_awaited(result))
        return result

    return call


async def _awaited(result: Any) -> Any:
    return await result
