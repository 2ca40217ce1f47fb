"""What an agent is given and what it may answer."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quadriga.agents.policy import Message


class EpisodeOver(BaseException):
    """A limit of the episode is reached: raised by `policy.generate`, to be let through.

    No `Exception`, so that an agent that catches those does not ask for ever. An agent may catch it to return what it has.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the limit of {reason} is reached")
        self.reason = reason


@dataclass
class Task:
    """One sample of a prompt, as its agent gets it."""

    row: dict[str, Any]
    """The row's columns."""
    prompt: list[Message] | str
    uid: str
    sample_index: int
    step: int
    validates: bool = False
    """Whether the episode belongs to a validation."""
    seed: tuple[int, ...] = (0,)
    """Different for every sample of every prompt and step, the same when the episode is run again."""
    tools: Any = None
    """The run's `Toolbox`; None without tools."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What `agent_loop_config_path` says of this agent."""

    @property
    def messages(self) -> list[Message]:
        """The prompt as a conversation, a copy; a plain text is what the user says."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]

    @cached_property
    def random(self) -> random.Random:
        """For an agent's own choices: an episode that is run again makes the same."""
        return random.Random(repr(self.seed))


def outcome_of(returned: Any) -> tuple[float | None, dict[str, Any]]:
    """Reward and further values from what an agent returned: None, a number, or a dict with `reward` and whatever else.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    told: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        told = {str(name): value for name, value in returned.items() if name != "reward"}
        returned = returned.get("reward")
    if returned is None:
        return None, told
    if isinstance(returned, str) or not hasattr(returned, "__float__"):
        raise TypeError(
            f"the agent returned a {type(returned).__name__}; it must return None, a number, or a dict with `reward`"
        )
    reward = float(returned)
    if not math.isfinite(reward):
        raise ValueError(f"the agent returned the reward {reward}")
    return reward, told
