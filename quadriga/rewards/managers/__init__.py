"""Reward managers: between a batch of token ids and the reward pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from quadriga.config.schema import RewardConfig
from quadriga.errors import DataError, RewardError
from quadriga.rewards.functions import reward_function
from quadriga.rewards.managers.base import BaseRewardManager, manager_class, register_manager
from quadriga.rewards.managers.kinds import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    RewardManager,
)
from quadriga.rewards.pool import RewardPool
from quadriga.rewards.result import RewardSample
from quadriga.rewards.scorers import check_machine, modules_for

__all__ = [
    "BaseRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "RewardManager",
    "build_manager",
    "check_sources",
    "check_truths",
    "has_scorers",
    "load_reward_manager",
    "manager_class",
    "open_pool",
    "register_manager",
]


def build_manager(
    name: str,
    tokenizer: Any,
    num_examine: int,
    *,
    pool: RewardPool,
    reward_fn_key: str = "data_source",
    **reward_kwargs: Any,
) -> Any:
    """A manager of any registered or user-given class, scoring in `pool`.

    A class that is no `BaseRewardManager` is built as `cls(tokenizer=…, num_examine=…, compute_score=…, reward_fn_key=…,
    **reward_kwargs)`; its `compute_score(data_source, solution_str, ground_truth, extra_info)` scores in the pool too.
    """
    cls = manager_class(name)
    common = {"tokenizer": tokenizer, "num_examine": num_examine, "reward_fn_key": reward_fn_key, **reward_kwargs}
    if issubclass(cls, BaseRewardManager):
        return cls(**common, compute_score=pool.function, pool=pool)

    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> Any:
        result = pool.score_all([RewardSample(data_source, solution_str, ground_truth, dict(extra_info or {}))])[0]
        return {
            "score": result.score,
            "acc": result.acc,
            "pred": result.pred,
            "outcome": result.outcome,
            **result.extra,
        }

    return cls(**common, compute_score=compute_score)


def open_pool(config: Any, log_file: str | None = None) -> RewardPool:
    """The pool that `custom_reward_function.*`, `reward_model.reward_manager` and `reward.*` describe."""
    custom, options = config.custom_reward_function, config.reward
    function = reward_function(custom.path, custom.name, _plain(custom.reward_kwargs))
    name = config.reward_model.reward_manager
    if ":" not in name and issubclass(manager_class(name), BaseRewardManager):
        function = manager_class(name).prepare(function, _plain(config.reward_model.reward_kwargs), options)
    given = {key.name: getattr(options, key.name) for key in fields(RewardConfig) if hasattr(options, key.name)}
    return RewardPool(function, log_file=log_file, **given)


def check_sources(config: Any, sources: Iterable[str]) -> None:
    """RewardError if rows are scored by their data source and there is no scorer for one of `sources`, or it cannot work."""
    name = config.reward_model.reward_manager
    if config.custom_reward_function.path is not None or ":" in name:
        return
    if not getattr(manager_class(name), "scores_itself", False):
        modules_for(sources)
        options = _plain(config.custom_reward_function.reward_kwargs)
        isolation = {"require_isolation": config.reward.require_isolation}
        check_machine(sources, {"code": {**isolation, **options.get("code", {})}})


def check_truths(config: Any, datasets: Iterable[Any]) -> None:
    """DataError if rows are scored by their data source and one has nothing to be compared with."""
    if config.custom_reward_function.path is not None or ":" in config.reward_model.reward_manager:
        return
    for dataset in datasets:
        for index in getattr(dataset, "without_truth", {}).values():
            raise DataError(
                f"{dataset.rows.where(index)} has no reward_model.ground_truth, so its answers cannot be judged",
                "give every row one, or score by a function of your own: custom_reward_function.path=file.py",
            )


def has_scorers(config: Any, sources: Iterable[str]) -> bool:
    """Whether every one of `sources` can be scored without a reward model."""
    try:
        check_sources(config, sources)
    except RewardError:
        return False
    return True


def load_reward_manager(
    config: Any, tokenizer: Any, num_examine: int, *, pool: RewardPool | None = None, **kwargs: Any
) -> Any:
    """The manager that a configuration describes; give it a pool to share one between training and validation.

    A class of one's own with `wants_config = True` gets the configuration as the argument `config`.
    """
    reward_kwargs = _plain(config.reward_model.reward_kwargs) | kwargs
    if getattr(manager_class(config.reward_model.reward_manager), "wants_config", False):
        reward_kwargs["config"] = config
    return build_manager(
        config.reward_model.reward_manager,
        tokenizer,
        num_examine,
        pool=pool or open_pool(config),
        reward_fn_key=config.data.reward_fn_key,
        **reward_kwargs,
    )


def _plain(section: Any) -> dict[str, Any]:
    """A dict of a section that may be a dict, an OmegaConf node or None."""
    if section is None:
        return {}
    if isinstance(section, dict):
        return dict(section)
    plain = OmegaConf.to_container(section, resolve=True)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}
