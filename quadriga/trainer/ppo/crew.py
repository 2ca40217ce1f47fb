"""The worker groups of a run, by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quadriga.checkpoint.background import WriteState
from quadriga.config.schema import Config
from quadriga.controller.members import RayClassWithInitArgs, create_colocated_worker_cls
from quadriga.rollout.interface import WeightsEcho
from quadriga.tracking.phases import Phases
from quadriga.trainer.ppo.restarts import Restarts
from quadriga.trainer.ppo.role import Role
from quadriga.trainer.ppo.rollout_pool import RolloutPool
from quadriga.workers.base import WorkerReport
from quadriga.workers.weight_push import PushedWeights

PHASE_OF_METHOD = {
    "generate_sequences": "gen",
    "compute_rm_score": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "push_weights": "update_weights",
    "take_weights": "update_weights",
    "copy_checkpoint": "save_checkpoint",
    "write_checkpoint": "save_checkpoint",
}
"""Which phase of a step a worker's method belongs to, where their names differ."""


class Crew:
    """Starts the roles in their pools and hands out their groups. The roles of a pool share its processes."""

    def __init__(
        self, config: Config, role_worker_mapping: Mapping[Role, Any], resource_pool_manager: Any, worker_group_cls: Any
    ) -> None:
        self.config = config
        self.worker_classes = dict(role_worker_mapping)
        self.pools = resource_pool_manager
        self.worker_group_cls = worker_group_cls
        self.groups: dict[Role, Any] = {}
        self.engines: RolloutPool | None = None
        """Who generates, where that is done apart from training and on Ray; see `use_engines_apart`."""
        self._hosts: list[Any] = []

    def start(self) -> list[WorkerReport]:
        """Make the pools, start all processes at the same time, and let every role join its collectives."""
        self.pools.create_resource_pool()
        by_pool: dict[str, dict[Role, RayClassWithInitArgs]] = {}
        for role, worker_class in self.worker_classes.items():
            member = RayClassWithInitArgs(worker_class, config=self.config, role=str(role))
            by_pool.setdefault(self.pools.mapping[role], {})[role] = member
        for pool_name, members in by_pool.items():
            host = self.worker_group_cls(
                resource_pool=self.pools.resource_pool_dict[pool_name],
                ray_cls_with_init=create_colocated_worker_cls(members),
                start_timeout_s=self.config.controller.start_timeout_s,
                call_timeout_s=self.config.controller.call_timeout_s,
            )
            self._hosts.append(host)
            spawned = host.spawn(members)
            self.groups.update({role: spawned[str(role)] for role in members})
        for host in self._hosts:
            host.launch()
        for host in self._hosts:
            host.wait_ready()
        joining = [group.start("join") for group in self.groups.values()]
        return [report for pending in joining for report in pending.get()]

    def load_models(self, total_steps: int) -> None:
        """Every role loads its model; those that learn plan their schedule over `total_steps`."""
        for pending in [group.start("init_model", total_steps) for group in self.groups.values()]:
            pending.get()

    def use_engines_apart(self, phase: Callable[[str], Any], restarts: Restarts) -> None:
        """Where generation has a pool of its own on Ray, call its workers one by one and replace those that die."""
        if Role.Rollout in self.groups and self.config.trainer.executor == "ray":
            pool = self.pools.mapping[Role.Rollout]
            alone = list(self.pools.mapping.values()).count(pool) == 1
            self.engines = RolloutPool(self.rollout, self.push_weights, phase, restarts, alone)

    @property
    def actor(self) -> Any:
        return self.groups[Role.ActorRollout]

    @property
    def rollout(self) -> Any:
        """Who generates: engines in a pool of their own, or the actor."""
        return self.groups.get(Role.Rollout, self.actor)

    @property
    def critic(self) -> Any:
        return self.groups.get(Role.Critic)

    @property
    def reference(self) -> Any:
        """The frozen copy, or with LoRA the actor itself without its adapter."""
        return self.groups.get(Role.RefPolicy, self.actor)

    @property
    def reward_model(self) -> Any:
        return self.groups.get(Role.RewardModel)

    def hand_over_weights(self, version: int) -> list[WeightsEcho]:
        """Bring the trained weights to the engines. Returns what each of them, and a trainer that pushed, says it holds."""
        if self.engines is not None:
            return self.engines.hand_over_weights(version)
        if self.rollout is self.actor:
            return self.actor.update_weights(version)
        pushed = self.push_weights(version)
        return [pushed.echo, *self.rollout.take_weights(pushed)]

    def push_weights(self, version: int) -> PushedWeights:
        """Put the trained weights where engines in other pools find them."""
        return self.actor.push_weights(version)[0]

    def tell_calls(self, phases: Phases) -> dict[str, float]:
        """Put what the workers did since the last time into the timeline, one lane for each role and rank.

        Returns the most memory that a process held in each phase, `memory/host_gb/gen` and so on.
        """
        most: dict[str, float] = {}
        for host in self._hosts:
            for rank, calls in enumerate(host.take_calls()):
                for call in calls:
                    phases.record(call.method, call.start, call.seconds, lane=f"{call.role} {rank}")
                    phase = PHASE_OF_METHOD.get(call.method, call.method)
                    for kind, used in (("host_gb", call.host_gb), ("device_gb", call.device_gb)):
                        if used:
                            name = f"memory/{kind}/{phase}"
                            most[name] = max(most.get(name, 0.0), used)
        return most

    def copy_state(self) -> int:
        """Every learning role copies its state to host memory. Returns the bytes that a checkpoint of it takes."""
        copying = [self.groups[role].start("copy_checkpoint") for role in self._learning()]
        return sum(sum(pending.get()) for pending in copying)

    def begin_writing(self, draft: Any) -> None:
        """The copies, and the policy as a Hugging Face folder, go into a checkpoint's draft while training goes on."""
        draft.folder("huggingface")
        for role in self._learning():
            draft.folder(str(role))
            self.groups[role].write_checkpoint(str(draft.path))

    def written(self) -> list[WriteState | None]:
        """How far each writer is; None for one that does not answer."""
        return [state for role in self._learning() for state in self.groups[role].ask("checkpoint_written")]

    def load(self, checkpoint: Any) -> None:
        for role in self._learning():
            self.groups[role].load_checkpoint(str(checkpoint.folder(str(role))))

    def _learning(self) -> list[Role]:
        return [role for role in (Role.ActorRollout, Role.Critic) if role in self.groups]

    def busy(self) -> list[str]:
        """The workers that are at a call now, or do not answer, and what they do."""
        return [one for host in self._hosts for one in host.busy()]

    def stacks(self) -> list[str]:
        """The Python stacks of every worker."""
        return [one for host in self._hosts for one in host.stacks()]

    def abandon(self, why: str, phase: str) -> None:
        """Stop the workers that a phase waits for: engines that can be replaced alone if it is `gen`, else all.

        The driver's call to them fails; if to all, with `why`.
        """
        if phase == "gen" and self.engines is not None and self.engines.stop_late():
            return
        for host in self._hosts:
            host.abandon(why)

    def shutdown(self) -> None:
        for host in self._hosts:
            host.shutdown()
        self._hosts.clear()
        self.groups.clear()
        self.pools.shutdown()
