"""The contract of generation: what may be asked of the sampler, what an engine takes, gives and can do, and engines by name."""

from __future__ import annotations

import difflib
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from quadriga.errors import ConfigError, DataError, WorkerError
from quadriga.registry import name_of


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. An impossible value is a ConfigError that names the key.

    Order of the transforms: repetition penalty, stop tokens barred until `min_new_tokens`, temperature, top-k, top-p
    of what top-k left, min-p. Tokens as likely as the last one kept are kept too.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 means greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this mass; 1: all."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 or 0: all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest; 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in the prompt or the response; 1: none."""
    do_sample: bool = True
    """False: greedy."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """No stop token is sampled before this many tokens."""
    ignore_eos: bool = False
    """Do not stop at the model's end tokens (`stop_token_ids` still stop)."""
    stop_token_ids: tuple[int, ...] = ()
    """More tokens that end the response; the stop token is its last token."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the response; needs an engine with a tokenizer. The tokens that hold the text are kept."""
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(t) for t in self.stop_token_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more"
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 (all) or a count")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        penalty = self.repetition_penalty
        _require(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "above 0")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        fits = 0 <= self.min_new_tokens <= self.max_new_tokens
        _require(fits, "min_new_tokens", self.min_new_tokens, f"from 0 to max_new_tokens={self.max_new_tokens}")
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids")
        _require(all(self.stop_strings), "stop_strings", self.stop_strings, "texts of at least one character")

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def scale_temperature(self) -> float:
        """Divisor of the logits in every log-prob; greedy tokens are scored at temperature 1."""
        return 1.0 if self.greedy else self.temperature


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={value!r} cannot be sampled with", f"set {key} to {wanted}")


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


_ENGINES: dict[str, str | Callable[..., RolloutEngine]] = {
    "native": "quadriga.rollout.native.engine:NativeEngine",
    "vllm": "quadriga.rollout.vllm.engine:VllmEngine",
}


def register_engine(name: str, factory: Callable[..., RolloutEngine]) -> None:
    """Make `create_engine(name, **arguments)` call `factory(**arguments)`."""
    _ENGINES[name_of(name)] = factory


def create_engine(name: str, **arguments: Any) -> RolloutEngine:
    """The engine called `name`; ConfigError with the known names if there is none."""
    name = name_of(name)
    if name not in _ENGINES:
        near = difflib.get_close_matches(name, _ENGINES, n=1)
        raise ConfigError(
            f"unknown rollout engine {name!r}; known: {', '.join(sorted(_ENGINES))}",
            f"set actor_rollout_ref.rollout.name={near[0] if near else 'native'}",
        )
    factory = _ENGINES[name]
    if isinstance(factory, str):
        module, attribute = factory.split(":")
        factory = getattr(importlib.import_module(module), attribute)
    return factory(**arguments)


@dataclass(frozen=True)
class Limits:
    context_tokens: int
    """Longest sequence."""
    cache_tokens: int
    """Size of the whole cache."""
    vocab_size: int
    has_tokenizer: bool


def check_request(request: Request, limits: Limits) -> None:
    """DataError or ConfigError that says why `request` cannot run within `limits`."""
    name, prompt, params = f"request {request.request_id}", len(request.prompt_ids), request.params
    if not prompt or not request.sample_indices:
        raise DataError(f"{name} has no {'samples' if prompt else 'prompt tokens'}", "ask for at least one")
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= limits.vocab_size:
        raise DataError(
            f"{name}: token {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}",
            "use the tokenizer that belongs to the model",
        )
    longest = prompt + params.max_new_tokens
    if longest > limits.context_tokens:
        raise DataError(
            f"{name}: a prompt of {prompt} tokens and max_new_tokens={params.max_new_tokens} do not fit into a context "
            f"of {limits.context_tokens} tokens",
            "shorten the prompt (data.max_prompt_length) or the response (data.max_response_length)",
        )
    if longest > limits.cache_tokens:
        raise ConfigError(
            f"{name} may grow to {longest} tokens, but the whole KV cache holds {limits.cache_tokens}",
            "raise actor_rollout_ref.rollout.gpu_memory_utilization or shorten data.max_response_length",
        )
    if params.stop_strings and not limits.has_tokenizer:
        raise ConfigError(f"{name} has stop_strings, but the engine has no tokenizer", "give it one: tokenizer=…")
