"""Environments: the policy acts by what it writes, the environment answers, until it says that the episode is over."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quadriga.agents.policy import Message
from quadriga.agents.task import EpisodeOver, Task

Observation = str | Message | Sequence[Message]


class Environment(Protocol):
    """A class of this kind is an agent: one is made for every episode. Both methods may be `async`; if they are not, they run in
    a thread, so that a slow one holds up nobody else. `close()` is called at the end where there is one."""

    def reset(self, row: dict[str, Any]) -> str | Sequence[Message]:
        """The first prompt: messages for the chat template, or plain text. `row`: the columns of the dataset's row."""

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Observation, reward of this turn, and whether the episode is over, for what the policy wrote.

        An observation is a text, a message, or several. After the last turn nobody reads it.
        """


async def play(make: Callable[[], Any], task: Task, policy: Any) -> dict[str, Any]:
    """One episode of the environment that `make` makes. Every turn's reward goes to that turn."""
    environment = make()
    total = 0.0
    try:
        prompt = await _called(policy, environment.reset, dict(task.row))
        context: Any = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        done = False
        while not done:
            answer = await policy.generate(context)
            observation, reward, done = await _called(policy, environment.step, answer.text)
            policy.reward(float(reward))
            total += float(reward)
            if isinstance(context, str):
                context = context + answer.text + (observation if isinstance(observation, str) else "")
            else:
                context = [*context, answer.message, *_messages(observation)]
    except EpisodeOver as over:
        return {"reward": 0.0, "return": total, "finish_reason": over.reason}
    finally:
        if hasattr(environment, "close"):
            await _called(policy, environment.close)
    return {"reward": 0.0, "return": total}


def _messages(observation: Observation) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [dict(observation)] if isinstance(observation, dict) else [dict(message) for message in observation]


async def _called(policy: Any, method: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    policy.runs()
    return await asyncio.to_thread(method, *arguments)
