"""Which keys would make a run fit a device, found by trying them on the estimate in the order of what they cost."""

from __future__ import annotations

import copy
from typing import Any

from quadriga.config.memory import USABLE, estimate_memory
from quadriga.config.needs import need_critic, uses_token_budget
from quadriga.config.schema import Config

ACTOR = "actor_rollout_ref.actor"
USEFUL_TOKENS = 4096
"""Smaller micro-batches keep no accelerator busy."""


def savings(config: Config, device: str, capacity: int) -> list[str]:
    """`key=value` of the first keys that together make every worker fit; all that help, where even they do not suffice.

    Empty if the run fits, or helps nothing.
    """
    tried, chosen = copy.deepcopy(config), list[str]()
    peak = _peak(tried, device, capacity)
    for key, value in _cheapest_first(config):
        if peak <= USABLE * capacity:
            break
        section, _, name = key.rpartition(".")
        before = getattr(_section(tried, section), name)
        setattr(_section(tried, section), name, value)
        if (now := _peak(tried, device, capacity)) < peak:
            peak = now
            chosen.append(f"{key}={value}")
        else:
            setattr(_section(tried, section), name, before)
    return chosen


def _cheapest_first(config: Config) -> list[tuple[str, Any]]:
    """Keys that save memory: first those that cost time alone and little of it, last those that train something else."""
    sections = [ACTOR, *["critic"] * need_critic(config)]
    keys: list[tuple[str, Any]] = [("actor_rollout_ref.ref.fsdp_config.param_offload", True)]
    keys.append(("actor_rollout_ref.model.enable_gradient_checkpointing", True))
    if need_critic(config):
        keys.append(("critic.model.enable_gradient_checkpointing", True))
    for section in sections:
        update = _section(config, section)
        if uses_token_budget(update):
            longest = config.data.max_prompt_length + config.data.max_response_length
            sharing = update.ulysses_sequence_parallel_size
            keys.append((f"{section}.ppo_max_token_len_per_gpu", max(USEFUL_TOKENS, -(-longest // sharing))))
    keys += [(f"{section}.fsdp_config.optimizer_offload", True) for section in sections]
    keys += [(f"{section}.fsdp_config.grad_dtype", "bfloat16") for section in sections]
    keys += [(f"{section}.optim.name", "adamw_8bit") for section in sections]
    keys += [(f"{section}.fsdp_config.param_offload", True) for section in sections]
    keys.append(("actor_rollout_ref.model.lora_rank", 32))
    return keys


def _section(config: Config, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _peak(config: Config, device: str, capacity: int) -> int:
    return max((memory.peak[1] for memory in estimate_memory(config, device, capacity)), default=0)
