"""The state of one sample, from its prompt to its completion."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quadriga.rollout.interface import Completion, Request
from quadriga.rollout.native.randomness import stream_key


@dataclass(eq=False)
class Sequence:
    """One sample of a request."""

    request: Request
    sample_index: int
    deadline: float
    """Moment on the monotonic clock when it is given up; infinite for none."""
    slot: int = -1
    """Its row in every per-slot table, while its prompt is computed or it runs."""
    tokens: list[int] = field(default_factory=list)
    """What it had sampled when it was last saved; while it runs the slot tables know better."""
    log_probs: list[float] = field(default_factory=list)
    full_log_probs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> np.ndarray:
        return np.array(self.request.prompt_ids, np.int64)

    @property
    def key(self) -> int:
        request = self.request
        return stream_key(request.params.seed, request.step, request.uid, self.sample_index)

    def completion(self, reason: str, version: int) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            uid=self.request.uid,
            sample_index=self.sample_index,
            token_ids=self.tokens,
            log_probs=self.log_probs,
            full_log_probs=self.full_log_probs,
            finish_reason=reason,
            version=version,
        )


@dataclass(eq=False)
class Prefill:
    """Tokens to be run through the model, and the samples that start after them.

    The tail of `ids` that does not fill a block is written to a block of the first member and copied to the others'.
    """

    ids: np.ndarray
    """`[P]` int64: the prompt, and for a preempted sample what it had sampled."""
    members: list[Sequence]
    done: int = 0
    """So many of `ids` are in the cache."""
