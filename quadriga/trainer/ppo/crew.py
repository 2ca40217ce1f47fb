"""The worker groups of a run, by role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quadriga.checkpoint.disk import WriteState
from quadriga.config.devices import detect_local_device
from quadriga.config.needs import finishes_samples_first
from quadriga.config.placement import Role, placement_of
from quadriga.config.schema import Config
from quadriga.controller.pool import RayClassWithInitArgs, create_colocated_worker_cls
from quadriga.errors import QuadrigaError
from quadriga.rollout.router import Router
from quadriga.tracking.phases import PHASE_OF_METHOD, Phases
from quadriga.trainer.ppo.engines import LocalEngines, PublishedWeights, RayEngines, form_sets
from quadriga.trainer.ppo.restarts import Restarts
from quadriga.workers.base import WorkerReport
from quadriga.workers.weight_push import require_held


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
        self.engines: RayEngines | LocalEngines
        self.engine_loads: Callable[[], dict[int, int]] = dict
        """Rank → samples to finish, of the engines that have some."""
        self.weights = PublishedWeights()
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
                device_name=self._device_of_this_process(),
            )
            self._hosts.append(host)
            spawned = host.spawn(members)
            self.groups.update({role: spawned[str(role)] for role in members})
        for host in self._hosts:
            host.launch()
        for host in self._hosts:
            host.wait_ready()
        joining = [group.start("join") for group in self.groups.values()]
        reports = [report for pending in joining for report in pending.get()]
        form_sets(self.rollout, self._set_size)
        return reports

    def load_models(self, total_steps: int) -> None:
        """Every role loads its model; those that learn plan their schedule over `total_steps`."""
        for pending in [group.start("init_model", total_steps) for group in self.groups.values()]:
            pending.get()

    def set_key(self, key: str, value: Any) -> str:
        """Another value of a key for the workers that read it, if any do. Returns why that cannot be, else ""."""
        role = {"actor_rollout_ref": "actor", "critic": "critic"}.get(key.partition(".")[0])
        if role is None:
            return ""
        group = getattr(self, role)
        if group is None:
            return f"this run has no {role}"
        group.set_key(key, value)
        return ""

    def connect_engines(self, restarts: Restarts) -> None:
        """Begin to listen to the workers that generate. Those that have their pool to themselves are replaced when they die."""
        capacity = self.config.actor_rollout_ref.rollout.max_num_seqs
        if self.config.trainer.executor == "local":
            self.engines = LocalEngines(self.rollout, self.weights, capacity)
            return
        pool = self.pools.mapping.get(Role.Rollout)
        alone = list(self.pools.mapping.values()).count(pool) == 1
        self.engines = RayEngines(self.rollout, self.weights, capacity, alone, restarts, self._set_size)

    @property
    def _set_size(self) -> int:
        """Workers that are one engine together."""
        return self.config.actor_rollout_ref.rollout.tensor_model_parallel_size

    def _device_of_this_process(self) -> str | None:
        """What a run without Ray computes on; on Ray the pools know."""
        trainer = self.config.trainer
        return (trainer.device or detect_local_device()) if trainer.executor == "local" else None

    @property
    def workers(self) -> int:
        """Slots of all pools: GPUs, or processes on CPUs."""
        return sum(sum(sizes) for sizes in placement_of(self.config).pools.values())

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
    def teacher(self) -> Any:
        """The teachers that are local models."""
        return self.groups.get(Role.Teacher)

    @property
    def reward_model(self) -> Any:
        return self.groups.get(Role.RewardModel)

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Inside it, calls are profiled as `global_profiler` and the roles' `profiler` say, if this step is one of its steps."""
        profiler = self.config.global_profiler
        if profiler.tool is None or step not in (profiler.steps or ()):
            yield
            return
        self._tell_all("profile_step", step)
        yield
        self._tell_all("profile_step", None)

    def _tell_all(self, method: str, *arguments: Any) -> None:
        for pending in [group.start(method, *arguments) for group in self.groups.values()]:
            pending.get()

    def hand_over_weights(self, version: int, router: Router) -> None:
        """Bring the trained weights to the engines: at once where they share the actor's processes and have nothing to finish first,
        else published for them to take, when they have finished what they do with those they hold or at once."""
        in_step, drains = self.config.async_training.staleness == 0, finishes_samples_first(self.config)
        if self.rollout is self.actor and not drains:
            require_held(self.actor.update_weights(version), version)
            router.holds(version)
            return
        self.weights.add(self.actor.push_weights(version)[0])
        waits = in_step or router.is_new
        router.publish(version, drains=in_step or drains)
        if waits:
            router.wait(lambda: router.all_hold(version))
        self.weights.forget_before(router.oldest_needed())

    def tell_calls(self, phases: Phases) -> dict[str, float]:
        """Put what the workers did since the last time into the timeline, one lane for each role and rank.

        Returns the most memory that a process held in each phase, `memory/host_gb/gen` and so on.
        """
        most: dict[str, float] = {}
        calls = [(rank, c) for host in self._hosts for rank, of_rank in enumerate(host.take_calls()) for c in of_rank]
        generated, self.engines.records = self.engines.records, []
        for rank, call in [*calls, *generated]:
            phases.record(call.method, call.start, call.seconds, lane=f"{call.role} {rank}")
            phase = PHASE_OF_METHOD.get(call.method, call.method)
            for kind, used in (("host_gb", call.host_gb), ("device_gb", call.device_gb)):
                if used:
                    name = f"memory/{kind}/{phase}"
                    most[name] = max(most.get(name, 0.0), used)
        return most

    def checkpoint_bytes(self) -> int:
        """About what a checkpoint will take on disk."""
        return sum(sum(self.groups[role].checkpoint_bytes()) for role in self._learning())

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

    def death(self, during: str) -> QuadrigaError | None:
        """The death of a worker, if one is gone."""
        deaths = (host.death(during) for host in self._hosts)
        return next((death for death in deaths if death is not None), None)

    def load(self, checkpoint: Any) -> None:
        for role in self._learning():
            self.groups[role].load_checkpoint(str(checkpoint.folder(str(role))))

    def _learning(self) -> list[Role]:
        return [role for role in (Role.ActorRollout, Role.Critic) if role in self.groups]

    def busy(self) -> list[str]:
        """The workers that are at a call now or generate, or do not answer, and what they do."""
        if Role.ActorRollout not in self.groups:
            return []  # the pools are still being made, or the workers are gone already
        loads, seats = self.engine_loads(), self.rollout.seats
        leaders = {seats[rank * self._set_size]: samples for rank, samples in loads.items()}
        generating = [f"{seat}: generates {samples} samples" for seat, samples in leaders.items()]
        return [*(one for host in self._hosts for one in host.busy()), *generating]

    def stacks(self) -> list[str]:
        """The Python stacks of every worker."""
        return [one for host in self._hosts for one in host.stacks()]

    def abandon(self, why: str, phase: str) -> None:
        """Stop the workers that a phase waits for: engines that can be replaced alone if it is `gen`, else all.

        The driver's call to them fails; if to all, with `why`.
        """
        if phase == "gen" and self.engines.stop(list(self.engine_loads())):
            return
        for host in self._hosts:
            host.abandon(why)

    def shutdown(self) -> None:
        if (engines := getattr(self, "engines", None)) is not None:  # else it ended before there were any
            engines.close()
        for host in self._hosts:
            host.shutdown()
        self._hosts.clear()
        self.groups.clear()
        self.pools.shutdown()
