"""How one configuration key is declared: its default, its meaning, its unit and its bounds, in one line.

The dataclasses of `schema.py` are the single truth. The YAML file, the reference page of the docs and all checks of
single values are derived from what is declared through `key` and `section`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

LONGEST = 1 << 24
"""Tokens; no text that a model reads is longer."""
LARGEST = 10**9
"""What a number may be, either way, where its key says nothing else: more is a slip, and breaks libraries in odd ways."""
LARGEST_SEED = (1 << 63) - 1
SHORTEST_S, LONGEST_S = 0.1, 1e7
"""Deadlines, from a tenth of a second to four months."""
MOST_PROCESSES, MOST_ROWS = 4096, 1 << 20


@dataclass(frozen=True)
class KeySpec:
    """What is known about a key besides its type and default."""

    doc: str
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] | None = None
    own: str = ""
    """Form in which a user names code of their own instead of one of `choices`, e.g. module:function."""
    only_if: str = ""
    """When the key is read at all; elsewhere a value is refused. See `no_effect`."""
    zero_is_off: bool = False
    """Where it is not read, 0 or null says no more than that (a KL weight where there is no KL)."""

    def describe_choices(self) -> str:
        """`one of a, b, or your own as module:function`; a lone choice by itself; empty for a key without choices."""
        if self.choices is None:
            return ""
        names = ", ".join(map(str, self.choices))
        if len(self.choices) == 1 and not self.own:
            return names
        return f"one of {names}" + (f", or your own as {self.own}" if self.own else "")


def key(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[Any, ...] | None = None,
    own: str = "",
    only_if: str = "",
    zero_is_off: bool = False,
) -> Any:
    """Declare a key. A string default of the form `${a.b}` follows another key until the user sets it.

    For a list, the bounds and choices hold for each item.
    """
    spec = KeySpec(doc, unit, at_least, above, at_most, choices, own, only_if, zero_is_off)
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata={"spec": spec})
    return field(default=default, metadata={"spec": spec})


def section(cls: Callable[[], Any], doc: str, *, only_if: str = "", zero_is_off: bool = False) -> Any:
    """Declare a nested section, `cls` being its dataclass (or a function that makes one with other defaults).

    `only_if` and `zero_is_off` hold for all keys in it.
    """
    return field(default_factory=cls, metadata={"spec": KeySpec(doc, only_if=only_if, zero_is_off=zero_is_off)})


def spec_of(declared: Field[Any]) -> KeySpec:
    return declared.metadata["spec"]
