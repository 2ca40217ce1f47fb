"""What `trainer.deterministic=exact` can be had with: everything else is refused, all at once, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator

from quadriga.config.model_shape import find_model_folder
from quadriga.config.placement import placement_of
from quadriga.config.schema import Config
from quadriga.config.typed import Problems

EXACT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the models whose every operation is known to give the same bits for a row in any batch."""


def report_exactness(config: Config, problems: Problems) -> None:
    """Note every setting under which the promise of `exact` does not hold."""
    if config.trainer.deterministic != "exact":
        return
    for what, fix in _not_exact(config):
        problems.add(f"trainer.deterministic=exact does not hold: {what}", fix)


def _not_exact(config: Config) -> Iterator[tuple[str, str]]:
    policy, trainer = config.actor_rollout_ref, config.trainer
    if trainer.device in ("cpu", "npu"):
        yield (
            f"it is for CUDA, and trainer.device={trainer.device}",
            "remove trainer.deterministic: on a CPU a sample never depends on its neighbours and resuming is bit-equal anyway",
        )
    slots = sum(sum(sizes) for sizes in placement_of(config).pools.values())
    if slots > 1:
        yield (
            f"{slots} slots add gradients up in an order that is not ours",
            "set trainer.nnodes=1, trainer.n_gpus_per_node=1 and no pools of their own",
        )
    if policy.model.lora_rank > 0:
        yield (
            f"with actor_rollout_ref.model.lora_rank={policy.model.lora_rank} generation merges the adapter into the weights, "
            "which rounds them differently",
            "set actor_rollout_ref.model.lora_rank=0",
        )
    if policy.rollout.name != "native":
        yield (
            f"actor_rollout_ref.rollout.name={policy.rollout.name} computes with kernels of its own",
            "set actor_rollout_ref.rollout.name=native",
        )
    if policy.rollout.top_p < 1 or policy.rollout.top_k > 0:
        yield (
            f"actor_rollout_ref.rollout.top_p={policy.rollout.top_p}, top_k={policy.rollout.top_k} sample from another "
            "distribution than the one that is trained",
            "set actor_rollout_ref.rollout.top_p=1.0 and actor_rollout_ref.rollout.top_k=-1",
        )
    if random := [key for key, value in policy.model.override_config.items() if "dropout" in key and value]:
        yield (
            f"{', '.join(random)} drops activations at random",
            "remove it from actor_rollout_ref.model.override_config",
        )
    family = _family(policy.model.path)
    if family is not None and family not in EXACT_FAMILIES:
        yield (
            f"the model at {policy.model.path} is of the family {family}",
            f"use one of {', '.join(EXACT_FAMILIES)}, or trainer.deterministic=fast",
        )


def _family(path: str) -> str | None:
    """`model_type` of a model that lies on this machine; None: not known here (the worker looks again)."""
    folder = find_model_folder(path)
    if folder is None:
        return None
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type"))
    except (OSError, ValueError):
        return None  # whoever loads the model says what is wrong with it
