"""Entry point of PPO-family runs: `python -m quadriga.trainer.main_ppo key=value …`, `quadriga train …`, or `run_ppo(config)`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import hydra

from quadriga.config.load import load_config
from quadriga.config.needs import need_critic, need_reference_policy
from quadriga.config.placement import placement_of
from quadriga.config.schema import Config
from quadriga.errors import QuadrigaError, WorkerError
from quadriga.tracking.sinks import check_sinks
from quadriga.trainer.constants_ppo import get_ppo_ray_runtime_env
from quadriga.trainer.device import auto_set_device
from quadriga.trainer.ppo.role import Role
from quadriga.workers.callers_folder import CALLERS_FOLDER, enter_callers_folder

RESTART_WAIT_S = 60.0
"""After workers have died, the cluster gets so long to give their slots back, or to bring a new node."""
PREPARATION = "quadriga.workers.warm_up:warm_up"
"""What the workers' processes do while the driver reads the data."""


@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def main(config: Any) -> None:
    auto_set_device(config)
    run_ppo(config)


def run_ppo(config: Any, task_runner_class: Any = None) -> None:
    """Run a whole training job; returns when it is done, raises what stopped it.

    Ray is started unless it is running already (and stays up afterwards). With `trainer.executor=local` there is no Ray at
    all: everything happens in this process.

    Args:
        config: an OmegaConf `DictConfig` (or a dict, or a typed `Config`); absent keys take their defaults.
        task_runner_class: a class like `TaskRunner`, plain or made by `ray.remote`, that conducts the run instead of it.
    """
    checked = load_config(config)
    check_sinks(checked.trainer.logger)
    from quadriga.trainer.watching import conclude, watch, watch_here

    if checked.trainer.executor == "local":
        watch_here((task_runner_class or TaskRunner)(), config)
        conclude(checked)
        return
    import ray

    runtime_env = _runtime_env(checked)
    if not ray.is_initialized():
        from quadriga.controller.start_ray import start_ray

        start_ray({**checked.ray_kwargs.ray_init, "runtime_env": runtime_env})
    runner = _start_runner(task_runner_class or TaskRunner, runtime_env)
    try:
        watch(runner, runner.run.remote(config), show="console" in checked.trainer.logger)
        conclude(checked)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, QuadrigaError):
            raise error.cause from None
        raise
    except ray.exceptions.ActorDiedError as error:
        raise WorkerError(
            f"the process that steers the run died: {' '.join(str(error).split())}",
            "the same command goes on after the last checkpoint; what it said last is above, and in Ray's logs",
        ) from None
    finally:
        ray.kill(runner)
        if checked.ray_kwargs.timeline_json_file:
            ray.timeline(filename=checked.ray_kwargs.timeline_json_file)


class TaskRunner:
    """Conducts a run: decides which roles it has, where they live, and steers them. Subclass it to change any of that."""

    def __init__(self) -> None:
        from quadriga.tracking.events import EventLog

        self.events = EventLog()
        self.trainer: Any = None
        self.role_worker_mapping: dict[Role, Any] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: Any) -> tuple[Any, Any]:
        """The policy. Returns its worker class and the worker group class of the run."""
        from quadriga.workers import ActorRolloutRefWorker

        self._add(config, Role.ActorRollout, ActorRolloutRefWorker)
        if config.trainer.executor == "local":
            from quadriga.controller import LocalWorkerGroup

            return ActorRolloutRefWorker, LocalWorkerGroup
        from quadriga.controller import RayWorkerGroup

        return ActorRolloutRefWorker, RayWorkerGroup

    def add_rollout_worker(self, config: Any) -> None:
        """Rollout engines, where `trainer.placement` gives them a pool of their own."""
        if placement_of(config).generator == str(Role.Rollout):
            from quadriga.workers import RolloutWorker

            self._add(config, Role.Rollout, RolloutWorker)

    def add_critic_worker(self, config: Any) -> None:
        """The value model, where the advantage estimator needs one."""
        if need_critic(config):
            from quadriga.workers import CriticWorker

            self._add(config, Role.Critic, CriticWorker)

    def add_reward_model_worker(self, config: Any) -> None:
        """The reward model, if there is one, in the shared pool or in its own."""
        if config.reward_model.enable:
            from quadriga.workers import RewardModelWorker

            self._add(config, Role.RewardModel, RewardModelWorker)

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: Any) -> None:
        """The reference policy, where a KL term needs one. With LoRA the actor without its adapter is the reference."""
        if need_reference_policy(config) and config.actor_rollout_ref.model.lora_rank == 0:
            self._add(config, Role.RefPolicy, ref_policy_cls)

    def init_resource_pool_mgr(self, config: Any) -> Any:
        """The pools of the run, not yet made."""
        resource_pool_spec = placement_of(config).pools  # e.g. {"global_pool": [8, 8]}: 8 slots on each of 2 nodes
        if config.trainer.executor == "local":
            from quadriga.controller.local_group import LocalResourcePoolManager

            return LocalResourcePoolManager(resource_pool_spec, self.mapping)
        from quadriga.controller import ResourcePoolManager

        return ResourcePoolManager(
            resource_pool_spec=resource_pool_spec,
            mapping=self.mapping,
            device=config.trainer.device,
            cpus_per_slot=config.controller.cpus_per_slot,
            wait_s=config.trainer.resource_wait_s,
        )

    def stop(self) -> None:
        """Let the run end after the step at hand, with a checkpoint."""
        if self.trainer is not None:
            self.trainer.stop_requested = True

    def say(self, text: str) -> None:
        """Tell the user something, on the terminal that started the run."""
        self.events.append("message", {"level": "info", "text": text})

    def news(self, cursor: int) -> Any:
        """Events of the run since `cursor`, and the cursor for the next call; answered while `run` is running."""
        return self.events.since(cursor)

    def run(self, config: Any) -> None:
        """Check, place and start everything, train, and leave nothing behind."""
        enter_callers_folder()
        config = load_config(config)
        self.say(f"TaskRunner on {socket.gethostname()}, pid {os.getpid()}")
        first_pools = self.init_resource_pool_mgr(config)
        first_pools.check_resources()  # before anything expensive
        if config.trainer.executor == "ray":
            first_pools.start_early(PREPARATION)  # they import while this process reads the data
        try:
            self._run(config, first_pools)
        finally:
            first_pools.shutdown()

    def _run(self, config: Config, first_pools: Any) -> None:
        from quadriga.checkpoint.store import CheckpointStore
        from quadriga.data import create_rl_dataset
        from quadriga.models.load import load_tokenizer
        from quadriga.rewards import check_sources, has_scorers, load_reward_manager, open_pool
        from quadriga.tracking.run_directory import RunDirectory
        from quadriga.trainer.ppo.journal import Journal
        from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer
        from quadriga.trainer.ppo.restarts import Restarts, train_to_the_end
        from quadriga.trainer.report import describe_workers

        actor_rollout_cls, worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, actor_rollout_cls)
        model, data = config.actor_rollout_ref.model, config.data
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
        train_dataset = create_rl_dataset(data.train_files, data, tokenizer, None, True, data.train_max_samples)
        val_dataset = create_rl_dataset(data.val_files, data, tokenizer, None, False, data.val_max_samples)
        uses_function = not config.reward_model.enable or config.custom_reward_function.path is not None
        scored = [*getattr(train_dataset, "sources", ()), *getattr(val_dataset, "sources", ())] if uses_function else []
        check_sources(config, scored)
        validates_by_function = uses_function or has_scorers(config, getattr(val_dataset, "sources", ()))
        directory = RunDirectory(config.trainer.default_local_dir)
        directory.lock()  # from here on nobody else writes checkpoints into it, or deletes any
        checkpoints = CheckpointStore(directory.checkpoints, config.trainer.max_actor_ckpt_to_keep)

        @contextmanager
        def attempt(found: Any, restarts: Restarts) -> Iterator[RayPPOTrainer]:
            """All that a run consists of, made anew, at the step of the checkpoint `found`."""
            resumed_step = found.step if found else -1 if restarts.deaths else None
            pools = first_pools
            if restarts.deaths:  # the slots of the workers that are gone come back a little later
                pools = self.init_resource_pool_mgr(config)
                pools.wait_s = max(pools.wait_s, RESTART_WAIT_S)
            with open_pool(config) as pool:
                function = load_reward_manager(config, tokenizer, 0, pool=pool)
                trainer = self.trainer = RayPPOTrainer(
                    config=config,
                    tokenizer=tokenizer,
                    role_worker_mapping=self.role_worker_mapping,
                    resource_pool_manager=pools,
                    ray_worker_group_cls=worker_group_cls,
                    reward_fn=function if uses_function else None,
                    val_reward_fn=function if validates_by_function else None,
                    train_dataset=train_dataset,
                    val_dataset=val_dataset,
                    tracking=Journal(config, directory, self.events, resumed_step),
                    checkpoints=checkpoints,
                    restarts=restarts,
                )
                try:
                    self.say(describe_workers(trainer.init_workers(), pools.mapping, pools.resource_pool_spec))
                    if found:
                        trainer.resume(found)
                    # A debugger stops a local run on purpose.
                    with nullcontext() if config.trainer.executor == "local" else trainer.watchdog():
                        yield trainer
                finally:
                    trainer.shutdown()

        try:
            found = checkpoints.find(config.trainer.resume_mode, config.trainer.resume_from_path)
            train_to_the_end(attempt, checkpoints, found, Restarts(config.trainer.max_restarts, self.say))
        finally:
            directory.unlock()

    def _add(self, config: Any, role: Role, worker_class: Any) -> None:
        self.role_worker_mapping[role] = worker_class
        self.mapping[role] = placement_of(config).role_pool[str(role)]


def _runtime_env(config: Config) -> dict[str, Any]:
    """Defaults, then what the configuration implies, then what the user says in ray_kwargs.ray_init.runtime_env."""
    runtime_env = get_ppo_ray_runtime_env()
    if config.transfer_queue.enable:
        runtime_env["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
    runtime_env["env_vars"][CALLERS_FOLDER] = os.getcwd()
    user = dict(config.ray_kwargs.ray_init.get("runtime_env") or {})
    env_vars = {**runtime_env["env_vars"], **{k: str(v) for k, v in (user.pop("env_vars", None) or {}).items()}}
    return {**runtime_env, **user, "env_vars": env_vars}


def _start_runner(runner_class: Any, runtime_env: dict[str, Any]) -> Any:
    """The runner as an actor, by preference on this node. It mostly waits, so it books no CPU."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Ray may have been started by others, without our defaults: the runner gets them, and its workers inherit them.
    # Two threads: `run`, and `news` beside it.
    options: dict[str, Any] = {"runtime_env": {"env_vars": runtime_env["env_vars"]}, "max_concurrency": 2}
    if not hasattr(runner_class, "remote"):
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        runner_class = ray.remote(runner_class)
        options.update(num_cpus=0, scheduling_strategy=here)
    return runner_class.options(**options).remote()


def command(arguments: list[str]) -> int:
    """`main` for a command line: exit code 0, or 1 after printing what went wrong (with the stack under `--debug`)."""
    from quadriga.cli import run_command

    return run_command(_run_hydra, arguments)


def _run_hydra(arguments: list[str]) -> int:
    from quadriga.config.load import screen_overrides

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach run_command instead of being printed by Hydra
    sys.argv = [sys.argv[0], *screen_overrides(arguments)]
    main()
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
