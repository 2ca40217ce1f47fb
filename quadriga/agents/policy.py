"""What an agent sees of the policy: it asks, and gets text, tokens and log-probs back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]
"""One entry of a conversation, as chat templates know it: role, content, and for the assistant maybe tool_calls."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote. `arguments` is None where what it wrote is no JSON object; `error` says why."""

    name: str
    arguments: dict[str, Any] | None
    raw: str
    """The text between the marks of the call, as written."""
    call_id: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Generation:
    """One answer of the policy."""

    text: str
    """Without special tokens."""
    prompt_ids: list[int]
    """The whole context that it answers, as the engine read it."""
    token_ids: list[int]
    """What it wrote, its end token included."""
    log_probs: list[float]
    """Of each token, under the distribution it was sampled from."""
    full_log_probs: list[float]
    """Of each token, under softmax(logits / temperature): the trainer's definition."""
    finish_reason: str
    """As a `Completion` has it: stop, length, stop_string, aborted, deadline."""
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    """Runs `(version, tokens)` of the weights."""
    tool_calls: tuple[ToolCall, ...] = ()
    message: Message = field(default_factory=dict)
    """The answer as an entry of the conversation, to be appended to the messages that the next turn is asked with."""


class Policy(Protocol):
    """The policy as one episode reaches it. Everything generated through it is recorded as that episode."""

    async def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **sampling: Any,
    ) -> Generation:
        """Continue a conversation (messages), a text, or token ids.

        Messages that begin with those of the turn before, the policy's own answer among them, go on with the very tokens of that
        turn: only what is new is rendered. Any other prompt begins a further context of the same episode.

        Args:
            tools: schemas for the chat template, as `{"type": "function", "function": {...}}`.
            sampling: fields of `SamplingParams` that differ from the run's own.
        """
        ...
