"""How a configuration differs from the defaults, and from another one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quadriga.config.typed import all_keys, default_of

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
    """The value under a dotted name. KeyError: there is none."""
    found: Any = values
    for part in path.split("."):
        found = found[part]
    return found
