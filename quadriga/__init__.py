"""Quadriga: reinforcement-learning post-training for language models.

Importing this package is cheap: neither torch nor ray nor transformers is loaded until a name that needs them is used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from quadriga.version import __version__

if TYPE_CHECKING:
    from quadriga.protocol import DataProto

__all__ = ["DataProto", "__version__"]

_LAZY = {"DataProto": "quadriga.protocol"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'quadriga' has no attribute {name!r}")


if sys.argv[:1] == [
    "-m"
]:  # `python -m quadriga…`, before anything is imported that a file in the working folder may hide
    from quadriga.errors import exit_if_packages_are_hidden

    exit_if_packages_are_hidden()
if os.environ.get("QUADRIGA_COMPAT_VERL") == "1":  # this process was started by one that has the alias
    importlib.import_module("quadriga.compat.verl")
