"""What workers on accelerators keep in the memory of their node, and whether the node has that much.

Counted is what must be there, no more: what is offloaded, a checkpoint while it is written, weights on their way to engines in
another pool, and a process's libraries. Pinned memory may take up to twice its contents, so a run that just fits may still be
too large; `quadriga plan` shows both.
"""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.config.memory import WorkerMemory, optimiser_bytes, shape_of, shards_of
from quadriga.config.model_shape import ModelShape
from quadriga.config.needs import need_critic
from quadriga.config.placement import ACTOR, CRITIC, REFERENCE, placement_of
from quadriga.config.schema import Config
from quadriga.errors import ResourceError

PROCESS = 2 << 30
"""Bytes of a worker without a model: torch, the device's runtime and its libraries."""
COMPUTED, TRAINED = 2, 4
"""Bytes of a weight that is computed with, and of one that is trained."""


@dataclass(frozen=True)
class HostItem:
    """What the workers of a role keep in host memory.

    Attributes:
        each: bytes of every worker.
        first: bytes more of the first one.
        pinned: it may take up to twice as much.
        saves: the key that it hangs on, with the value that saves it.
    """

    role: str
    what: str
    each: int
    first: int = 0
    pinned: bool = False
    saves: str = ""


def host_items(config: Config, device: str) -> list[HostItem]:
    """What workers keep in host memory beside their devices; nothing on a CPU, whose memory the plan of the device counts."""
    if device == "cpu":
        return []
    placement, policy = placement_of(config), config.actor_rollout_ref
    items = [HostItem(role, "process", PROCESS) for role in placement.role_pool]
    shape = shape_of(policy.model.path, "policy", WorkerMemory(""))
    if shape is not None:
        lora = policy.model.lora_rank
        trained = shape.lora_parameters(lora) if lora else shape.parameters
        section = "actor_rollout_ref.actor"
        items += _learner(config, ACTOR, section, policy.actor, shape, trained, placement.slots(ACTOR))
        if REFERENCE in placement.role_pool and policy.ref.fsdp_config.param_offload:
            shards = shards_of(policy.ref.fsdp_config, placement.slots(REFERENCE))
            key = "actor_rollout_ref.ref.fsdp_config.param_offload=False"
            items.append(HostItem(REFERENCE, "offloaded weights", COMPUTED * shape.parameters // shards, saves=key))
        if placement.generator != ACTOR:
            items.append(HostItem(ACTOR, "weights on their way to the engines", 0, COMPUTED * shape.parameters))
    if need_critic(config) and (shape := shape_of(config.critic.model.path, "critic", WorkerMemory(""))):
        workers = placement.slots(CRITIC)
        items += _learner(config, CRITIC, "critic", config.critic, shape, shape.parameters, workers)
    return items


def _learner(
    config: Config, role: str, section: str, update: object, shape: ModelShape, trained: int, workers: int
) -> list[HostItem]:
    fsdp = update.fsdp_config  # type: ignore[attr-defined]
    shards = shards_of(fsdp, workers)
    frozen = 0 if trained == shape.parameters else shape.parameters
    weights, state = (TRAINED * trained + COMPUTED * frozen) // shards, optimiser_bytes(update, trained, shards)
    items = []
    if fsdp.optimizer_offload:
        key = f"{section}.fsdp_config.optimizer_offload=False"
        items.append(HostItem(role, "offloaded optimiser", state, pinned=True, saves=key))
    if fsdp.param_offload:
        items.append(HostItem(role, "offloaded weights", weights, saves=f"{section}.fsdp_config.param_offload=False"))
    if config.trainer.save_freq > 0:
        whole = TRAINED * shape.parameters if role == ACTOR else 0
        items.append(
            HostItem(role, "checkpoint while it is written", weights + state, whole, saves="trainer.save_freq=-1")
        )
    return items


def require_host_memory(
    items: list[HostItem], workers: dict[str, int], has_first: bool, available: int, where: str
) -> None:
    """ResourceError, with the keys that would save most, if what must be in host memory of a node is more than it has.

    Args:
        workers: how many workers of each role the node has.
        has_first: whether the first of each role is among them.
        available: bytes.
        where: the node's name.
    """
    sizes = {item: item.each * workers.get(item.role, 0) + item.first * has_first for item in items}
    needed = sum(sizes.values())
    if needed <= available:
        return
    largest = sorted((item for item in items if item.saves and sizes[item]), key=lambda item: -sizes[item])
    keys, left = list[str](), needed
    for item in largest:
        if left > available:
            left -= sizes[item]
            keys.append(item.saves)
    parts = ", ".join(f"{item.what} of {item.role} {sizes[item] / 1e9:.0f} GB" for item in largest[:4])
    fix = f"set {' '.join(keys)}" if keys and left <= available else "use more nodes, over which all of it is divided"
    raise ResourceError(
        f"{where} has {available / 1e9:.0f} GB of host memory left, and the workers there need {needed / 1e9:.0f} GB ({parts})",
        f"{fix}, or give each node {needed / 1e9:.0f} GB (pinned memory may take up to twice what lies in it)",
    )
