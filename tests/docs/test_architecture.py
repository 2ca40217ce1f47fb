"""ARCHITECTURE.md stays true: the files are there, and so is what it says is in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def names_in(file: Path) -> set[str]:
    """Classes and functions of a module, and `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{m.name}" for m in node.body if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
    return names


def test_every_path_that_is_named_is_there():
    paths = re.findall(r"`((?:quadriga|tests)/[\w/.]+)`", TEXT)
    assert len(paths) > 25
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_every_name_that_follows_a_file_is_in_it():
    wrong = []
    for path, rest in re.findall(r"`(quadriga/[\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+)", TEXT):
        known = names_in(ROOT / path)
        owner = ""
        for name in re.findall(r"`([\w.]+)`", rest):
            owner = name.rpartition(".")[0] or owner
            whole = name if "." in name or not owner else f"{owner}.{name}"
            if name not in known and whole not in known:
                wrong.append(f"{path}: {name}")
    assert not wrong


def test_every_room_of_the_package_is_in_the_table():
    rooms = {p.name for p in (ROOT / "quadriga").iterdir() if p.is_dir() and p.name not in ("assets", "__pycache__")}
    assert {room for room in rooms if f"`quadriga/{room}/`" not in TEXT} == set()
