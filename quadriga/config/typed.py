"""From plain nested values to the typed dataclasses, collecting every problem instead of stopping at the first."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, reduce
from operator import getitem
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from quadriga.config.fields import LARGEST, KeySpec, spec_of
from quadriga.errors import ConfigError
from quadriga.registry import added_names


@dataclass
class Problems:
    """What is wrong with a configuration, one line per key."""

    found: list[tuple[str, str]] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    """Keys whose value is not what the user meant: one that was refused, or that a misspelt key stood for."""

    def add(self, what: str, fix: str, doubtful: Iterable[str] = ()) -> None:
        """Note one problem; the same one twice (a refused section with many keys) counts once."""
        if (what, fix) not in self.found:
            self.found.append((what, fix))
        self.doubtful.update(doubtful)

    def add_all(self, others: Problems) -> None:
        """Those of `others` as well, but for what may be wrong only because a key in doubt has its default."""
        for what, fix in others.found:
            if not any(key in what for key in self.doubtful):
                self.add(what, fix)

    def raise_if_any(self) -> None:
        if len(self.found) == 1:
            raise ConfigError(*self.found[0])
        if self.found:
            lines = [f"  {i}. {what}\n     fix: {fix}" for i, (what, fix) in enumerate(self.found, 1)]
            raise ConfigError(f"{len(self.found)} problems in the configuration:\n" + "\n".join(lines))


@cache
def hints_of(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def default_values(cls: type) -> dict[str, Any]:
    """The schema's defaults as plain nested values, interpolations unresolved."""
    return _plain(cls())


def _plain(instance: Any) -> dict[str, Any]:
    values = {}
    for declared in fields(instance):
        value = getattr(instance, declared.name)
        values[declared.name] = _plain(value) if is_dataclass(value) else value
    return values


class Key(NamedTuple):
    """Type and declaration of a leaf key."""

    hint: Any
    spec: KeySpec

    def typed(self, path: str, value: Any) -> Any:
        """`value` as the key's type and within its bounds; ValueError says why it is not."""
        return check_value(coerce(value, self.hint), self.spec, added_names(path))


@cache
def all_keys(cls: type, prefix: str = "") -> dict[str, Key]:
    """Every leaf key of the schema by its dotted name. A key of type dict is a leaf that holds free sub-keys."""
    keys: dict[str, Key] = {}
    for declared in fields(cls):
        hint, path = hints_of(cls)[declared.name], prefix + declared.name
        if is_dataclass(hint) and isinstance(hint, type):
            keys.update(all_keys(hint, path + "."))
        else:
            keys[path] = Key(hint, spec_of(declared))
    return keys


@cache
def all_sections(cls: type) -> set[str]:
    """Every dotted name that holds further keys."""
    return {k.rsplit(".", i)[0] for k in all_keys(cls) for i in range(1, k.count(".") + 1)}


def is_known(cls: type, path: str) -> bool:
    """Whether the schema has a key or section of this dotted name."""
    return path in all_keys(cls) or path in all_sections(cls)


def is_free_form(cls: type, path: str) -> bool:
    """Whether `path` lies inside a key whose sub-keys are the user's own (ray_kwargs.ray_init.num_cpus)."""
    known = all_keys(cls)
    parents = [path.rsplit(".", i)[0] for i in range(1, path.count(".") + 1)]
    return any(parent in known and _holds_a_dict(known[parent].hint) for parent in parents)


def _holds_a_dict(hint: Any) -> bool:
    return get_origin(hint) is dict or any(get_origin(a) is dict for a in get_args(hint))


def default_of(cls: type, path: str) -> Any:
    """The schema's default of a known key; None for all others, e.g. inside a free-form key."""
    return _flat_defaults(cls).get(path)


@cache
def _flat_defaults(cls: type) -> dict[str, Any]:
    defaults = default_values(cls)
    return {path: value_at(defaults, path) for path in all_keys(cls)}


def nearest_keys(cls: type, path: str, limit: int = 3) -> list[str]:
    """The valid keys that the user most likely meant, best first; empty if nothing is near.

    In this order: a near spelling in the same section, the same last word in other sections, a near spelling anywhere.
    """
    known = list(all_keys(cls)) + sorted(all_sections(cls))
    parent, _, last = path.rpartition(".")
    siblings = [k for k in known if k.rpartition(".")[0] == parent]
    spelling = {k: _alike(k.rpartition(".")[2], last) for k in known}
    if close := [k for k in siblings if spelling[k] >= 0.65]:
        return [max(close, key=spelling.__getitem__)]
    if same_name := [k for k in known if k.rpartition(".")[2] == last]:
        return sorted(same_name, key=lambda k: -_alike(k, path))[:limit]
    close = [k for k in known if spelling[k] >= 0.8]
    return sorted(close, key=lambda k: -_alike(k, path))[:limit]


def _alike(one: str, other: str) -> float:
    if min(len(one), len(other)) >= 4 and (one in other or other in one):
        return 0.8
    return difflib.SequenceMatcher(None, one, other).ratio()


UnknownKey = Callable[[str, Any], None]
WrongValue = Callable[[str, Any, ValueError], None]


def build(cls: type, values: dict[str, Any], unknown: UnknownKey, wrong: WrongValue, prefix: str = "") -> Any:
    """An instance of `cls` from `values`, in which every section is a dict.

    Keys that the schema lacks are handed to `unknown(path, value)`, wrong values to `wrong(path, value, error)`; the
    latter keep their default in the result.
    """
    hints, arguments = hints_of(cls), {}
    for declared in fields(cls):
        if declared.name not in values:
            continue
        path, hint, value = prefix + declared.name, hints[declared.name], values[declared.name]
        if is_dataclass(hint) and isinstance(hint, type):
            arguments[declared.name] = build(hint, value, unknown, wrong, path + ".")
            continue
        try:
            arguments[declared.name] = Key(hint, spec_of(declared)).typed(path, value)
        except ValueError as error:
            wrong(path, value, error)
    for name in values:
        if name not in hints:
            unknown(f"{prefix}{name}", values[name])
    return cls(**arguments)


def coerce(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`; only conversions that lose nothing (1 -> 1.0, 1e3 -> 1000, x -> [x] for a list)."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args)
    if origin is list:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        return [coerce(item, args[0]) for item in items]
    if origin is dict:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"must be a mapping, got {type_in_words(type(value))}")
        return value
    return _coerce_scalar(value, hint)


def _coerce_union(value: Any, args: tuple[Any, ...]) -> Any:
    if value is None and type(None) in args:
        return None
    exact = [a for a in args if isinstance(a, type) and type(value) is a]
    for candidate in exact or [a for a in args if a is not type(None)]:
        try:
            return coerce(value, candidate)
        except ValueError:
            continue
    raise ValueError(f"must be {' or '.join(map(type_in_words, args))}, got {type_in_words(type(value))}")


def _coerce_scalar(value: Any, hint: type) -> Any:
    wrong = ValueError(f"must be {type_in_words(hint)}, got {type_in_words(type(value))}")
    if isinstance(value, bool) or hint is bool:
        if not (isinstance(value, bool) and hint is bool):
            raise wrong
        return value
    if not isinstance(value, (int, float, str)):
        raise wrong
    if hint is str:
        return str(value)
    try:
        number = float(value)
    except ValueError:
        raise wrong from None
    if hint is int:
        if not number.is_integer():
            raise ValueError("must be a whole number")
        return value if isinstance(value, int) else int(number)
    return number


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
}


def type_in_words(hint: Any) -> str:
    """`list of text`, `a whole number or null`: a type as a user would say it."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None) or hint is None:
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_in_words, args))
    if origin is list:
        return f"a list of {type_in_words(args[0]).removeprefix('a ')}"
    return _WORDS.get(origin or hint, getattr(hint, "__name__", str(hint)))


def check_value(value: Any, spec: KeySpec, also: Collection[str] = ()) -> Any:
    """`value` if it obeys the bounds declared for its key; `also` are names that the key may take besides its choices.

    Raises:
        ValueError: says which bound is broken; for a name, with the nearest valid one.
    """
    for item in value if isinstance(value, list) else [value]:
        _check_item(item, spec, also)
    return value


def _check_item(value: Any, spec: KeySpec, also: Collection[str]) -> None:
    if value is None:
        return
    if (
        spec.choices is not None
        and value not in spec.choices
        and value not in also
        and not _names_own_code(value, spec)
    ):
        near = difflib.get_close_matches(str(value), [*map(str, spec.choices), *also], n=1, cutoff=0.6)
        raise ValueError(f"must be {spec.describe_choices()}" + (f"; did you mean {near[0]}?" if near else ""))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError("must be finite")
        if spec.at_least is not None and value < spec.at_least:
            raise ValueError(f"must be at least {_shown(spec.at_least)}")
        if spec.above is not None and value <= spec.above:
            raise ValueError(f"must be above {_shown(spec.above)}")
        at_most = LARGEST if spec.at_most is None else spec.at_most
        if value > at_most:
            raise ValueError(f"must be at most {_shown(at_most)}")
        if value < -LARGEST:
            raise ValueError(f"must be at least {_shown(-LARGEST)}")


def _shown(bound: float) -> str:
    """A bound as a user would write it: 8,192 or 0.01."""
    return f"{int(bound):,}" if float(bound).is_integer() else f"{bound:g}"


def _names_own_code(value: Any, spec: KeySpec) -> bool:
    if not spec.own or not isinstance(value, str):
        return False
    source, _, attribute = value.removesuffix("+").rpartition(":")
    return bool(source) and all(part.isidentifier() for part in attribute.split("."))


FOLLOWS = re.compile(r"\$\{([\w.]+)\}")


def changed_keys(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old → new` for every key that differs."""
    changed = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            changed.append(f"{prefix}{name}: {old} → {new}")
    return changed


def keys_set(values: Mapping[str, Any], schema: type) -> dict[str, Any]:
    """Dotted keys of `values`, nested and resolved, that have another value than they would have had by themselves.

    A key whose default follows another key (`${other}`) counts only when it departs from it.
    """
    return {
        path: value_at(values, path)
        for path in all_keys(schema)
        if value_at(values, path) != default_of(schema, path) and not follows_another_key(path, values, schema)
    }


def follows_another_key(path: str, values: Mapping[str, Any], schema: type) -> bool:
    """Whether the key's default is `${other}` and it has the value of that other key."""
    default = default_of(schema, path)
    follows = FOLLOWS.fullmatch(default) if isinstance(default, str) else None
    return follows is not None and value_at(values, follows[1]) == value_at(values, path)


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """The value of a dotted key in nested mappings. KeyError: there is none."""
    return reduce(getitem, path.split("."), values)


def get_key(config: Any, path: str) -> Any:
    """The value of a dotted key of a typed configuration, or one of its sections."""
    return reduce(getattr, path.split("."), config)


def set_key(config: Any, path: str, value: Any) -> None:
    """Give a dotted key of a typed configuration another value."""
    section, _, name = path.rpartition(".")
    setattr(get_key(config, section), name, value)
