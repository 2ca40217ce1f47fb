"""Which keys would make a run fit a device, found by trying them on the estimate in the order of what they cost."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quadriga.config.memory import GENERATE, USABLE, estimate_memory
from quadriga.config.model_shape import describe
from quadriga.config.needs import need_critic, uses_token_budget
from quadriga.config.parallel import SEQUENCE_KEY, SET_KEY, heads_problem, problems_of_sets
from quadriga.config.placement import placement_of
from quadriga.config.schema import Config
from quadriga.config.typed import get_key, set_key

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
USEFUL_TOKENS = 4096
"""Smaller micro-batches keep no accelerator busy."""
SMALL_CACHE = 0.25
"""Of the free memory, for the engine's cache: sequences wait for each other then."""
MORE_NODES = (2, 4, 8, 16)


@dataclass
class Savings:
    """Keys that help, as `key=value`, and what comes of them.

    Attributes:
        fits: whether the run fits with them.
        peak: the phase with the most memory then, and how much that is.
        nodes: so many nodes of the same kind would do without them; 0: none that was tried.
    """

    keys: list[str] = field(default_factory=list)
    fits: bool = False
    peak: tuple[str, int] = ("", 0)
    nodes: int = 0


def savings(config: Config, device: str, capacity: int) -> Savings:
    """The first keys that together make every worker fit, or all that help where even they do not suffice."""

    def missing(tried: Config) -> dict[str, int]:
        """Bytes that are not there, by phase."""
        usable = int(USABLE * capacity)
        over: dict[str, int] = {}
        for memory in estimate_memory(tried, device, capacity):
            for phase in {phase for item in memory.items for phase in item.phases}:
                over[phase] = max(over.get(phase, 0), memory.in_phase(phase) - usable)
        return over

    chosen: dict[str, Any] = {}
    tried = copy.deepcopy(config)
    left = sum(missing(tried).values())
    if left == 0:
        return Savings(fits=True, peak=_peak(tried, device, capacity))
    for key, value in _cheapest_first(config, lambda: missing(tried)[GENERATE] > 0):
        if left == 0:
            break
        before = get_key(tried, key)
        set_key(tried, key, value)
        if (now := sum(missing(tried).values())) < left:
            left, chosen[key] = now, value
        else:
            set_key(tried, key, before)
    for key in list(reversed(chosen)) if left == 0 else []:  # the dearest first: what came before may do without it
        value = chosen[key]
        set_key(tried, key, get_key(config, key))
        if sum(missing(tried).values()) == 0:
            del chosen[key]
        else:
            set_key(tried, key, value)
    keys = [f"{key}={value}" for key, value in chosen.items()]
    return Savings(keys, left == 0, _peak(tried, device, capacity), _enough_nodes(config, missing))


def _cheapest_first(config: Config, generation_is_short: Any) -> Iterator[tuple[str, Any]]:
    """Keys that save memory: first those that cost time alone and little of it, last those that train something else.

    Args:
        generation_is_short: whether it still lacks memory to generate, when it is asked.
    """
    sections = [ACTOR, *["critic"] * need_critic(config)]
    yield "actor_rollout_ref.ref.fsdp_config.param_offload", True
    yield "actor_rollout_ref.model.enable_gradient_checkpointing", True
    if need_critic(config):
        yield "critic.model.enable_gradient_checkpointing", True
    for section in sections:
        update = get_key(config, section)
        if uses_token_budget(update):
            longest = config.data.max_prompt_length + config.data.max_response_length
            sharing = update.ulysses_sequence_parallel_size
            yield f"{section}.ppo_max_token_len_per_gpu", max(USEFUL_TOKENS, -(-longest // sharing))
    if generation_is_short():
        yield (
            f"{ROLLOUT}.gpu_memory_utilization",
            min(config.actor_rollout_ref.rollout.gpu_memory_utilization, SMALL_CACHE),
        )
        for size in _set_sizes(config):
            if generation_is_short():
                yield SET_KEY, size
    for section in sections:
        for size in _sequence_sizes(config, section):
            yield f"{section}.{SEQUENCE_KEY}", size
    for section in sections:
        yield f"{section}.fsdp_config.optimizer_offload", True
    for section in sections:
        yield f"{section}.fsdp_config.grad_dtype", "bfloat16"
    for section in sections:
        yield f"{section}.optim.name", "adamw_8bit"
    for section in sections:
        yield f"{section}.fsdp_config.param_offload", True
    yield "actor_rollout_ref.model.lora_rank", 32


def _set_sizes(config: Config) -> list[int]:
    """Sizes of sets of slots that could generate together, above the present one."""
    tried = copy.deepcopy(config)
    placement, rollout = placement_of(config), tried.actor_rollout_ref.rollout
    first, most = rollout.tensor_model_parallel_size, max(placement.pools[placement.role_pool[placement.generator]])
    sizes = []
    for size in (n for n in (2, 4, 8, 16) if first < n <= most):
        rollout.tensor_model_parallel_size = size
        if not list(problems_of_sets(tried)):
            sizes.append(size)
    return sizes


def _sequence_sizes(config: Config, section: str) -> list[int]:
    """Numbers of workers that could share the sequences of a section, above the present one."""
    role, model = (
        ("critic", config.critic.model) if section == "critic" else ("actor_rollout", config.actor_rollout_ref.model)
    )
    described = describe(model.path)
    heads: int = described.get("num_attention_heads") or 0
    workers, first = placement_of(config).slots(role), get_key(config, f"{section}.{SEQUENCE_KEY}")
    return [
        size
        for size in (2, 4, 8, 16)
        if first < size and workers % size == 0 and heads
        if heads_problem(size, heads, described.get("num_key_value_heads") or heads) is None
    ]


def _enough_nodes(config: Config, missing: Any) -> int:
    """How many nodes of the same kind would do, where pools follow `trainer.nnodes`."""
    if not isinstance(config.trainer.placement, str):
        return 0
    for factor in MORE_NODES:
        tried = copy.deepcopy(config)
        tried.trainer.nnodes = config.trainer.nnodes * factor
        if sum(missing(tried).values()) == 0:
            return tried.trainer.nnodes
    return 0


def _peak(config: Config, device: str, capacity: int) -> tuple[str, int]:
    return max((memory.peak for memory in estimate_memory(config, device, capacity)), key=lambda peak: peak[1])
