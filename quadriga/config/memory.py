"""Estimate of the memory of one worker: what lies there in each phase of a step, and how much at most.

Assumptions, in bytes per value: master weights and gradients 4, AdamW 8, all sharded over the workers; compute and KV
cache 2 on an accelerator, 4 on a CPU. Activations are those of a decoder with packed sequences and attention that keeps
no score matrix. Allocator slack, CUDA context and the framework itself (about 1 to 2 GB on a GPU) come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quadriga.config.model_shape import ModelShape, find_model_folder, read_model_shape
from quadriga.config.needs import (
    token_budget,
    uses_token_budget,
)
from quadriga.config.placement import placement_of
from quadriga.config.schema import Config

GENERATE, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = PHASES = ("generate", "score", "update critic", "update actor")
"""Score: log-probs of actor and reference, values, reward model."""

LM_HEAD_CHUNK = 1024
"""Rows of logits that exist at a time."""


@dataclass(frozen=True)
class MemoryItem:
    """`size` bytes that lie in a worker during `phases`."""

    role: str
    what: str
    size: int
    phases: tuple[str, ...]


@dataclass
class WorkerMemory:
    """Memory of each worker of one pool; `unknown` says which models could not be counted, and why."""

    pool: str
    items: list[MemoryItem] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def in_phase(self, phase: str) -> int:
        return sum(item.size for item in self.items if phase in item.phases)

    @property
    def peak(self) -> tuple[str, int]:
        """The phase with the most memory, and how much that is."""
        return max(((phase, self.in_phase(phase)) for phase in PHASES), key=lambda pair: pair[1])


def estimate_memory(config: Config, device: str) -> list[WorkerMemory]:
    """Memory of a worker of each pool."""
    placement = placement_of(config)
    homes = {name: WorkerMemory(name) for name in placement.pools}
    policy, estimate = config.actor_rollout_ref, _Estimate(config, 4 if device == "cpu" else 2)
    home, workers = homes[placement.role_pool["actor_rollout"]], placement.slots("actor_rollout")
    if shape := _shape(policy.model.path, "policy", home):
        trained = shape.lora_parameters(policy.model.lora_rank) if policy.model.lora_rank else shape.parameters
        home.items += estimate.trained_model("actor", shape, trained, workers, policy.actor, policy.model, UPDATE_ACTOR)
        apart = placement.generator != "actor_rollout"
        rollout_home = homes[placement.role_pool[placement.generator]]
        rollout_home.items += estimate.rollout(shape, placement.slots(placement.generator), apart)
        if "ref" in placement.role_pool:
            phases = (SCORE,) if policy.ref.fsdp_config.param_offload else PHASES
            ref_home = homes[placement.role_pool["ref"]]
            ref_home.items += estimate.frozen_model("reference", shape, placement.slots("ref"), phases)
    if "critic" in placement.role_pool:
        home, workers = homes[placement.role_pool["critic"]], placement.slots("critic")
        if shape := _shape(config.critic.model.path, "critic", home):
            home.items += estimate.trained_model(
                "critic", shape, shape.parameters, workers, config.critic, config.critic.model, UPDATE_CRITIC
            )
    if "rm" in placement.role_pool:
        home = homes[placement.role_pool["rm"]]
        if shape := _shape(config.reward_model.model.path, "reward model", home):
            home.items += estimate.frozen_model("reward model", shape, placement.slots("rm"), PHASES)
    return list(homes.values())


def _shape(path: str, role: str, memory: WorkerMemory) -> ModelShape | None:
    folder = find_model_folder(path)
    if folder is None:
        memory.unknown.append(f"{role}: unknown, the model folder of {path} is not local")
        return None
    try:
        return read_model_shape(folder)
    except ValueError as error:
        memory.unknown.append(f"{role}: unknown, {error}")
        return None


class _Estimate:
    def __init__(self, config: Config, compute_bytes: int) -> None:
        self.config, self.compute = config, compute_bytes
        self.longest = config.data.max_prompt_length + config.data.max_response_length

    def trained_model(
        self, role: str, shape: ModelShape, trained: int, workers: int, section: Any, model: Any, update: str
    ) -> list[MemoryItem]:
        fsdp = section.fsdp_config
        at_work = (SCORE, update)
        weights = PHASES if not fsdp.param_offload else at_work
        optimiser = PHASES if not fsdp.optimizer_offload else (update,)
        checkpointing = model.enable_gradient_checkpointing
        logits = 2 * 4 * LM_HEAD_CHUNK * shape.vocab if role == "actor" else 0  # a critic has one output
        return [
            MemoryItem(role, "weights", 4 * shape.parameters // workers, weights),
            MemoryItem(role, "gradients", 4 * trained // workers, (update,)),
            MemoryItem(role, "optimiser", 8 * trained // workers, optimiser),
            MemoryItem(
                role, "gathered weights", self._gathered(shape, workers, not fsdp.reshard_after_forward), at_work
            ),
            MemoryItem(role, "activations", self._activations(shape, section, workers, checkpointing), (update,)),
            MemoryItem(role, "logits", logits, at_work),
        ]

    def frozen_model(self, role: str, shape: ModelShape, workers: int, phases: tuple[str, ...]) -> list[MemoryItem]:
        return [
            MemoryItem(role, "weights", self.compute * shape.parameters // workers, phases),
            MemoryItem(role, "gathered weights", self._gathered(shape, workers, False), (SCORE,)),
        ]

    def rollout(self, shape: ModelShape, workers: int, apart: bool) -> list[MemoryItem]:
        rollout = self.config.actor_rollout_ref.rollout
        phases = (GENERATE,) if rollout.free_cache_engine else PHASES
        rows = min(rollout.max_num_seqs, self.config.data.train_batch_size * rollout.n // workers)
        # float32 on one CPU worker: the very same tensors as the actor's
        shares_weights = workers == 1 and self.compute == 4 and not apart
        return [
            MemoryItem("rollout", "weights", 0 if shares_weights else self.compute * shape.parameters, phases),
            MemoryItem(
                "rollout", "KV cache", 2 * self.compute * shape.layers * shape.kv_width * rows * self.longest, phases
            ),
        ]

    def _gathered(self, shape: ModelShape, workers: int, all_layers: bool) -> int:
        """The layer at work and the next one, or all of them, in the compute type."""
        if workers == 1 and self.compute == 4:
            return 0
        layer = self.compute * shape.layer_parameters
        return layer * (shape.layers if all_layers else min(2, shape.layers))

    def _activations(self, shape: ModelShape, section: Any, workers: int, checkpointing: bool) -> int:
        rows = section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // workers
        if uses_token_budget(section):
            tokens = min(token_budget(section.ppo_max_token_len_per_gpu), rows * self.longest)
        else:
            tokens = section.ppo_micro_batch_size_per_gpu * self.longest
        # Kept for the backward pass: norms and residuals, queries, keys, values, attention output, four in the MLP.
        layer = 6 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + 4 * shape.ffn
        kept = shape.layers * shape.hidden + layer if checkpointing else shape.layers * layer
        return self.compute * tokens * kept
