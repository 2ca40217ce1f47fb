"""verl's reward names: `verl.trainer.ppo.reward`, `verl.workers.reward_manager` and the reward loop."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from quadriga.compat.verl.scorers import default_compute_score
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


class _FittingCall(type):
    """Calls a class with those of the arguments that its constructor takes: constructors of reward loops differ."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return super().__call__(*args, **kwargs)
        fitting = {name: value for name, value in kwargs.items() if name in parameters}
        if not args and "config" in parameters:
            fitting.setdefault("config", {})
        return super().__call__(*args, **fitting)


class RewardManagerBase(metaclass=_FittingCall):
    """A manager that scores one sample at a time: `async run_single(data)` of one row gives `reward_score` and
    `reward_extra_info`. Called with a batch, all its rows are scored at the same time, in this process."""

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        compute_score: Any = None,
        num_examine: int = 0,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score or default_compute_score
        self.num_examine, self.reward_fn_key = num_examine, reward_fn_key
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Hook of verl's for state that all objects of a class share."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} must have run_single")

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        results = asyncio.run(self._run_all(data))
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(-1)
        rewards = torch.zeros(responses.shape, dtype=torch.float32)
        for row, result in enumerate(results):
            if lengths[row] > 0:
                rewards[row, int(lengths[row]) - 1] = float(result["reward_score"])
        extra: dict[str, list[Any]] = defaultdict(list)
        for name in dict.fromkeys(name for result in results for name in result.get("reward_extra_info") or {}):
            extra[name] = [(result.get("reward_extra_info") or {}).get(name) for result in results]
        return {"reward_tensor": rewards, "reward_extra_info": dict(extra)} if return_dict else rewards

    async def _run_all(self, data: DataProto) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self.run_single(data[i : i + 1]) for i in range(len(data))))


RewardLoopManagerBase = RewardManagerBase


def migrate_legacy_reward_impl(config: Any) -> Any:
    """`config` itself: old and new spellings of rewards are both read."""
    return config


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
