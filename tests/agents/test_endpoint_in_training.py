"""Agents that know nothing but an OpenAI client are trained, and what is recorded of them is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_episodes_in_training import assert_same, metrics, rollout, samples, train  # noqa: F401

pytest.importorskip("openai")
AGENTS = Path(__file__).parent / "client_agents.py"


def agent(name: str) -> dict:
    return rollout(agent={"default_agent_loop": f"{AGENTS}:{name}"})


def test_an_agent_behind_an_openai_client_is_trained_bit_for_bit_as_one_with_the_policy(train):  # noqa: F811
    direct = train(agent("directly"), steps=2)
    assert {sample["turns"] for sample in samples(direct)} == {3}
    for name in ("by_client", "by_stream"):
        run = train(agent(name), steps=2)
        assert metrics(run) == metrics(direct)
        mine, theirs = samples(run), samples(direct)
        assert [sample["tokens"] for sample in mine] == [sample["tokens"] for sample in theirs]
        assert all(0 in sample["tokens"]["mask"] and 1 in sample["tokens"]["mask"] for sample in mine)


def test_the_limits_of_an_episode_end_it_by_their_own_name(train):  # noqa: F811
    limits = rollout(multi_turn={"max_tokens_per_turn": 5, "max_assistant_turns": 2})
    run = train(agent("for_ever"), limits, steps=2)
    told = [sample for sample in samples(run) if sample["step"] == 1]
    assert {sample["finish_reason"] for sample in told} == {"turns"}
    assert {sample["turns"] for sample in told} == {2}
