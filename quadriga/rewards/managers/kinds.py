"""The reward managers: naive, dapo, batch, and the bare RewardManager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quadriga.errors import ConfigError
from quadriga.rewards.functions import RewardFunction, from_callable, reward_function
from quadriga.rewards.managers.base import BaseRewardManager, register_manager
from quadriga.rewards.result import RewardResult


class RewardManager(BaseRewardManager):
    """Scores by data source. `RewardManager(tokenizer, num_examine)(data, return_dict)`.

    `return_dict` gives exactly `{"reward_tensor": tensor}`. An unknown data source is a RewardError that lists the
    known ones.
    """

    def extra(self, results: list[RewardResult]) -> dict[str, Any]:
        return {}


@register_manager("naive")
class NaiveRewardManager(BaseRewardManager):
    """One call of the reward function per response; `return_dict` adds `reward_extra_info` and `reward_metrics`."""


@register_manager("dapo")
class DAPORewardManager(BaseRewardManager):
    """Naive, plus a soft penalty for overlong responses (DAPO, arXiv 2503.14476, eq. 13).

    The last `len` tokens before `max_resp_len` are a buffer. A response that ends n tokens into it loses
    n / len · penalty_factor from its score: nothing at the buffer's start, penalty_factor at max_resp_len.

    Args:
        max_resp_len: most tokens a response can have.
        overlong_buffer_cfg: `enable`, `len` (tokens), `penalty_factor`, `log` (adds `overlong_reward` and `overlong`).
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RewardFunction | str | Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **pool: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **pool)
        given = dict(overlong_buffer_cfg or {})
        unknown = set(given) - {"enable", "len", "penalty_factor", "log"}
        if unknown:
            raise ConfigError(
                f"unknown key {sorted(unknown)[0]!r} in overlong_buffer_cfg",
                "its keys: enable, len, penalty_factor, log",
            )
        self._enabled = bool(given.get("enable", False))
        self._buffer_tokens = int(given.get("len", 0))
        self._penalty_factor = float(given.get("penalty_factor", 1.0))
        self._log = bool(given.get("log", False))
        self._max_tokens = int(max_resp_len or 0)
        if self._enabled and not 0 < self._buffer_tokens <= self._max_tokens:
            raise ConfigError(
                f"overlong_buffer_cfg.len={self._buffer_tokens} must be at least 1 and at most max_resp_len={max_resp_len}",
                "set reward_model.reward_kwargs.max_resp_len to data.max_response_length, and len below it",
            )

    def adjust(self, result: RewardResult, response_length: int) -> RewardResult:
        if not self._enabled:
            return result
        into_buffer = response_length - (self._max_tokens - self._buffer_tokens)
        penalty = min(0.0, -into_buffer / self._buffer_tokens * self._penalty_factor)
        extra = dict(result.extra)
        if self._log:
            extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return replace(result, score=result.score + penalty, extra=extra)


@register_manager("batch")
class BatchRewardManager(BaseRewardManager):
    """One call of the reward function for the whole batch: lists in (`data_sources, solution_strs, ground_truths,
    extra_infos`), a list of floats or dicts out. The pool's deadline is that of the one call."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RewardFunction | str | Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **pool: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, as_batched(compute_score), reward_fn_key, **pool)
        given = pool.get("pool")
        if given is not None and not given.function.batched:
            raise ConfigError(
                "the batch reward manager was given a pool whose function takes one sample at a time",
                "open the pool with RewardFunction(…, batched=True), or use the naive manager",
            )

    @classmethod
    def prepare(cls, function: RewardFunction, reward_kwargs: Mapping[str, Any], pool: Any) -> RewardFunction:
        return as_batched(function)


def as_batched(compute_score: RewardFunction | str | Callable[..., Any] | None) -> RewardFunction:
    """The same function, called with lists."""
    if compute_score is None:
        raise ConfigError(
            "the batch reward manager needs a reward function that takes the whole batch",
            "set custom_reward_function.path, or use reward_model.reward_manager=naive",
        )
    if isinstance(compute_score, RewardFunction):
        if compute_score.is_default:
            return as_batched(None)
        return replace(compute_score, batched=True)
    if isinstance(compute_score, str):
        return reward_function(compute_score, batched=True)
    return from_callable(compute_score, batched=True)
