"""What the dispatcher keeps: calls of the reward function, and the workers they were given to."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

from quadriga.rewards.wire import Frames


@dataclass(eq=False, slots=True)
class Call:
    """One call of the reward function. `owner` belongs to the pool."""

    payload: bytes
    owner: Any
    attempts: int = 1
    handovers: int = 0


@dataclass(eq=False, slots=True)
class WorkerRecord:
    """What the dispatcher knows of one scoring process."""

    number: int
    slot: int
    channel: socket.socket
    pid: int | None = None
    outgoing: bytearray = field(default_factory=bytearray)
    frames: Frames = field(default_factory=Frames)
    calls: dict[int, Call] = field(default_factory=dict)
    last_number: int = 0
    answered: int = 0
    progress_at: float = 0.0
    lingering_since: float = 0.0
    taken_back: bool = False
    slowed: bool = False
    dismissed: bool = False
    condemned_at: float = 0.0
    condemned_call: int = 0
    over_memory_mb: int = 0

    @property
    def active(self) -> bool:
        return not (self.lingering_since or self.condemned_at or self.dismissed)
