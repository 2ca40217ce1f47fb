"""The agent `tools`: the policy answers, and calls tools on the way as often as it likes."""

from __future__ import annotations

from typing import Any

from quadriga.agents.task import Task
from quadriga.errors import ConfigError


async def run(task: Task, policy: Any) -> None:
    """Until an answer calls no tool. The reward function scores the episode; rewards that tools give go to the turn before.

    A row may have `tools_kwargs` (verl's `{name: {"create_kwargs": …}}`) in its `extra_info`, for tools with state.
    """
    if task.tools is None:
        raise ConfigError(
            "the agent tools has no tools",
            "set actor_rollout_ref.rollout.multi_turn.tools, tool_config_path or function_tool_path",
        )
    messages, counts = task.messages, task.tools.limits.counts_rewards
    session, answered = task.tools.session((task.row.get("extra_info") or {}).get("tools_kwargs")), False
    try:
        async with session as tools:
            while True:
                answer = await policy.generate(messages, tools=tools.schemas)
                answered = True
                messages.append(answer.message)
                if not answer.tool_calls:
                    break
                results = await tools.call_all(answer.tool_calls)
                failed = sum(result.error is not None for result in results)
                policy.count(tool_calls=len(results), tool_errors=failed)
                if (given := sum(result.reward for result in results)) and counts:
                    policy.reward(given)
                messages += [result.message for result in results]
    finally:  # also of an episode that a limit ends: its tools have seen what was done
        if answered and counts and (given := sum(session.rewards.values())):
            policy.reward(given)
