"""Estimate of the memory of one worker: what lies there in each phase of a step, and how much at most.

Assumptions, in bytes per value: weights that are trained 4, frozen ones, computing and KV cache 2 on an accelerator, 4 on a
CPU; gradients 4 or 2 (`fsdp_config.grad_dtype`); the optimiser by its name. Weights, gradients and optimiser are sharded over
the workers, or over `fsdp_size` of them. Activations are those of a decoder with packed sequences and attention that keeps
no score matrix. Allocator slack, CUDA context and the framework itself (about 1 to 2 GB on a GPU) come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from quadriga.config.distillation import teachers_of
from quadriga.config.model_shape import ModelShape, find_model_folder, read_model_shape
from quadriga.config.needs import (
    token_budget,
    uses_token_budget,
)
from quadriga.config.placement import TEACHER, placement_of
from quadriga.config.schema import Config

GENERATE, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = PHASES = ("generate", "score", "update critic", "update actor")
"""Score: log-probs of actor, reference and teachers, values, reward model."""

LM_HEAD_CHUNK = 1024
"""Rows of logits that exist at a time on an accelerator; on a CPU so many that they take 8 MB."""
OPTIMISER_BYTES = {"adamw": 8, "adamw_8bit": 2.03, "adamw_bf16": 4, "muon": 4}
"""A weight. Muon keeps AdamW's 8 for embeddings and head, which counts little in a large model."""
OFFLOADED_BUCKETS = 3 * (64 << 20)
"""Weights whose offloaded optimiser state is on the device at once."""
USABLE = 0.92
"""Part of a device that tensors can have; the rest is its runtime, the libraries and the allocator's gaps."""
AUTO = "auto"


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


def estimate_memory(config: Config, device: str, capacity: int | None = None) -> list[WorkerMemory]:
    """Memory of a worker of each pool.

    Args:
        capacity: bytes of a worker's device; activations are recomputed where `enable_gradient_checkpointing=auto` finds
            that all would not fit. Unknown: they are kept.
    """
    config = with_checkpointing(config, device, capacity)
    placement = placement_of(config)
    homes = {name: WorkerMemory(name) for name in placement.pools}
    policy, estimate = config.actor_rollout_ref, _Estimate(config, device)
    home, workers = homes[placement.role_pool["actor_rollout"]], placement.slots("actor_rollout")
    if shape := _shape(policy.model.path, "policy", home):
        trained = shape.lora_parameters(policy.model.lora_rank) if policy.model.lora_rank else shape.parameters
        home.items += estimate.trained_model("actor", shape, trained, workers, policy.actor, policy.model, UPDATE_ACTOR)
        apart = placement.generator != "actor_rollout"
        rollout_home = homes[placement.role_pool[placement.generator]]
        rollout_home.items += estimate.rollout(shape, placement.slots(placement.generator), apart)
        if "ref" in placement.role_pool:
            fsdp = policy.ref.fsdp_config
            phases = (SCORE,) if fsdp.param_offload and device != "cpu" else PHASES
            ref_home, shards = homes[placement.role_pool["ref"]], shards_of(fsdp, placement.slots("ref"))
            ref_home.items += estimate.frozen_model("reference", shape, shards, phases)
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
    if TEACHER in placement.role_pool:
        home = homes[placement.role_pool[TEACHER]]
        for teacher in teachers_of(config):
            if teacher.is_local and (shape := _shape(teacher.model_path, f"teacher {teacher.name}", home)):
                role = f"teacher {teacher.name}"
                home.items += estimate.frozen_model(role, shape, placement.slots(TEACHER), PHASES)
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


def with_checkpointing(config: Config, device: str, capacity: int | None) -> Config:
    """The configuration with `enable_gradient_checkpointing=auto` decided, for actor and critic: yes where the estimate says
    that activations would not fit into `capacity` bytes without it."""
    policy, critic = config.actor_rollout_ref, config.critic
    if AUTO not in (policy.model.enable_gradient_checkpointing, critic.model.enable_gradient_checkpointing):
        return config

    def chosen(recompute: bool) -> Config:
        def decided(model: Any) -> Any:
            auto = model.enable_gradient_checkpointing == AUTO
            return replace(model, enable_gradient_checkpointing=recompute) if auto else model

        return replace(
            config,
            actor_rollout_ref=replace(policy, model=decided(policy.model)),
            critic=replace(critic, model=decided(critic.model)),
        )

    without = chosen(False)
    if capacity is None:
        return without
    updates = [m.in_phase(phase) for m in estimate_memory(without, device) for phase in (UPDATE_CRITIC, UPDATE_ACTOR)]
    too_large = any(size > USABLE * capacity for size in updates)
    return chosen(True) if too_large else without


def shards_of(fsdp: Any, workers: int) -> int:
    """Over how many workers a model's weights are sharded."""
    return fsdp.fsdp_size if 0 < fsdp.fsdp_size < workers else workers


class _Estimate:
    def __init__(self, config: Config, device: str) -> None:
        self.config, self.on_cpu = config, device == "cpu"
        self.compute = 4 if self.on_cpu else 2
        self.longest = config.data.max_prompt_length + config.data.max_response_length

    def trained_model(
        self, role: str, shape: ModelShape, trained: int, workers: int, section: Any, model: Any, update: str
    ) -> list[MemoryItem]:
        fsdp, shards = section.fsdp_config, shards_of(section.fsdp_config, workers)
        at_work = (SCORE, update)
        weights = PHASES if self.on_cpu or not fsdp.param_offload else at_work
        checkpointing = model.enable_gradient_checkpointing is True
        frozen = 0 if trained == shape.parameters else shape.parameters
        optimiser: tuple[str, ...] = PHASES
        state = int(OPTIMISER_BYTES[section.optim.name] * trained) // shards
        if fsdp.optimizer_offload and not self.on_cpu:
            each = int(OPTIMISER_BYTES[section.optim.name] * OFFLOADED_BUCKETS) // shards
            optimiser, state = (update,), min(state, each)
        gradients = (2 if fsdp.grad_dtype == "bfloat16" else 4) * trained // shards
        # The head's gradient over the whole vocabulary is float32 until it is added to the rest.
        head = 0 if role != "actor" or frozen else 4 * shape.vocab * shape.hidden
        logits = 0 if role != "actor" else self._logits(shape)  # a critic has one output
        return [
            MemoryItem(role, "weights", (4 * trained + self.compute * frozen) // shards, weights),
            MemoryItem(role, "gradients", gradients, (update,)),
            MemoryItem(role, "optimiser", state, optimiser),
            MemoryItem(
                role, "gathered weights", self._gathered(shape, workers, not fsdp.reshard_after_forward), at_work
            ),
            MemoryItem(role, "activations", self._activations(shape, section, workers, checkpointing), (update,)),
            MemoryItem(role, "logits", logits, at_work),
            MemoryItem(role, "gradient of the head", head, (update,)),
        ]

    def _logits(self, shape: ModelShape) -> int:
        return 2 * (8 << 20) if self.on_cpu else 2 * 4 * LM_HEAD_CHUNK * shape.vocab

    def frozen_model(self, role: str, shape: ModelShape, workers: int, phases: tuple[str, ...]) -> list[MemoryItem]:
        return [
            MemoryItem(role, "weights", self.compute * shape.parameters // workers, phases),
            MemoryItem(role, "gathered weights", self._gathered(shape, workers, False), (SCORE,)),
        ]

    def rollout(self, shape: ModelShape, workers: int, apart: bool) -> list[MemoryItem]:
        rollout = self.config.actor_rollout_ref.rollout
        phases = (GENERATE,) if rollout.free_cache_engine else PHASES
        members = rollout.tensor_model_parallel_size
        rows = min(rollout.max_num_seqs, self.config.data.train_batch_size * rollout.n * members // workers)
        # float32 on one CPU worker: the very same tensors as the actor's
        shares_weights = workers == 1 and self.compute == 4 and not apart
        weights = 0 if shares_weights else self.compute * shape.parameters // members
        cache = 2 * self.compute * shape.layers * shape.kv_width * rows * self.longest // members
        return [
            MemoryItem("rollout", "weights", weights, phases),
            MemoryItem("rollout", "KV cache", cache, phases),
        ]

    def _gathered(self, shape: ModelShape, workers: int, all_layers: bool) -> int:
        """The layer at work and the next one, or all of them, with embeddings and head, in the compute type."""
        if workers == 1 and self.on_cpu:
            return 0
        rest = max(0, shape.parameters - shape.layers * shape.layer_parameters)
        return self.compute * (rest + shape.layer_parameters * (shape.layers if all_layers else min(2, shape.layers)))

    def _activations(self, shape: ModelShape, section: Any, workers: int, checkpointing: bool) -> int:
        rows = section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // workers
        if uses_token_budget(section):
            tokens = min(token_budget(section.ppo_max_token_len_per_gpu), rows * self.longest)
        else:
            tokens = section.ppo_micro_batch_size_per_gpu * self.longest // section.ulysses_sequence_parallel_size
        # Kept for the backward pass: what norms read and give, queries, keys, values, attention's output, three in the MLP.
        layer = 4 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + 3 * shape.ffn
        kept = shape.layers * shape.hidden + layer if checkpointing else shape.layers * layer
        return self.compute * tokens * kept
