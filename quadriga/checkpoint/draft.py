"""A checkpoint that is being written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from quadriga.checkpoint.checkpoint import STATE
from quadriga.checkpoint.disk import readable_disk_errors
from quadriga.checkpoint.json_state import write_json_state
from quadriga.checkpoint.shard_files import require_all_ranks
from quadriga.errors import CheckpointError


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
