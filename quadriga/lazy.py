"""Packages whose names are imported when they are first used, so that importing the package costs nothing."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` for the `__init__.py` at `file`: its names are those that it imports for type checkers.

    if TYPE_CHECKING:
        from package.module import Name

    __all__, __getattr__ = lazy_names(__name__, __file__)
    """
    blocks = [node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return sorted(module_of), load
