"""Configurations written as dotted keys, as on the command line."""

from __future__ import annotations

from typing import Any


def nest(dotted: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` -> `{"a": {"b": 1}}`."""
    nested: dict[str, Any] = {}
    for path, value in dotted.items():
        *sections, last = path.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return nested
