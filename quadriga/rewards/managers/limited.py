"""Reward managers for scores that come over the network: `rate_limited` and `judge`.

Both score in the pool like `naive`. What limits them are `reward.num_workers` × `reward.max_concurrent` requests at a time,
and here requests and tokens per minute: every scoring process gets its share of them, so that the sum holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quadriga.errors import ConfigError
from quadriga.rewards.functions import RewardFunction
from quadriga.rewards.managers.base import BaseRewardManager, register_manager

LIMITS = ("max_rpm", "max_tpm", "estimated_tokens_per_request")
JUDGE = ("url", "model", "template", "score_pattern", "api_key_env", "max_tokens", "request_timeout_s")
SECONDS = 60.0


class _LimitedManager(BaseRewardManager):
    """Naive, at a limited pace."""

    own_options: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{name: value for name, value in kwargs.items() if name not in (*LIMITS, *JUDGE)})

    @classmethod
    def prepare(cls, function: RewardFunction, reward_kwargs: Mapping[str, Any], pool: Any) -> RewardFunction:
        """The pool's function: `function` behind this manager's limits."""
        known = (*LIMITS, *cls.own_options)
        if unknown := set(reward_kwargs) - set(known):
            raise ConfigError(f"unknown key {sorted(unknown)[0]!r} in reward_kwargs", f"its keys: {', '.join(known)}")
        limits = {name: float(reward_kwargs[name]) for name in LIMITS if reward_kwargs.get(name) is not None}
        if wrong := [name for name, value in limits.items() if not value > 0]:
            raise ConfigError(f"reward_model.reward_kwargs.{wrong[0]} must be above 0", "set it above 0, or null")
        _check_patience(limits, pool)
        share = {name: value / pool.num_workers if name != LIMITS[2] else value for name, value in limits.items()}
        inner = cls.inner(function, {name: reward_kwargs[name] for name in cls.own_options if name in reward_kwargs})
        return RewardFunction("quadriga.rewards.paced:paced", {"function": inner.as_dict(), "limits": share})

    @classmethod
    def inner(cls, function: RewardFunction, options: Mapping[str, Any]) -> RewardFunction:
        return function


def _check_patience(limits: Mapping[str, float], pool: Any) -> None:
    """A sample's deadline runs while it waits for its turn, so those that wait together must all get theirs in time."""
    waiting = pool.num_workers * pool.max_concurrent
    tokens = limits.get("estimated_tokens_per_request", 2000.0)
    minutes = max(waiting / limits.get("max_rpm", float("inf")), waiting * tokens / limits.get("max_tpm", float("inf")))
    if minutes * SECONDS > pool.timeout_s / 2:
        raise ConfigError(
            f"{waiting} samples at a time (reward.num_workers x reward.max_concurrent) wait up to {minutes * SECONDS:.0f} s for "
            f"their turn, and reward.timeout_s={pool.timeout_s:g}",
            f"set reward.timeout_s={2 * minutes * SECONDS:.0f} or more, or fewer samples at a time",
        )


@register_manager("rate_limited")
class RateLimitedRewardManager(_LimitedManager):
    """For reward functions, sync or async, that ask a service: `reward_kwargs.max_rpm` requests and `max_tpm` tokens a
    minute, counting `estimated_tokens_per_request` (2,000) for each."""


@register_manager("judge")
class JudgeRewardManager(_LimitedManager):
    """A language model behind an OpenAI-like endpoint gives the score.

    Args (reward_kwargs): `url` of the endpoint (…/v1), `model`, `template` with {solution_str}, {ground_truth}, {data_source}
    and {extra_info}, `score_pattern` whose first group is the score in the reply (default: its last number), `api_key_env`
    (the environment variable with the key), `max_tokens` (256), `request_timeout_s` (60), and the limits of `rate_limited`.
    """

    own_options = JUDGE
    scores_itself = True

    @classmethod
    def inner(cls, function: RewardFunction, options: Mapping[str, Any]) -> RewardFunction:
        for name in ("url", "model"):
            if not options.get(name):
                raise ConfigError(f"the judge has no {name}", f"set reward_model.reward_kwargs.{name}")
        if not str(options["url"]).startswith(("http://", "https://")):
            raise ConfigError(f"the judge's url {options['url']!r} is no http address", "write http://host:port/v1")
        try:
            re.compile(options.get("score_pattern") or "")
        except re.error as error:
            raise ConfigError(
                f"reward_kwargs.score_pattern cannot be read: {error}", "write a regular expression"
            ) from None
        return RewardFunction("quadriga.rewards.paced:ask_judge", dict(options))
