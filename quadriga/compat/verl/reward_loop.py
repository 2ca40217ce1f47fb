"""`verl.experimental.reward_loop`: reward managers that score one sample at a time, and classes of the user's own on top of them."""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from dataclasses import asdict, is_dataclass
from typing import Any

import torch

from quadriga.compat.verl.rewards import get_reward_manager_cls, register
from quadriga.compat.verl.scorers import default_compute_score
from quadriga.protocol import DataProto
from quadriga.rewards.managers.limited import RateLimitedRewardManager

__all__ = ["RateLimitedRewardManager", "get_reward_manager_cls", "register"]


class _FittingCall(type):
    """Calls a class with those of the arguments that its constructor takes: constructors of reward loops differ."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_dataclass(kwargs.get("config")):
            kwargs["config"] = _as_verl_reads(kwargs["config"])
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return super().__call__(*args, **kwargs)
        fitting = {name: value for name, value in kwargs.items() if name in parameters}
        if not args and "config" in parameters:
            fitting.setdefault("config", {})
        return super().__call__(*args, **fitting)


def _as_verl_reads(config: Any) -> Any:
    """A run's configuration as verl's code looks into it: what is said of rewards lies under `reward` too."""
    from omegaconf import OmegaConf

    plain = asdict(config)
    model = plain["reward_model"]
    plain["reward"] |= {
        "custom_reward_function": plain["custom_reward_function"],
        "reward_kwargs": model["reward_kwargs"],
        "reward_manager": {"name": model["reward_manager"]},
        "reward_model": model,
    }
    whole = OmegaConf.create(plain)
    OmegaConf.set_struct(whole, True)
    return whole


class RewardManagerBase(metaclass=_FittingCall):
    """A manager that scores one sample at a time: `async run_single(data)` of one row gives `reward_score` and
    `reward_extra_info`. Called with a batch, all its rows are scored at the same time, in this process."""

    wants_config = True
    """Whether a run gives its configuration to the constructor."""

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        compute_score: Any = None,
        num_examine: int = 0,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.compute_score: Any = compute_score or default_compute_score
        self.num_examine, self.reward_fn_key = num_examine, reward_fn_key
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Hook of verl's for state that all objects of a class share."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that `run_single` runs in."""
        return asyncio.get_running_loop()

    @loop.setter
    def loop(self, loop: Any) -> None:
        """Constructors written for verl keep the loop that they find; batches are scored in one of their own."""

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


class NaiveRewardManager(RewardManagerBase):
    """What `naive` does, by the sample: for classes of the user's own that change what comes of it."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: Any = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        row = data[len(data) - 1]
        columns, responses = row.non_tensor_batch, row.batch["responses"]
        length = int(row.batch["attention_mask"][-len(responses) :].sum())
        extra = dict(columns.get("extra_info") or {})
        extra["num_turns"] = columns.get("__num_turns__")
        extra["rollout_reward_scores"] = columns.get("reward_scores", {})
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(responses[:length], skip_special_tokens=True)
        )
        given = {
            "data_source": columns["data_source"],
            "solution_str": text,
            "ground_truth": columns["reward_model"]["ground_truth"],
            "extra_info": extra,
        }
        if self.is_async_reward_score:
            result = await self.compute_score(**given)
        else:
            result = await self.loop.run_in_executor(None, lambda: self.compute_score(**given))
        if not isinstance(result, dict):
            return {"reward_score": result, "reward_extra_info": {"acc": result}}
        return {"reward_score": result["score"], "reward_extra_info": dict(result)}


class DAPORewardManager(NaiveRewardManager):
    """What `dapo` does, by the sample: naive, less the penalty for the end of the buffer that a response reaches."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None, **kwargs: Any) -> None:
        super().__init__(config, tokenizer, compute_score, **kwargs)
        options = config.reward.get("reward_kwargs", {})
        self.overlong_buffer_cfg = options.get("overlong_buffer_cfg")
        self.max_resp_len = options.get("max_resp_len")

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        told = await super().run_single(data)
        buffer = self.overlong_buffer_cfg
        if buffer is None or not buffer["enable"]:
            return told
        batch = data.batch
        length = int(batch["attention_mask"][-1, -batch["responses"].shape[1] :].sum())
        into_buffer = length - (self.max_resp_len - buffer["len"])
        penalty = min(-into_buffer / buffer["len"] * buffer["penalty_factor"], 0)
        if buffer.get("log"):
            told["reward_extra_info"] |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return told | {"reward_score": told["reward_score"] + penalty}


RemoteRewardManager = GDPORewardManager = NaiveRewardManager
"""Scoring runs in parallel processes anyway, and keeps all that the function tells."""
NaiveRewardLoopManager, DAPORewardLoopManager = NaiveRewardManager, DAPORewardManager
get_reward_loop_manager_cls = get_reward_manager_cls
"""Names of late 2025."""


def migrate_legacy_reward_impl(config: Any) -> Any:
    """`config` itself: old and new spellings of rewards are both read."""
    return config
