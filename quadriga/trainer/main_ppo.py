"""Entry point of PPO-family runs: `python -m quadriga.trainer.main_ppo key=value …`, `quadriga train …`, or `run_ppo(config)`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import hydra

from quadriga.config.command_line import compose_file, hydra_errors, take_file
from quadriga.config.load import load_config, screen_overrides
from quadriga.config.needs import need_critic, need_reference_policy
from quadriga.config.placement import Role, placement_of
from quadriga.config.run_name import with_run_name
from quadriga.config.schema import Config
from quadriga.errors import QuadrigaError, WorkerError, run_command
from quadriga.host import CALLERS_FOLDER, enter_callers_folder
from quadriga.tracking.process_log import keep_output
from quadriga.tracking.steady_output import steady_output
from quadriga.trainer.before_start import auto_set_device, problems_here
from quadriga.trainer.constants_ppo import get_ppo_ray_runtime_env
from quadriga.trainer.kernel_cache import TRITON_CACHE, kernel_cache

if TYPE_CHECKING:
    from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer
    from quadriga.trainer.ppo.run_parts import RunParts

RESTART_WAIT_S = 60.0
"""After workers have died, the cluster gets so long to give their slots back, or to bring a new node."""
VERL_ALIAS = "QUADRIGA_COMPAT_VERL"
"""Set where `import verl` means Quadriga (`quadriga.compat.verl`); the run's other processes must know it too."""
PREPARATION = "quadriga.workers.base:warm_up"
"""What the workers' processes do while the driver reads the data."""


@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def main(config: Any) -> None:
    auto_set_device(config)
    run_ppo(config)


@steady_output()
def run_ppo(config: Any, task_runner_class: Any = None) -> None:
    """Run a whole training job; returns when it is done, raises what stopped it.

    Ray is started unless it is running already (and stays up afterwards). With `trainer.executor=local` there is no Ray at
    all: everything happens in this process.

    Args:
        config: an OmegaConf `DictConfig` (or a dict, or a typed `Config`); absent keys take their defaults.
        task_runner_class: a class like `TaskRunner`, plain or made by `ray.remote`, that conducts the run instead of it.
    """
    checked = load_config(config, also_check=problems_here)
    with kernel_cache(checked):
        _conduct(config, checked, task_runner_class or TaskRunner)


def _conduct(config: Any, checked: Config, runner_class: Any) -> None:
    """Start Ray if need be, and the runner, and watch it to its end."""
    from quadriga.trainer.watching import SAME_COMMAND, ClusterGone, conclude, say_new_name, watch, watch_here

    say_new_name(config, checked)
    config = checked if isinstance(config, Config) else with_run_name(config, checked.trainer.experiment_name or "")
    if checked.trainer.executor == "local":
        if watch_here(runner_class(), config, checked):
            conclude(checked)
        return
    import ray

    runtime_env = _runtime_env(checked)
    if not ray.is_initialized():
        from quadriga.controller.start_ray import start_ray

        start_ray({**checked.ray_kwargs.ray_init, "runtime_env": runtime_env})
    runner = _start_runner(runner_class, runtime_env)
    answers = True
    try:
        if watch(runner, runner.run.remote(config), checked):
            conclude(checked)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, QuadrigaError):
            raise error.cause from None
        raise
    except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError) as error:
        raise WorkerError(
            f"the process that steers the run is gone: {' '.join(str(error).split())}",
            SAME_COMMAND,
        ) from None
    except ClusterGone:
        answers = False
        raise
    finally:
        if answers:
            ray.kill(runner)
        if answers and checked.ray_kwargs.timeline_json_file:
            ray.timeline(filename=checked.ray_kwargs.timeline_json_file)


class TaskRunner:
    """Conducts a run: decides which roles it has, where they live, and steers them. Subclass it to change any of that."""

    def __init__(self) -> None:
        from quadriga.tracking.events import EventLog

        self.events = EventLog()
        self.trainer: RayPPOTrainer | None = None
        """Who trains now, or gets ready to."""
        self.worker_group_cls: Any = None
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

    def add_teacher_worker(self, config: Any) -> None:
        """The teachers that are local models, in the reference's pool or in their own."""
        if str(Role.Teacher) in placement_of(config).role_pool:
            from quadriga.workers import TeacherWorker

            self._add(config, Role.Teacher, TeacherWorker)

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

    def run(self, config: Any) -> bool:
        """Check, place and start everything, train, and leave nothing behind. False: nothing was left to do."""
        from quadriga.controller.calls import WorkersDied
        from quadriga.trainer.ppo.restarts import require_all_steps
        from quadriga.trainer.ppo.run_parts import run_parts

        enter_callers_folder()
        config = load_config(config)
        if _is_actor(config):
            keep_output(config.trainer.default_local_dir, "runner", 0)
        self.say(f"TaskRunner on {socket.gethostname()}, pid {os.getpid()}")
        restarted = partial(self.events.append, "restart")
        with self.first_pools(config) as pools, run_parts(config, restarted) as parts:
            if parts.nothing_left:
                self.say(parts.nothing_left)
                return False
            while True:
                trainer = None
                try:
                    with self.trainer_of(parts, pools) as trainer:
                        trainer.fit()
                        require_all_steps(trainer, parts.first.step if parts.first else 0)
                        return True
                except WorkersDied as death:
                    self.say(parts.go_on_after(death, trainer))

    @contextmanager
    def first_pools(self, config: Config) -> Iterator[Any]:
        """The roles of the run, and the pools of its first workers, whose processes import while this one reads the data."""
        pools = self.init_resource_pool_mgr(config)
        pools.check_resources()  # before anything expensive
        if config.trainer.executor == "ray":
            pools.start_early(PREPARATION)
        try:
            actor_rollout_cls, self.worker_group_cls = self.add_actor_rollout_worker(config)
            self.add_rollout_worker(config)
            self.add_critic_worker(config)
            self.add_reward_model_worker(config)
            self.add_ref_policy_worker(config, actor_rollout_cls)
            self.add_teacher_worker(config)
            yield pools
        finally:
            pools.shutdown()

    @contextmanager
    def trainer_of(self, parts: RunParts, pools: Any) -> Iterator[RayPPOTrainer]:
        """A trainer with workers of its own, at the step that the run goes on after; they are gone afterwards."""
        from quadriga.controller.calls import WorkersDied
        from quadriga.rewards import load_reward_manager, open_pool
        from quadriga.trainer.before_start import describe_workers
        from quadriga.trainer.ppo.episodes import Episodes
        from quadriga.trainer.ppo.journal import Journal
        from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer

        config = deepcopy(parts.config)  # what a live run is told to set is not what the next workers begin with
        if parts.restarts.deaths:  # the slots of the workers that are gone come back a little later
            pools = self.init_resource_pool_mgr(config)
            pools.wait_s = max(pools.wait_s, RESTART_WAIT_S)
        with open_pool(config) as pool, ExitStack() as opened:
            pool.check_row(parts.train_dataset[0])
            function = load_reward_manager(config, parts.tokenizer, 0, pool=pool)
            datasets = (parts.train_dataset, parts.val_dataset)
            episodes = Episodes.of(config, parts.tokenizer, datasets, str(parts.directory.logs / "agents.log"))
            if episodes is not None:
                opened.callback(episodes.close)
            trainer = self.trainer = RayPPOTrainer(
                config=config,
                tokenizer=parts.tokenizer,
                role_worker_mapping=self.role_worker_mapping,
                resource_pool_manager=pools,
                ray_worker_group_cls=self.worker_group_cls,
                reward_fn=function if parts.uses_function else None,
                val_reward_fn=function if parts.validates_by_function else None,
                train_dataset=parts.train_dataset,
                val_dataset=parts.val_dataset,
                tracking=Journal(config, parts.directory, self.events, parts.resumed_step, parts.began),
                checkpoints=parts.checkpoints,
                restarts=parts.restarts,
                episodes=episodes,
            )
            ready = None
            with trainer.watchdog():
                try:
                    self.say(describe_workers(trainer.init_workers(), pools.mapping, pools.resource_pool_spec))
                    if parts.start:
                        trainer.resume(parts.start)
                    ready = trainer
                    yield trainer
                except WorkersDied as death:
                    trainer.tracking.goes_on = parts.heal(death, ready)
                    raise
                finally:
                    trainer.shutdown()
                    with trainer.watched("shutdown"):
                        pool.close()  # here, not where its block ends: the watchdog still sees it

    def _add(self, config: Any, role: Role, worker_class: Any) -> None:
        self.role_worker_mapping[role] = worker_class
        self.mapping[role] = placement_of(config).role_pool[str(role)]


def _is_actor(config: Config) -> bool:
    """Whether this process is the runner's own, and not the one that its user has started."""
    if config.trainer.executor == "local":
        return False
    import ray

    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _runtime_env(config: Config) -> dict[str, Any]:
    """Defaults, then what the configuration implies, then what the user says in ray_kwargs.ray_init.runtime_env."""
    runtime_env = get_ppo_ray_runtime_env()
    if config.transfer_queue.enable:
        runtime_env["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
    runtime_env["env_vars"][CALLERS_FOLDER] = os.getcwd()
    if VERL_ALIAS in os.environ:
        runtime_env["env_vars"][VERL_ALIAS] = os.environ[VERL_ALIAS]
    if TRITON_CACHE in os.environ:
        runtime_env["env_vars"][TRITON_CACHE] = os.environ[TRITON_CACHE]
    user = dict(config.ray_kwargs.ray_init.get("runtime_env") or {})
    env_vars = {**runtime_env["env_vars"], **{k: str(v) for k, v in (user.pop("env_vars", None) or {}).items()}}
    return {**runtime_env, **user, "env_vars": env_vars}


def _start_runner(runner_class: Any, runtime_env: dict[str, Any]) -> Any:
    """The runner as an actor on this node, so that no other node that leaves can end it. It mostly waits, so it books no CPU."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Ray may have been started by others, without our defaults: the runner gets them, and its workers inherit them.
    # Two threads: `run`, and `news` beside it.
    options: dict[str, Any] = {"runtime_env": {"env_vars": runtime_env["env_vars"]}, "max_concurrency": 2}
    if not hasattr(runner_class, "remote"):
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        runner_class = ray.remote(runner_class)
        options.update(num_cpus=0, scheduling_strategy=here)
    return runner_class.options(**options).remote()


def command(arguments: list[str]) -> int:
    """`main` for a command line: exit code 0, or 1 after printing what went wrong (with the stack under `--debug`)."""
    return run_command(_run_hydra, arguments)


def _run_hydra(arguments: list[str]) -> int:
    arguments = screen_overrides(arguments, also_check=problems_here)
    file, rest = take_file(arguments)
    if file is not None:
        config = compose_file(file, rest)
        auto_set_device(config)
        run_ppo(config)
        return 0
    raised: list[BaseException] = []

    @hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
    def job(config: Any) -> None:
        """Hydra would print a line of its own above an error that goes through it, so none does."""
        if not raised:  # else an earlier job of a sweep has failed
            try:
                auto_set_device(config)
                run_ppo(config)
            except BaseException as error:
                raised.append(error)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's own errors reach us
    sys.argv = [sys.argv[0], *arguments]
    with hydra_errors():
        job()
    if raised:
        raise raised[0]
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
