"""Whether a model can be shared out over `rollout.tensor_model_parallel_size` slots, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quadriga.config.model_shape import describe
from quadriga.config.needs import finishes_samples_first
from quadriga.config.placement import Placement, placement_of
from quadriga.config.schema import Config
from quadriga.config.typed import Problems

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"

STYLES = ("colwise", "rowwise", "packed_colwise", "moe_tp_experts")
"""What `quadriga.rollout.native.sharded` cuts, in the words of transformers."""


def report_tensor_parallel(config: Config, problems: Problems) -> None:
    """Note what makes sets of that size impossible, with the nearest size that is not."""
    if config.actor_rollout_ref.rollout.tensor_model_parallel_size > 1:
        for what, fix in problems_of_sets(config):
            problems.add(what, fix)


def _slots(placement: Placement) -> list[int]:
    return placement.pools[placement.role_pool[placement.generator]]


def problems_of_sets(config: Config) -> Iterator[tuple[str, str]]:
    """What makes sets of `tensor_model_parallel_size` slots impossible, and the fix."""
    rollout = config.actor_rollout_ref.rollout
    size, placement = rollout.tensor_model_parallel_size, placement_of(config)
    model = config.actor_rollout_ref.model
    slots, described = _slots(placement), describe(model.path, model.override_config)
    heads: int = described.get("num_attention_heads") or 0  # 0: not known here
    kv_heads: int = described.get("num_key_value_heads") or heads

    def fits_slots(t: int) -> bool:
        return all(count % t == 0 for count in slots)

    def fits_heads(t: int) -> bool:
        return not heads or (heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0))

    possible = [t for t in range(1, max(slots) + 1) if fits_slots(t) and fits_heads(t)]
    nearest = min(possible, key=lambda t: (abs(t - size), t))
    if not fits_slots(size):
        yield (
            f"{KEY}={size} does not divide the slots of each node of "
            f"{placement.role_pool[placement.generator]}, {slots}: a set never spans two nodes",
            f"set {KEY}={nearest}, or change the number of slots",
        )
    elif not fits_heads(size):
        yield (
            f"{KEY}={size} does not share out {heads} attention heads and {kv_heads} key and value heads of the model at "
            f"{model.path} (key and value heads may be repeated a whole number of times)",
            f"set {KEY}={nearest}",
        )
    if described and (why := unplanned(described.get("model_type"))):
        yield (
            f"{KEY}={size}: models of type {described.get('model_type')} cannot be shared out: {why}",
            f"set {KEY}=1, or use a model with a plan, such as Llama, Mistral, Qwen2, Qwen3, Gemma or Mixtral",
        )
    if config.trainer.device == "npu":
        yield f"{KEY}={size}: sets were made for CPUs and CUDA, and trainer.device=npu", f"set {KEY}=1"
    apart = placement.generator != "actor_rollout"
    if not apart and finishes_samples_first(config):
        yield (
            f"{KEY}={size} with async_training.staleness={config.async_training.staleness}, in order or with "
            "partial_rollout=False: a set that shares its slots with training cannot take weights while it trains",
            "give rollout a pool of its own in trainer.placement, or set async_training.mode=free with partial_rollout",
        )


def unplanned(model_type: Any) -> str:
    """Why models of this type cannot be shared out; empty where they can, or where transformers does not know the type."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return ""  # code of the model's own: the workers see it
    config_class: Any = CONFIG_MAPPING[model_type]
    text_class = (getattr(config_class, "sub_configs", None) or {}).get("text_config", config_class)
    plan = getattr(text_class, "base_model_tp_plan", None)
    if not plan:
        return "transformers has no tensor parallel plan for them"
    unknown = sorted({style for style in plan.values() if style not in STYLES and not style.startswith("replicated")})
    return f"their plan has parts of the kind {', '.join(unknown)}" if unknown else ""
