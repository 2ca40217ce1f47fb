"""Names of a role's files, and whether they are all there. No torch, so that the driver can ask too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from quadriga.errors import CheckpointError

INDEX = "engine.json"
"""Written by rank 0: format, number of ranks, dtype and shape of every tensor, and all values that are no tensors."""

_SHARD = re.compile(r"rank_(\d{5})_(\d{4})\.safetensors")


def shard_name(rank: int, part: int) -> str:
    return f"rank_{rank:05d}_{part:04d}.safetensors"


def shard_paths(folder: Path) -> dict[int, list[Path]]:
    """Rank → its files."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _SHARD.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return found


def read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if not isinstance(index, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no engine state: it has no {INDEX}", "give the folder of a role"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error}", "resume from another checkpoint") from error
    return index


def require_all_ranks(folder: Path) -> None:
    """CheckpointError if `folder` holds shards, but not those of every rank. Other folders pass."""
    ranks = set(shard_paths(folder))
    if not ranks and not (folder / INDEX).exists():
        return
    missing = set(range(int(read_index(folder)["world_size"]))) - ranks
    if missing:
        raise CheckpointError(
            f"{folder}: the shards of rank(s) {', '.join(map(str, sorted(missing)))} are not there",
            "set trainer.default_local_dir to a folder on a file system that all nodes share",
        )
