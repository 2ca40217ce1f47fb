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
    from_cache: int | None = None
    """Tokens of the prompt that need not be computed for it when it was first admitted; None: it was not yet."""
    era: int = -1
    """See `Scheduler.forget`: when its first block was written."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs `(version, tokens)` by weights that are no longer the engine's."""

    @property
    def prompt(self) -> np.ndarray:
        return np.array(self.request.prompt_ids, np.int64)

    @property
    def key(self) -> int:
        request = self.request
        return stream_key(request.params.seed, request.step, request.uid, self.sample_index, request.call)

    def ids(self, count: int) -> np.ndarray:
        """The first `count` tokens of prompt and response, `[count]` int64."""
        prompt = self.request.prompt_ids
        return np.array([*prompt, *self.tokens[: max(0, count - len(prompt))]][:count], np.int64)

    def close_run(self, version: int, tokens: int) -> None:
        """Note that the weights of `version` go, when `tokens` have been sampled in all."""
        if new := tokens - sum(count for _, count in self.versions):
            self.versions.append((version, new))

    def completion(self, reason: str, version: int) -> Completion:
        self.close_run(version, len(self.tokens))
        return Completion(
            request_id=self.request.request_id,
            uid=self.request.uid,
            sample_index=self.sample_index,
            token_ids=self.tokens,
            log_probs=self.log_probs,
            full_log_probs=self.full_log_probs,
            finish_reason=reason,
            versions=tuple(self.versions) or ((version, 0),),
            cached_tokens=self.from_cache or 0,
        )


@dataclass(eq=False)
class Prefill:
    """Tokens to be run through the model, and the samples that start after them.

    The tail of `ids` that does not fill a block is written to a block of the first member and copied to the others'.
    """

    ids: np.ndarray
    """`[P]` int64: the prompt, and for a preempted sample what it had sampled."""
    members: list[Sequence]
    """Of one request, or of several that ask for the same."""
    done: int = 0
    """So many of `ids` are in the cache."""
