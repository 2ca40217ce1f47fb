"""The driver's state as JSON: nothing in it can be anything but plain values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quadriga.errors import CheckpointError


def write_json_state(path: Path, state: dict[str, Any]) -> None:
    """Write nested dicts and lists of text, numbers, booleans and None. Floats come back bit for bit; tuples as lists.

    Raises:
        CheckpointError: something else is in it; says where.
    """
    _check(state, "state")
    path.write_text(json.dumps(state, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read_json_state(path: Path) -> dict[str, Any]:
    """Inverse of `write_json_state`."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "resume from another checkpoint") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no object", "resume from another checkpoint")
    return state


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{where} has the key {key!r}, which is not text", "use text as keys")
            _check(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            _check(inner, f"{where}[{position}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold",
            "turn it into numbers, text, lists and dicts; tensors belong into a worker's part",
        )
