"""Naming, finding and calling a reward function.

A function is named by text, `"package.module:function"` or `"folder/file.py:function"`, because it is imported only
in the scoring processes, never in the driver. A function object that no import would find (a lambda, a closure, a method,
one typed into a session) travels to them as cloudpickle's bytes.
"""

from __future__ import annotations

import base64
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError
from quadriga.registry import import_named, is_file

_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
_MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_OF_THE_SYSTEM = {
    *(
        "data_source",
        "reward_model",
        "extra_info",
        "raw_prompt",
        "input_ids",
        "attention_mask",
        "position_ids",
        "index",
        "epoch",
    ),
    *("uid", "sample_index", "__num_turns__", "reward_scores"),
}
DEFAULT_TARGET = "quadriga.rewards.scorers:score"


@dataclass(frozen=True)
class RewardFunction:
    """A reward function by name.

    Args:
        target: `"package.module:function"` or `"folder/file.py:function"`; the default scores by data source.
        kwargs: extra keyword arguments of every call.
        batched: the function takes lists (`data_sources, solution_strs, ground_truths, extra_infos`) and returns a list.
        pickled: the function itself, where no import would find it; `target` then only names it in messages.
    """

    target: str = DEFAULT_TARGET
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batched: bool = False
    pickled: str | None = None

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
    path = path.removeprefix("pkg://")
    target = path if _has_name(path) else f"{path}:{name}"
    place, _, _ = target.rpartition(":")
    if is_file(place):
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


def with_scorer_default(function: RewardFunction, scorer: str, option: str, value: Any) -> RewardFunction:
    """The default function with another default of one built-in scorer's option; any other function as it is."""
    if not function.is_default:
        return function
    options = dict(function.kwargs.get("options", {}))
    options[scorer] = {option: value, **options.get(scorer, {})}
    return replace(function, kwargs={**function.kwargs, "options": options})


def from_callable(
    function: Callable[..., Any], reward_kwargs: Mapping[str, Any] | None = None, batched: bool = False
) -> RewardFunction:
    """A function object by its name, if a scoring process can import it from there, or else by its bytes.

    Raises:
        ConfigError: it holds on to something that cannot be sent to another process.
    """
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    place = module if module != "__main__" else getattr(sys.modules["__main__"], "__file__", None) or ""
    if name.isidentifier() and place:
        return reward_function(f"{place}:{name}", reward_kwargs=reward_kwargs, batched=batched)
    return RewardFunction(
        f"{place or 'session'}:{name or 'function'}", dict(reward_kwargs or {}), batched, _bytes_of(function)
    )


def _bytes_of(function: Callable[..., Any]) -> str:
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(function)).decode()
    except Exception as error:  # whatever the function holds on to may refuse in its own way
        raise ConfigError(
            f"the reward function {getattr(function, '__qualname__', function)!r} cannot be sent to the scoring processes: {error}",
            "let it hold on to plain data only, or define it with `def` at the top level of a module",
        ) from error


def as_reward_function(function: RewardFunction | str | Callable[..., Any] | None) -> RewardFunction:
    """However a user names it."""
    if function is None:
        return default_function()
    if isinstance(function, RewardFunction):
        return function
    return reward_function(function) if isinstance(function, str) else from_callable(function)


def _has_name(path: str) -> bool:
    place, colon, name = path.rpartition(":")
    return bool(colon and place) and name.isidentifier()


def load(function: RewardFunction) -> Callable[..., Any]:
    """Import the function and return it ready to be called with keyword arguments; runs in scoring processes."""
    place, _, name = function.target.rpartition(":")
    if function.pickled is not None:
        import cloudpickle

        named = cloudpickle.loads(base64.b64decode(function.pickled))
    else:
        named = import_named(place, name, "custom_reward_function")
    if not callable(named):
        raise ConfigError(f"{name!r} in {place} is no function", "check custom_reward_function.name")
    return _adapted(named, dict(function.kwargs), _MANY if function.batched else _ONE, function.target)


def _adapted(
    function: Callable[..., Any], kwargs: dict[str, Any], names: tuple[str, ...], target: str
) -> Callable[..., Any]:
    """The function, to be called with the four values. What it returns may be awaitable.

    By keyword where it has a parameter `solution_str` or takes any keyword, and each of its other parameters is then a
    column of the row; else by position.
    """
    parameters = _parameters(function)
    keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - set(kwargs)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not (names[1] in keyword or (takes_any and not needed_columns(function, kwargs, names))):
        return _called_by_position(function, kwargs, names, target)
    many = names is _MANY
    needed = needed_columns(function, kwargs, names)

    def call(*values: Any) -> Any:
        given = {name: value for name, value in zip(names, values) if name in keyword or takes_any}
        rows = values[3] if many else [values[3]]
        if missing := [name for name in needed if any(name not in row for row in rows)]:
            raise wrong_columns(target, missing, rows[0] if rows else {})
        wanted = ({name for row in rows for name in row} if takes_any else keyword) - set(names) - set(kwargs)
        for name in wanted:
            column = [row[name] for row in rows if name in row]
            if len(column) == len(rows):
                given[name] = column if many else column[0]
        return function(**given, **kwargs)

    call.needed_columns = needed  # type: ignore[attr-defined]
    return call


def _called_by_position(
    function: Callable[..., Any], kwargs: dict[str, Any], names: tuple[str, ...], target: str
) -> Callable[..., Any]:
    parameters = [p for p in _parameters(function) if p.name not in kwargs]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    no_others = all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)
    if not (no_others and required <= len(names) and (takes_any or len(positional) >= len(names))):
        raise ConfigError(
            f"reward function {target} takes ({', '.join(str(p) for p in _parameters(function))}), which does not fit",
            f"it must take ({', '.join(names)}), by these names or in this order. By name it needs {names[1]} only, and any other "
            "parameter is filled from the row's column (or key of extra_info) of that name",
        )
    return lambda *values: function(*values, **kwargs)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: no signature to look at
        return list(inspect.signature(lambda *given: None).parameters.values())


def needed_columns(function: Callable[..., Any], kwargs: Mapping[str, Any], names: tuple[str, ...] = _ONE) -> list[str]:
    """Parameters without a default that only a column of the row can fill."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {*names, *kwargs}
    return [p.name for p in _parameters(function) if p.kind in by_name and p.default is p.empty and p.name not in known]


def wrong_columns(target: str, missing: list[str], row: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        f"reward function {target} has a parameter {missing[0]!r}, but the rows have no such column; they have: "
        f"{', '.join(sorted(map(str, row))) or 'none besides the prompt'}",
        f"name it after a column or a key of extra_info, give it a default, or set custom_reward_function.reward_kwargs.{missing[0]}",
    )


def with_columns(row: Mapping[str, Any], extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a function of the user's own is told of a row besides the four: its columns, and over them its `extra_info`."""
    columns = {name: value for name, value in row.items() if name not in _OF_THE_SYSTEM}
    if "raw_prompt" in row:
        columns["prompt"] = row["raw_prompt"]
    return columns | dict(extra_info or {})
