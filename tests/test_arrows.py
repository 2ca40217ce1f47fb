"""Who may know whom: the rooms of the package stand on floors, and imports point downwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "quadriga"

FLOORS = (
    ("errors", "version", "host", "lazy"),
    ("accelerator", "atomic_file", "registry"),
    ("protocol", "config"),
    ("controller", "algorithms", "tracking"),
    ("models",),
    ("data", "rewards", "engine", "rollout", "agents"),
    ("checkpoint",),
    ("workers",),
    ("trainer",),
    ("commands", "dashboard", "compat"),
    ("cli",),
    ("__init__", "__main__"),
)
"""From the ground up. A room may import any room below its own floor."""
NEIGHBOURS = {
    ("agents", "rollout"),
    ("agents", "rewards"),
    ("agents", "data"),
    ("data", "rewards"),  # the truth is taken out of a solution as a scorer takes out an answer
    ("commands", "dashboard"),
    ("commands", "compat"),
}
"""Arrows between rooms of one floor; none of them goes back."""


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import of the package in `source`: at the top, in a function, or for the type checker."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "quadriga":
            for alias in node.names:
                yield node.lineno, f"quadriga.{alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("quadriga."):
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("quadriga."))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor_of(room: str) -> int:
    for height, rooms in enumerate(FLOORS):
        if room in rooms:
            return height
    pytest.fail(f"quadriga/{room} stands on no floor yet: give it one in FLOORS")


def forbidden(room: str, other: str) -> bool:
    return room != other and (room, other) not in NEIGHBOURS and floor_of(other) >= floor_of(room)


def arrows() -> Iterator[tuple[str, str, str]]:
    """Place of the import, the room it is in, and the room it names."""
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    for file in sorted(PACKAGE.rglob("*.py")):
        for line, module in imports_of(file.read_text(encoding="utf-8")):
            named = module.split(".")[1]
            if named in rooms:  # else a name of the package itself, such as quadriga.DataProto
                yield f"{file.relative_to(PACKAGE.parent)}:{line}", room_of(file), named


def test_imports_point_downwards():
    wrong = [f"{place}: {room} imports {other}" for place, room, other in arrows() if forbidden(room, other)]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_a_command():
    wrong = [place for place, room, other in arrows() if other == "commands" and room not in ("commands", "cli")]
    assert not wrong, "\n".join(wrong)


def test_imports_are_seen_wherever_they_stand():
    source = """
import quadriga.data.files
from quadriga import config
if True:
    from quadriga.trainer import report
def f():
    from quadriga.commands.plan import main
    import os, quadriga.cli
"""
    assert sorted(module for _, module in imports_of(source)) == [
        "quadriga.cli",
        "quadriga.commands.plan",
        "quadriga.config",
        "quadriga.data.files",
        "quadriga.trainer",
    ]


@pytest.mark.parametrize(
    ("room", "other"), [("rollout", "data"), ("checkpoint", "workers"), ("trainer", "cli"), ("config", "protocol")]
)
def test_an_upward_or_sideways_arrow_is_wrong(room, other):
    assert forbidden(room, other)
