"""What generation has cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """What was computed since the engine was made, and how much of it for nobody."""

    rows: int = 0
    padding: int = 0
    blocks: int = 0
    """Cache blocks read in place by decoding."""
    gaps: int = 0
    """Those of them that belonged to no decoding row."""
