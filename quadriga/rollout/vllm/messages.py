"""What a slot and the engine process beside it say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.rollout.interface import Completion, Request, WeightsEcho


@dataclass(frozen=True)
class Open:
    """Make the engine. Answered by `Ready`."""

    model: str
    """Folder with the model's config.json; the weights come with `Load`."""
    arguments: Mapping[str, Any]
    """Of vLLM's engine."""
    on_cpu: bool
    eos_token_ids: Sequence[int]
    tokenizer: Any
    recompute_on_update: bool


@dataclass(frozen=True)
class Ready:
    vocab_size: int
    context_tokens: int
    cache_tokens: int


@dataclass(frozen=True)
class Placed:
    """Where a weight lies in the shared memory."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Load:
    """Take the weights that lie in the shared memory. Answered by a `WeightsEcho` of what is held."""

    version: int
    weights: Sequence[Placed]
    size: int
    """Bytes of all of them."""


@dataclass(frozen=True)
class Step:
    """Take up requests, give some up, and compute for a moment. Answered by `Stepped`."""

    requests: Sequence[Request] = ()
    aborted: Sequence[str] = ()


@dataclass(frozen=True)
class Stepped:
    finished: list[Completion]


@dataclass(frozen=True)
class Clear:
    """Drop everything that is under way. Answered by `Done`."""


@dataclass(frozen=True)
class Sleep:
    """Give memory back; `wake` is its opposite. Answered by `Done`."""

    wake: bool = False


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Failed:
    """The answer to what could not be done."""

    kind: str
    """Class of the exception."""
    what: str
    fix: str = ""
    """Where it is one of Quadriga's own errors."""


Answer = Ready | WeightsEcho | Stepped | Done | Failed
