"""verl's reward names: `verl.trainer.ppo.reward` and `verl.workers.reward_manager`; `reward_loop` has the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from quadriga.errors import QuadrigaError
from quadriga.protocol import DataProto
from quadriga.rewards import load_reward_manager as _load_reward_manager
from quadriga.rewards.managers import BatchRewardManager, DAPORewardManager, NaiveRewardManager, manager_class
from quadriga.rewards.managers.base import register_manager
from quadriga.rewards.managers.limited import RateLimitedRewardManager

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "GDPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RateLimitedRewardManager",
    "RemoteRewardManager",
]

PrimeRewardManager = RemoteRewardManager = GDPORewardManager = NaiveRewardManager
"""Scoring always runs in parallel processes, and keeps all that the function tells."""

RawRewardFn = Callable[..., Any] | None

# ---- Reward managers


class AbstractRewardManager(ABC):
    """What a reward manager of a user's own is: built with these arguments, called with a batch."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]: ...


register = register_manager
"""Class decorator: make a manager known as `reward_model.reward_manager=<name>`, in this process."""


def get_reward_manager_cls(name: str) -> type:
    """
    Raises:
        ValueError: nothing of that name is registered.
    """
    try:
        return manager_class("naive" if name == "prime" else name)
    except QuadrigaError as error:
        raise ValueError(str(error)) from None


# ---- verl.trainer.ppo.reward


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int, **reward_kwargs: Any) -> Any:
    """The manager that a configuration with verl's keys describes."""
    from quadriga.compat.verl.configs import understood
    from quadriga.config import Config, load_config

    checked = config if isinstance(config, Config) else load_config(understood(config))
    return _load_reward_manager(checked, tokenizer, num_examine, **reward_kwargs)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """The function that `custom_reward_function` (or `reward.custom_reward_function`) names; None without one."""
    from quadriga.compat.verl.utilities import load_extern_object

    section = _section(config, "custom_reward_function") or _section(
        _section(config, "reward"), "custom_reward_function"
    )
    path = _section(section, "path")
    if not path:
        return None
    function = load_extern_object(path, _section(section, "name") or "compute_score")
    options = dict(_section(section, "reward_kwargs") or {})
    return wraps(function)(partial(function, **options)) if options else function


def _section(config: Any, name: str) -> Any:
    if config is None:
        return None
    return config.get(name) if hasattr(config, "get") else getattr(config, name, None)


def compute_reward(data: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """(reward tensor, what else the function said). An error is the caller's to see: nothing is called a second time."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})


def __getattr__(name: str) -> Any:
    """`compute_reward_async`: the same in a process of Ray's, which only then is needed."""
    if name != "compute_reward_async":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import ray

    return ray.remote(num_cpus=1)(_compute_reward_there)


def _compute_reward_there(data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: Any = None) -> Any:
    return compute_reward(data, reward_fn or load_reward_manager(config, tokenizer, num_examine=0))


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """The scores that a batch holds already, and the columns that its meta information calls extra."""
    keys = batch.meta_info.get("reward_extra_keys", [])
    return batch.batch["rm_scores"], {key: batch.non_tensor_batch[key] for key in keys}
