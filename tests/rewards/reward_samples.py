"""Batches for the pool's tests."""

from __future__ import annotations

from pathlib import Path

from quadriga.rewards import RewardSample

HOSTILE = str(Path(__file__).with_name("hostile_rewards.py"))


def samples(count: int, *actions: str) -> list[RewardSample]:
    """`count` honest samples with scores 1, 2, 3, …, and the given actions spread between them."""
    found = [RewardSample("any", f"honest {k}", k + 1) for k in range(count)]
    for k, action in enumerate(actions):
        found.insert((k + 1) * count // (len(actions) + 1) + k, RewardSample("any", action, 1))
    return found
