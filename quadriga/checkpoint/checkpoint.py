"""A finished checkpoint, as it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quadriga.checkpoint.json_state import read_json_state
from quadriga.checkpoint.manifest import Manifest, read_manifest, verify
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
