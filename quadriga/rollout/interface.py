"""What an engine of generation takes, gives and can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from quadriga.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt and the samples wanted from it. The prompt is computed once and shared by its samples.

    The random number of a token is a function of (params.seed, step, uid, sample index, position) and nothing else.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    uid: tuple[int, int] = (0, 0)
    """(epoch, row index) of the prompt in its dataset."""
    sample_indices: tuple[int, ...] = (0,)
    step: int = 0
    """Training step; a prompt met again in a later step gets other samples."""
    deadline_s: float | None = None
    """Seconds from submission; what is not finished then comes back partial, with finish reason "deadline"."""


@dataclass(frozen=True)
class Completion:
    """One sample. `finish_reason`: stop, length, stop_string, aborted or deadline (the last two: a partial sample)."""

    request_id: str
    uid: tuple[int, int]
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    """Of each token, under the distribution it was sampled from (after penalty and truncation)."""
    full_log_probs: list[float]
    """Of each token, under softmax(logits / temperature): the trainer's definition."""
    finish_reason: str
    version: int
    """Version of the weights that wrote it."""


@dataclass(frozen=True)
class WeightsEcho:
    """What an engine answers to new weights, to be compared with the trainer's own figures."""

    version: int
    checksum: int


class RolloutEngine(Protocol):
    """Turns requests into completions with the weights it was last given."""

    @property
    def version(self) -> int: ...

    def generate(self, requests: Iterable[Request], expected_version: int | None = None) -> Iterator[Completion]:
        """Completions as they finish, in no fixed order. WorkerError if the weights are not `expected_version`."""
        ...

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> WeightsEcho:
        """Take `weights` by name (None: they are already in the engine's module) and answer what is held now."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their samples come out of `generate` with what they have."""
        ...

    def sleep(self) -> None:
        """Give the cache's memory back."""
        ...

    def wake(self) -> None:
        """Make ready to generate after `sleep`."""
        ...
