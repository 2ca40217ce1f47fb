"""What becomes of a key that verl has and Quadriga does not: the table in `foreign_keys.yaml`, and how the strict entry uses it.

A value that says what Quadriga does anyway is accepted and dropped. Any other value is refused with the reason and with
what to do instead: nothing is ignored silently. `--from-verl` reads the same rows (`quadriga.compat.translation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from quadriga.config.schema import Config
from quadriga.config.typed import Problems, default_of, is_free_form, is_known

Kind = Literal["rl", "sft"]
"""Which commands: `rl` is train and plan, `sft` all supervised ones."""


def kind_of(schema: type) -> Kind:
    """The kind of the commands that this schema is for."""
    return "rl" if schema is Config else "sft"


FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class ForeignKey:
    """One row of the table; the file says what each field means."""

    key: str
    to: str | None = None
    share: bool = False
    same: tuple[Any, ...] | Literal["any"] = ()
    holds: tuple[Any, ...] = ()
    why: str = ""
    instead: str = "remove it"
    verl: Literal["refuse", "aside"] = "refuse"
    note: str = ""
    only_if: tuple[str, ...] = ()
    changed: str = ""

    def matches(self, path: str) -> bool:
        return fnmatchcase(path, self.key)

    def target(self, path: str) -> str:
        """The name that `path` has here, for a row with `to`."""
        here = self.to or ""
        return here.removesuffix("*") + (path[len(self.key) - 1 :] if here.endswith("*") else "")

    def accepts(self, value: Any) -> bool:
        """Whether `value` asks for nothing but what is done anyway."""
        if self.same == "any":
            return True
        if self.holds and isinstance(value, (list, tuple)):
            return set(self.holds) <= set(value)
        # Type and value, since 1 == True in Python.
        return any(type(value) is type(known) and value == known for known in self.same)


@dataclass(frozen=True)
class ForeignValue:
    """Values of a key of ours that only verl knows."""

    key: str
    value: tuple[Any, ...]
    fix: str
    becomes: Any = None
    drop: bool = False
    note: str = ""


@dataclass(frozen=True)
class ForeignTable:
    """Everything about verl's keys for one kind of command.

    Attributes:
        defaults: verl's, where they decide what is trained.
        changed: what versions of verl read differently in a key that Quadriga has too.
    """

    keys: tuple[ForeignKey, ...]
    values: tuple[ForeignValue, ...]
    defaults: Mapping[str, Any]
    changed: Mapping[str, str]

    def row(self, path: str) -> ForeignKey | None:
        return next((row for row in self.keys if row.matches(path)), None)

    def value(self, path: str, value: Any) -> ForeignValue | None:
        if isinstance(value, (list, dict)):
            return None
        return next((row for row in self.values if row.key == path and value in row.value), None)


@cache
def foreign_table(kind: Kind = "rl") -> ForeignTable:
    """The table of one kind of command, read when it is first asked for."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader)
    prefix = "" if kind == "rl" else f"{kind}_"
    return ForeignTable(
        tuple(ForeignKey(**_hashable(row)) for row in content[kind]),
        tuple(ForeignValue(**_hashable(row)) for row in content[f"{prefix}values"]),
        content[f"{prefix}defaults"],
        content.get(f"{prefix}changed", {}),
    )


def _hashable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def carry_over(path: str, value: Any, problems: Problems, schema: type = Config, kind: Kind = "rl") -> bool:
    """Whether `path` is a key of verl's that Quadriga lacks; if its value cannot be honoured, that is a problem too."""
    row = foreign_table(kind).row(path)
    if row is None or (isinstance(value, dict) and value and not row.key.endswith("*")):
        return False  # unknown, or a section of which the keys are looked at one by one
    if value is None or value in ({}, []):
        return True  # null and empty mean "not set"
    if row.to is not None:
        here = row.target(path)
        if not (is_known(schema, here) or is_free_form(schema, here)):
            return carry_over(here, value, problems, schema, kind)
        if row.share:
            fix = f"write {here}=<the same divided by the number of GPUs>"
            problems.add(f"{path}={value}: the rows of a single pass are counted per GPU here", fix)
        elif value != default_of(schema, here):
            problems.add(f"{path}={value}: this key has another name here", f"write {here}={value}")
        return True
    if not row.accepts(value):
        subject = _section(path, row.key) or f"{path}={value}"
        problems.add(f"{subject}: {row.why}", row.instead)
    return True


def fix_for_value(path: str, value: Any, kind: Kind = "rl") -> str | None:
    """What to write instead of a value that verl knows for a key of ours; None where nothing is known."""
    items: Iterable[Any] = value if isinstance(value, list) else [value]
    known = (foreign_table(kind).value(path, item) for item in items)
    return next((row.fix for row in known if row is not None), None)


def _section(path: str, pattern: str) -> str | None:
    """`a.b.megatron.*` for any key in there, so that a whole section is refused in one line."""
    if not pattern.endswith(".*"):
        return None
    last = pattern.removesuffix(".*").rsplit(".", 1)[-1].lstrip("*")
    parts = path.split(".")
    return ".".join(parts[: parts.index(last) + 1]) + ".*" if last in parts else None
