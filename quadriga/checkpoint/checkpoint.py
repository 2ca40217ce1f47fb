"""A checkpoint as it is read (`Checkpoint`) and as it is written (`Draft`), and the driver's state in it, as JSON."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from quadriga.checkpoint.disk import readable_disk_errors
from quadriga.checkpoint.manifest import Manifest, read_manifest, require_all_ranks, verify
from quadriga.errors import CheckpointError

STATE = "state.json"


class Checkpoint:
    """A folder with a manifest. Making the object reads the manifest only; `verify` reads all of it.

    Raises:
        CheckpointError: the folder has no manifest, or one that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def roles(self) -> list[str]:
        """The parts it has: `actor`, `critic`, `huggingface`, …"""
        return sorted({name.partition("/")[0] for name in self.manifest.files if "/" in name})

    def folder(self, role: str) -> Path:
        """Where the part of `role` lies. CheckpointError if it has none."""
        if role not in self.roles:
            raise CheckpointError(
                f"{self.path} has no part {role!r}; it has {', '.join(self.roles) or 'none'}",
                "resume with the roles that the run was started with",
            )
        return self.path / role

    def read_state(self) -> dict[str, Any]:
        """What the driver gave to `Draft.write_state`."""
        return read_json_state(self.path / STATE)

    def verify(self) -> None:
        """CheckpointError unless every file is there with the bytes that were written."""
        verify(self.path, self.manifest)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step})"


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


class Draft:
    """A temporary folder that becomes a checkpoint when the `with` block of `CheckpointStore.writing` ends well.

    Args:
        lock: descriptor that marks the folder as in use, closed when the draft has become something or nothing.
    """

    def __init__(self, path: Path, step: int, lock: int) -> None:
        self.path, self.step, self._lock = path, step, lock

    def folder(self, role: str) -> Path:
        """The folder for the part of `role`, made if it is not there: `actor`, `critic`, `huggingface`, …"""
        if not role or role.startswith(".") or "/" in role:
            raise CheckpointError(f"{role!r} cannot be the name of a checkpoint's part", "use a plain name")
        folder = self.path / role
        with readable_disk_errors("make", folder):
            folder.mkdir(exist_ok=True)
        return folder

    def write_state(self, state: dict[str, Any]) -> None:
        """The driver's own state: plain values only (see `write_json_state`)."""
        with readable_disk_errors("write", self.path):
            write_json_state(self.path / STATE, state)

    def require_complete(self) -> None:
        """CheckpointError if the driver's state or a rank's shards are missing."""
        if not (self.path / STATE).is_file():
            raise CheckpointError(
                f"the checkpoint of step {self.step} has no driver state",
                "call draft.write_state(…) before the block ends",
            )
        for part in sorted(self.path.iterdir()):
            if part.is_dir():
                require_all_ranks(part)

    def discard(self) -> None:
        """Leave nothing of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        os.close(self._lock)
