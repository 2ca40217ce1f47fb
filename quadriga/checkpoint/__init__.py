"""Checkpoints: written whole or not at all, verified before they are trusted, and free of code.

The driver uses `CheckpointStore` (no torch needed); a worker writes and reads its part with `shards.save_engine` and
`shards.load_engine`. The format is described in docs/checkpoints.md.
"""

from __future__ import annotations

from quadriga.checkpoint.checkpoint import Checkpoint, Draft
from quadriga.checkpoint.store import CheckpointStore, locate

__all__ = ["Checkpoint", "CheckpointStore", "Draft", "locate"]
