"""Estimate of the memory of one worker: what lies there in each phase of a step, and how much at most.

Assumptions, in bytes per value: weights that are trained 4, frozen ones, computing and KV cache 2 on an accelerator, 4 on a
CPU; gradients 4 or 2 (`fsdp_config.grad_dtype`); the optimiser by its name. Weights, gradients and optimiser are sharded over
the workers, or over `fsdp_size` of them. Activations are those of a decoder with packed sequences and attention that keeps
no score matrix; of a mixture of experts, those of the experts that a token goes through. Allocator slack, CUDA context and the
framework itself (about 1 to 2 GB on a GPU) come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from quadriga.config.distillation import teachers_of
from quadriga.config.model_shape import ModelShape, find_model_folder, read_model_shape
from quadriga.config.needs import token_budget, uses_token_budget
from quadriga.config.placement import TEACHER, placement_of
from quadriga.config.schema import Config

GENERATE, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = PHASES = ("generate", "score", "update critic", "update actor")
"""Score: log-probs of actor, reference and teachers, values, reward model."""

LM_HEAD_CHUNK = 1024
"""Rows of logits that exist at a time on an accelerator; on a CPU so many that they take 8 MB."""
OPTIMISER_BYTES = {"adamw": 8, "adamw_8bit": 2.03, "adamw_bf16": 4, "muon": 4}
"""A weight. Muon keeps AdamW's 8 for embeddings and head, which counts little in a large model."""
BUCKET = 64 << 20
"""Weights of a bucket of an offloaded optimiser, of which three are on the device at once. A larger tensor is one by itself."""
CACHE_BLOCK = 32
"""Tokens of a block of the KV cache."""
PROGRAM_FAMILIES, PROGRAM_WEIGHTS = ("llama", "mistral", "qwen2", "qwen3"), 1 << 29
"""What a CPU generates with from a packed second copy of the weights: models of these families, of at most so many weights."""
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
    note: str = ""
    held: int = 0
    """Of a KV cache that is smaller than is wanted: sequences that it holds."""


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
            that all would not fit, and the KV cache is what the engine takes there. Unknown: they are kept, and it is as
            large as is wanted.
    """
    config = with_checkpointing(config, device, capacity)
    placement = placement_of(config)
    homes = {name: WorkerMemory(name) for name in placement.pools}
    policy, estimate = config.actor_rollout_ref, _Estimate(config, device)
    home, workers = homes[placement.role_pool["actor_rollout"]], placement.slots("actor_rollout")
    policy_shape = shape_of(policy.model.path, "policy", home)
    if shape := policy_shape:
        trained = shape.lora_parameters(policy.model.lora_rank) if policy.model.lora_rank else shape.parameters
        home.items += estimate.trained_model("actor", shape, trained, workers, policy.actor, policy.model, UPDATE_ACTOR)
        if "ref" in placement.role_pool:
            fsdp = policy.ref.fsdp_config
            phases = (SCORE,) if fsdp.param_offload and device != "cpu" else PHASES
            ref_home, shards = homes[placement.role_pool["ref"]], shards_of(fsdp, placement.slots("ref"))
            ref_home.items += estimate.frozen_model("reference", shape, shards, phases)
    if "critic" in placement.role_pool:
        home, workers = homes[placement.role_pool["critic"]], placement.slots("critic")
        if shape := shape_of(config.critic.model.path, "critic", home):
            home.items += estimate.trained_model(
                "critic", shape, shape.parameters, workers, config.critic, config.critic.model, UPDATE_CRITIC
            )
    if "rm" in placement.role_pool:
        home = homes[placement.role_pool["rm"]]
        if shape := shape_of(config.reward_model.model.path, "reward model", home):
            home.items += estimate.frozen_model("reward model", shape, placement.slots("rm"), PHASES)
    if TEACHER in placement.role_pool:
        home = homes[placement.role_pool[TEACHER]]
        for teacher in teachers_of(config):
            if teacher.is_local and (shape := shape_of(teacher.model_path, f"teacher {teacher.name}", home)):
                role = f"teacher {teacher.name}"
                home.items += estimate.frozen_model(role, shape, placement.slots(TEACHER), PHASES)
    if shape := policy_shape:  # last: the cache takes a share of what the others leave
        home = homes[placement.role_pool[placement.generator]]
        apart, workers = placement.generator != "actor_rollout", placement.slots(placement.generator)
        estimate.add_rollout(home, shape, workers, apart, capacity)
    return list(homes.values())


def shape_of(path: str, role: str, memory: WorkerMemory) -> ModelShape | None:
    """The shape of the model at `path`; None, and a word about it in `memory.unknown`, where it cannot be told here."""
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


def optimiser_bytes(section: Any, trained: int, shards: int) -> int:
    """The state of `section.optim` on one worker, wherever it lies."""
    return int(OPTIMISER_BYTES[section.optim.name] * trained) // shards


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
        state = optimiser_bytes(section, trained, shards)
        if fsdp.optimizer_offload and not self.on_cpu:
            optimiser, state = (update,), min(state, optimiser_bytes(section, _on_device(shape), shards))
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

    def add_rollout(
        self, home: WorkerMemory, shape: ModelShape, workers: int, apart: bool, capacity: int | None
    ) -> None:
        """The engine's weights and its cache. Its weights stay where they are while it rests; vLLM's leave the device."""
        rollout = self.config.actor_rollout_ref.rollout
        members, foreign = rollout.tensor_model_parallel_size, rollout.name != "native"
        rests = rollout.free_cache_engine and not self.on_cpu
        cache = (GENERATE,) if rests else PHASES
        weights = (GENERATE,) if rests and foreign else PHASES
        # float32 on one CPU worker: the very same tensors as the actor's
        shares_weights = workers == 1 and self.on_cpu and not apart and not foreign
        own = 0 if shares_weights else self.compute * shape.parameters // members
        home.items.append(MemoryItem("rollout", "weights", own, weights))
        if self._generates_by_program(shape, members, foreign):
            packed = self.compute * (shape.decoder_parameters + shape.vocab * shape.hidden)
            home.items.append(MemoryItem("rollout", "packed weights", packed, PHASES))
        prompts = self.config.data.max_prompt_length * self.config.data.train_batch_size * members // workers
        at_once = self._layer_width(shape) * min(rollout.max_num_batched_tokens, prompts) // members
        logits = 4 * rollout.max_num_seqs * shape.vocab
        home.items.append(MemoryItem("rollout", "a pass", self.compute * at_once + 2 * logits, (GENERATE,)))
        blocks = -(-self.longest // CACHE_BLOCK) * CACHE_BLOCK
        heads = max(1, shape.kv_heads // members)
        sequence = 2 * self.compute * shape.layers * heads * (shape.kv_width // shape.kv_heads) * blocks
        rows = self.config.data.train_batch_size * rollout.n * members // workers
        # An accelerator's cache is made whole; a CPU has pages for what is written alone.
        wanted = min(rollout.max_num_seqs, rows) if self.on_cpu else rollout.max_num_seqs
        held = wanted
        if capacity is not None and not self.on_cpu:
            taken = sum(i.size for i in home.items if GENERATE in i.phases and i.what != "optimiser")
            share = rollout.gpu_memory_utilization * max(0.0, USABLE * capacity - taken)
            held = max(1, min(wanted, int(share) // sequence))
        note = "" if held == wanted else f"{held:,} of {wanted:,} sequences of the greatest length"
        home.items.append(MemoryItem("rollout", "KV cache", sequence * held, cache, note, held))

    def _generates_by_program(self, shape: ModelShape, members: int, foreign: bool) -> bool:
        fits = shape.family in PROGRAM_FAMILIES and shape.parameters <= PROGRAM_WEIGHTS
        return self.on_cpu and fits and members == 1 and not foreign

    def _gathered(self, shape: ModelShape, workers: int, all_layers: bool) -> int:
        """The layer at work and the next one, or all of them, with embeddings and head, in the compute type."""
        if workers == 1 and self.on_cpu:
            return 0
        layers = shape.decoder_parameters if all_layers else min(2, shape.layers) * shape.layer_parameters
        return self.compute * (shape.rest + layers)

    def _activations(self, shape: ModelShape, section: Any, workers: int, checkpointing: bool) -> int:
        rows = section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n // workers
        sharing = section.ulysses_sequence_parallel_size
        longest = -(-self.longest // sharing)
        if uses_token_budget(section):
            # A row is never cut: one that is longer than the budget is a micro-batch by itself.
            tokens = min(max(token_budget(section.ppo_max_token_len_per_gpu), longest), rows * self.longest)
        else:
            tokens = section.ppo_micro_batch_size_per_gpu * longest
        layer = self._layer_width(shape)
        kept = shape.layers * shape.hidden + layer if checkpointing else shape.layers * layer
        return self.compute * tokens * kept

    def _layer_width(self, shape: ModelShape) -> int:
        """Numbers of one token that a layer makes and that live until its backward pass: what norms read and give, queries, keys,
        values, attention's output, three in the MLP."""
        layer = 4 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + 3 * shape.active_width
        if (experts := shape.experts) is not None:
            # Each token once for each of its experts: gathered, given, weighted and put back; the gate's activation apart.
            layer += experts.per_token * (4 * shape.hidden + experts.width)
        return layer


def _on_device(shape: ModelShape) -> int:
    """Weights of the three neighbouring buckets whose offloaded optimiser state is on the device at once."""
    inside = max(BUCKET, shape.largest_tensor)
    return max(3 * inside, 2 * inside + shape.vocab * shape.hidden)
