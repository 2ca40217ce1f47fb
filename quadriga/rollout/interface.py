"""What an engine of generation takes, gives and can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt and the samples wanted from it. The prompt is computed once and shared by its samples.

    The random number of a token is a function of (params.seed, step, uid, call, sample index, position) and nothing else.
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
    version: int | None = None
    """The weights that must write it; None: those that the engine has, also when they change on the way."""
    call: int = 0
    """How many requests of the same episode came before it; each draws random numbers of its own."""
    affinity: str | None = None
    """Requests of one affinity go to the engine that had the last of them, where its tokens may still be in the cache, if that
    one lives, has the right weights and is not full; otherwise anywhere."""


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
    versions: tuple[tuple[int, int], ...]
    """Runs `(version, tokens)`: which weights wrote how many of its tokens, in order."""
    cached_tokens: int = field(default=0, compare=False)
    """Tokens of the prompt that were not computed for it: they were in the cache, or a request beside it computed them. It tells
    of the company it had, not of the sample."""

    @property
    def version(self) -> int:
        """The newest weights that had a part in it."""
        return self.versions[-1][0]


@dataclass(frozen=True)
class WeightsEcho:
    """What an engine answers to new weights, to be compared with the trainer's own figures."""

    version: int
    checksum: int


class Progress(NamedTuple):
    """What a running sample has got since somebody last looked; the fields are those of `Completion`."""

    request_id: str
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    full_log_probs: list[float]


class RolloutEngine(ABC):
    """Turns requests into completions with the weights it was last given: `submit` some, and `step` until it is idle.

    One thread at a time uses it; `rollout.service` is for many callers.
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the weights."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Samples that can run at the same time."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest prompt and response together that can run."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """DataError or ConfigError if `request` can never run."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Take `request` up; its completions come out of later steps. Errors as `check`."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """About one token for every sample that runs; returns the samples that are finished now, in no fixed order."""

    def look(self, seen: Mapping[tuple[str, int], int]) -> list[Progress]:
        """The new tokens of running samples, for those who show an answer while it is written; call it between two steps.

        `seen`: `(request_id, sample index)` → how many tokens of it are known already. An engine that cannot look returns nothing.
        """
        return []

    @abstractmethod
    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> WeightsEcho:
        """Take `weights` by name (None: they are already in the engine's module) and answer what is held now.

        Samples in the middle go on under them.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their samples come out of the next step with what they have."""

    @abstractmethod
    def clear(self) -> None:
        """Drop everything that is under way, and free what it held."""

    @abstractmethod
    def sleep(self) -> None:
        """Give the cache's memory back. Only when idle."""

    @abstractmethod
    def wake(self) -> None:
        """Make ready to generate after `sleep`."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """The completions of some requests as they finish, by an engine that does nothing else.

        A request that can never run is an error before anything is generated. When the iterator is closed or fails,
        everything that it held is freed.
        """
        if not self.idle:
            raise WorkerError(
                "generate was called in the middle of a generation", "read the other one to its end, or close it"
            )
        asked = list(requests)
        for request in asked:
            self.check(request)
        return self._generate(asked)

    def _generate(self, requests: list[Request]) -> Iterator[Completion]:
        try:
            for request in requests:
                self.submit(request)
            while not self.idle:
                yield from self.step()
        finally:
            self.clear()
