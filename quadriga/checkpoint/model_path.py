"""A model by any of the names a user has for it."""

from __future__ import annotations

import os
from pathlib import Path

from quadriga.checkpoint.huggingface import PART
from quadriga.checkpoint.manifest import MANIFEST
from quadriga.checkpoint.store import locate


def model_path(path: str) -> str:
    """The Hugging Face folder in a checkpoint or in a run directory (its newest good checkpoint); else `path` as it is.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or holds no model.
    """
    folder = Path(os.path.expandvars(path)).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return path
    is_checkpoint = (folder / MANIFEST).exists() or folder.name.startswith("global_step_")
    if is_checkpoint or (folder / "checkpoints").is_dir() or any(folder.glob("global_step_*")):
        return str(locate(folder).folder(PART))
    return path
