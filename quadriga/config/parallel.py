"""What the model's shape must allow: workers that share sequences or copies of the weights, sets of slots that generate with one
model, and losses of routers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quadriga.config.model_shape import count_experts, describe
from quadriga.config.needs import finishes_samples_first
from quadriga.config.placement import Placement, placement_of
from quadriga.config.schema import Config
from quadriga.config.typed import Problems

SEQUENCE_KEY = "ulysses_sequence_parallel_size"


def report_parallel(section: str, workers: int, sharing: int, copy: int, path: str, problems: Problems) -> None:
    """Note what does not divide, with the nearest numbers that do.

    Args:
        section: the keys' section.
        sharing, copy: values of the two keys.
        path: the model; its heads are looked at if its folder is here.
    """
    key, size_key = f"{section}.{SEQUENCE_KEY}", f"{section}.fsdp_config.fsdp_size"
    if copy == 0 or (0 < copy < workers and workers % copy):
        problems.add(
            f"{size_key}={copy} does not divide the {workers} workers of {section}",
            f"set it to {_nearest_divisors(workers, copy)}, or -1 for all of them",
        )
    if sharing == 1:
        return
    if workers % sharing:
        problems.add(
            f"{key}={sharing} does not divide the {workers} workers of {section}",
            f"set it to {_nearest_divisors(workers, sharing)}",
        )
        return
    described = describe(path)
    heads: int = described.get("num_attention_heads") or 0  # 0: not known here
    if heads and (problem := heads_problem(sharing, heads, described.get("num_key_value_heads") or heads)):
        problems.add(f"{key}={sharing} {problem[0]}", problem[1])


def heads_problem(size: int, heads: int, key_heads: int) -> tuple[str, str] | None:
    """What is wrong with sharing a model's heads among `size` ranks, and what to do; None if nothing is."""
    if heads_fit(size, heads, key_heads):
        return None
    near = [max((s for s in range(1, size) if heads_fit(s, heads, key_heads)), default=1)]
    near += [s for s in range(size + 1, heads + 1) if heads_fit(s, heads, key_heads)][:1]
    what = f"does not share out {heads} attention heads with {key_heads} heads of keys and values evenly"
    return what, f"set it to {' or '.join(map(str, near))}"


def heads_fit(size: int, heads: int, key_heads: int) -> bool:
    """Whether `size` ranks have equally many heads each; heads of keys and values may be repeated a whole number of times."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    near = [d for d in divisors if d <= wanted][-1:] + [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, near))


AUXILIARY_KEY = "actor_rollout_ref.actor.router_aux_loss_coef"


def report_experts(config: Config, problems: Problems) -> None:
    """Note what is asked of routers that the model, as far as it is on this machine, does not have."""
    model = config.actor_rollout_ref.model
    described = describe(model.path, model.override_config)
    if config.actor_rollout_ref.actor.router_aux_loss_coef and described and not count_experts(described):
        problems.add(*no_routers(model.path))


def no_routers(model: str) -> tuple[str, str]:
    """What is wrong with a loss of the routers of that model, and what to do."""
    return (
        f"{AUXILIARY_KEY} evens the load of experts, and {model} has no router that is known",
        f"leave {AUXILIARY_KEY} at 0, or train a mixture of experts such as Qwen3-MoE, Mixtral or GLM-4-MoE",
    )


SET_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"

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
        return not heads or heads_fit(t, heads, kv_heads)

    possible = [t for t in range(1, max(slots) + 1) if fits_slots(t) and fits_heads(t)]
    nearest = min(possible, key=lambda t: (abs(t - size), t))
    if not fits_slots(size):
        yield (
            f"{SET_KEY}={size} does not divide the slots of each node of "
            f"{placement.role_pool[placement.generator]}, {slots}: a set never spans two nodes",
            f"set {SET_KEY}={nearest}, or change the number of slots",
        )
    elif not fits_heads(size):
        yield (
            f"{SET_KEY}={size} does not share out {heads} attention heads and {kv_heads} key and value heads of the model at "
            f"{model.path} (key and value heads may be repeated a whole number of times)",
            f"set {SET_KEY}={nearest}",
        )
    if described and (why := unplanned(described.get("model_type"))):
        yield (
            f"{SET_KEY}={size}: models of type {described.get('model_type')} cannot be shared out: {why}",
            f"set {SET_KEY}=1, or use a model with a plan, such as Llama, Mistral, Qwen2, Qwen3, Gemma or Mixtral",
        )
    if config.trainer.device == "npu":
        yield f"{SET_KEY}={size}: sets were made for CPUs and CUDA, and trainer.device=npu", f"set {SET_KEY}=1"
    apart = placement.generator != "actor_rollout"
    if not apart and finishes_samples_first(config):
        yield (
            f"{SET_KEY}={size} with async_training.staleness={config.async_training.staleness}, in order or with "
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
