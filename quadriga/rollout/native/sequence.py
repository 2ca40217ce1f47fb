"""The state of one sample, from its prompt to its completion."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quadriga.rollout.interface import Request
from quadriga.rollout.native.randomness import stream_key


@dataclass(eq=False)
class Sequence:
    """One sample of a request. `slot` is its row in every per-slot table while it runs."""

    request: Request
    sample_index: int
    deadline: float
    """Moment on the monotonic clock when it is given up; infinite for none."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_shared: int = 0
    """So many of its first blocks are shared with the other samples of its prompt."""
    tokens: list[int] = field(default_factory=list)
    """What it had sampled when it was last preempted; while it runs the slot tables hold its tokens."""
    log_probs: list[float] = field(default_factory=list)
    full_log_probs: list[float] = field(default_factory=list)

    @property
    def key(self) -> int:
        request = self.request
        return stream_key(request.params.seed, request.step, request.uid, self.sample_index)


@dataclass(eq=False)
class Prefill:
    """Tokens to be run through the model, and the samples that start after them."""

    ids: np.ndarray
    """`[P]` int64: the prompt, and for a preempted sample what it had sampled."""
    members: list[Sequence]
    done: int = 0
    """So many of `ids` are in the cache."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the full part of `ids`, then one for its tail if it has one."""

    @property
    def request(self) -> Request:
        return self.members[0].request
