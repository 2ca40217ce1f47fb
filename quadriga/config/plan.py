"""What a configuration amounts to: rows, batches, optimiser steps and tokens of a step, pools, and memory.

Nothing is started and no heavy library is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quadriga.config.devices import detect_local_device, gpu_memory
from quadriga.config.host_memory import HostItem, host_items
from quadriga.config.load import ASSUMED_RANK
from quadriga.config.memory import USABLE, WorkerMemory, estimate_memory
from quadriga.config.needs import (
    is_judged_by_itself,
    need_critic,
    need_reference_policy,
    token_budget,
    uses_token_budget,
)
from quadriga.config.placement import placement_of
from quadriga.config.savings import Savings, savings
from quadriga.config.schema import Config
from quadriga.host import usable_memory


@dataclass(frozen=True)
class UpdatePlan:
    """How one model is updated in a step. Micro-batches are counted per worker and optimiser step."""

    role: str
    mini_batch_prompts: int
    mini_batch_rows: int
    mini_batches: int
    epochs: int
    rows_per_worker: int
    token_budget: int | None
    """Tokens that fill a micro-batch; None if it has a fixed number of rows."""
    micro_batch_rows: int
    """Rows of a micro-batch; with a token budget, those that fit if all have the greatest length."""
    micro_batches: int
    """At most so many: with a token budget, shorter rows need fewer."""

    @property
    def optimiser_steps(self) -> int:
        return self.mini_batches * self.epochs


@dataclass(frozen=True)
class Pool:
    """Worker slots per node, and the roles that live in each of them."""

    slots_per_node: list[int]
    roles: list[str]
    set_size: int = 1
    """Neighbouring slots that generate together with one copy of the model."""

    @property
    def sets(self) -> list[list[tuple[int, int]]]:
        """For each node the first and the last worker of each set."""
        nodes, first = [], 0
        for slots in self.slots_per_node:
            starts = range(first, first + slots, self.set_size)
            nodes.append([(start, start + self.set_size - 1) for start in starts])
            first += slots
        return nodes


FEW_SEQUENCES = 16
"""That an engine decodes together: with fewer, it reads all weights for little."""


@dataclass(frozen=True)
class Plan:
    """The numbers of a run. Tokens are upper bounds: prompts and responses of the greatest length."""

    prompts: int
    responses_per_prompt: int
    workers: int
    prompt_tokens: int
    response_tokens: int
    device: str
    actor: UpdatePlan
    critic: UpdatePlan | None
    pools: dict[str, Pool]
    cpus_per_slot: float
    train_rows: int | None
    train_rows_unknown_because: str
    epochs: int
    max_steps: int | None
    memory: list[WorkerMemory] = field(default_factory=list)
    host: list[HostItem] = field(default_factory=list)
    """What the workers keep in the memory of their nodes beside their devices."""
    gpu: str | None = None
    """The device that the plan was asked for by name."""
    capacity: int | None = None
    """Its memory in bytes."""
    savings: Savings = field(default_factory=Savings)
    """What would make it fit, or spare most of what is missing, where it does not."""
    adapter_elsewhere: str | None = None
    """A LoRA adapter to start from that this machine does not have."""
    judged_by_itself: bool = False
    """The reward model is the policy's, which has no head for scores."""

    @property
    def fits(self) -> bool | None:
        """Whether every worker's peak fits the device; None where that cannot be said."""
        if self.capacity is None or any(memory.unknown for memory in self.memory):
            return None
        return all(memory.peak[1] <= USABLE * self.capacity for memory in self.memory)

    @property
    def rows(self) -> int:
        return self.prompts * self.responses_per_prompt

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt_tokens + self.response_tokens)

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.train_rows is None else self.train_rows // self.prompts

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None where the size of the dataset is needed and not known."""
        by_epochs = None if self.steps_per_epoch is None else self.steps_per_epoch * self.epochs
        return min((steps for steps in (self.max_steps, by_epochs) if steps is not None), default=None)

    @property
    def strictly_on_policy(self) -> bool:
        """One optimiser step a step: the policy that learns is the one that generated."""
        return self.actor.optimiser_steps == 1

    def warnings(self) -> list[str]:
        """What is possible but hardly meant."""
        warnings = []
        if self.adapter_elsewhere:
            warnings.append(
                f"there is no folder {self.adapter_elsewhere} here: the plan takes its rank to be {ASSUMED_RANK}"
            )
        if self.train_rows is not None and self.train_rows < self.prompts:
            warnings.append(
                f"the training set has {self.train_rows} rows, fewer than one step of {self.prompts} prompts: "
                f"set data.train_batch_size={self.train_rows} or less"
            )
        if self.judged_by_itself:
            warnings.append(
                "reward_model.model.path is the policy itself: a run needs a sequence-classification model there"
            )
        for memory in self.memory:
            for item in memory.items:
                if item.note and item.held < FEW_SEQUENCES:
                    warnings.append(
                        f"the KV cache holds {item.note}: generation will be slow; raise "
                        "actor_rollout_ref.rollout.tensor_model_parallel_size, or .gpu_memory_utilization"
                    )
        host = usable_memory()[0]
        if self.device == "cpu" and len(next(iter(self.pools.values())).slots_per_node) == 1:
            needed = sum(m.peak[1] * self.pools[m.pool].slots_per_node[0] for m in self.memory)
            if needed > host:
                warnings.append(
                    f"the workers need about {format_bytes(needed)}, this machine has {format_bytes(host)}: lower "
                    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu or trainer.n_gpus_per_node"
                )
        return warnings


def make_plan(config: Config, gpu: str | None = None) -> Plan:
    """The plan of a checked configuration, for this machine or for the GPU of that name. Reads sizes of local data and model
    files, nothing else."""
    train_rows, why_not = count_rows(config.data.train_files)
    if train_rows is not None and config.data.train_max_samples > 0:
        train_rows = min(train_rows, config.data.train_max_samples)
    device = "cuda" if gpu is not None else config.trainer.device or detect_local_device()
    capacity = None if gpu is None else gpu_memory(gpu)
    return Plan(
        prompts=config.data.train_batch_size,
        responses_per_prompt=config.actor_rollout_ref.rollout.n,
        workers=placement_of(config).slots("actor_rollout"),
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.data.max_response_length,
        device=device,
        actor=_update_plan("actor", config.actor_rollout_ref.actor, config),
        critic=_update_plan("critic", config.critic, config) if need_critic(config) else None,
        pools=_pools(config),
        cpus_per_slot=config.controller.cpus_per_slot,
        train_rows=train_rows,
        train_rows_unknown_because=why_not,
        epochs=config.trainer.total_epochs,
        max_steps=config.trainer.total_training_steps,
        memory=estimate_memory(config, device, capacity),
        host=host_items(config, device),
        gpu=gpu,
        capacity=capacity,
        savings=Savings() if capacity is None else savings(config, device, capacity),
        adapter_elsewhere=_adapter_elsewhere(config),
        judged_by_itself=is_judged_by_itself(config),
    )


def _adapter_elsewhere(config: Config) -> str | None:
    adapter = config.actor_rollout_ref.model.lora_adapter_path
    return adapter if adapter and not Path(adapter).expanduser().exists() else None


def _update_plan(role: str, section: Any, config: Config) -> UpdatePlan:
    n, longest = config.actor_rollout_ref.rollout.n, config.data.max_prompt_length + config.data.max_response_length
    mini_rows = section.ppo_mini_batch_size * n
    per_worker = mini_rows // placement_of(config).slots("critic" if role == "critic" else "actor_rollout")
    budget = token_budget(section.ppo_max_token_len_per_gpu) if uses_token_budget(section) else None
    micro_rows = section.ppo_micro_batch_size_per_gpu
    if budget is not None:
        micro_rows = max(1, min(per_worker, budget // longest))
    return UpdatePlan(
        role=role,
        mini_batch_prompts=section.ppo_mini_batch_size,
        mini_batch_rows=mini_rows,
        mini_batches=config.data.train_batch_size // section.ppo_mini_batch_size,
        epochs=section.ppo_epochs,
        rows_per_worker=per_worker,
        token_budget=budget,
        micro_batch_rows=micro_rows,
        micro_batches=-(-per_worker // micro_rows),
    )


def _pools(config: Config) -> dict[str, Pool]:
    placement, set_size = placement_of(config), config.actor_rollout_ref.rollout.tensor_model_parallel_size
    shown = {"actor_rollout": ["actor", "rollout"] if placement.generator == "actor_rollout" else ["actor"]}
    if need_reference_policy(config) and config.actor_rollout_ref.model.lora_rank:
        shown["actor_rollout"].append("ref (actor without adapter)")
    return {
        name: Pool(
            sizes,
            [part for role in placement.roles_in(name) for part in shown.get(role, [role])],
            set_size if name == placement.role_pool[placement.generator] else 1,
        )
        for name, sizes in placement.pools.items()
    }


def format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


LARGEST_TEXT = 2 << 30
"""Bytes of jsonl whose lines are still counted (about a second)."""


def count_rows(files: str | Iterable[str]) -> tuple[int | None, str]:
    """Rows of all files together, or None, and why it is not known."""
    total = 0
    for name in [files] if isinstance(files, str) else files:
        rows, why_not = _count_file(name)
        if rows is None:
            return None, why_not
        total += rows
    return total, ""


def _count_file(name: str) -> tuple[int | None, str]:
    if name.startswith("builtin:"):
        return None, f"{name} is generated when the run starts"
    path = Path(os.path.expandvars(name)).expanduser()
    if not path.is_file():
        return None, f"{name} is not a local file"
    if path.suffix == ".parquet":
        return _count_parquet(path)
    if path.suffix == ".jsonl" and path.stat().st_size <= LARGEST_TEXT:
        try:
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip()), ""
        except OSError as error:
            return None, f"{path} cannot be read: {error.strerror or error}"
    return None, f"{name} is too large, or of a kind, to be counted without reading it"


def _count_parquet(path: Path) -> tuple[int | None, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(path).num_rows, ""
    except (pa.ArrowException, OSError) as error:
        return None, f"{path} cannot be read as parquet: {error}"
