"""`verl.trainer.ppo.ray_trainer.RayPPOTrainer`: the driver of a run, for recipes that subclass it.

Two kinds of recipes meet here. One overrides what a step does in Quadriga's words (`validate`, `add_advantages`, `update`, …) and
keeps `fit`: then Quadriga's own trainer conducts the run, and calls the override. The other has a `fit` of verl's with changes in
it, or overrides one of verl's own parts of a step (`_compute_old_log_prob`, `_get_gen_batch`, …): then the worker groups and
the rollout manager answer verl's calls, in `fit_as_verl` or in the recipe's own `fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

from quadriga.checkpoint.store import CheckpointStore
from quadriga.compat.verl.batch_parts import BatchParts
from quadriga.compat.verl.configs import as_checked
from quadriga.compat.verl.datasets import collate_fn as plain_collate
from quadriga.compat.verl.datasets import create_rl_dataset, state_of
from quadriga.compat.verl.fit_as_verl import fit_as_verl
from quadriga.compat.verl.utilities import RECORDERS
from quadriga.compat.verl.whole_config import completed
from quadriga.compat.verl.worker_groups import RolloutManagerOfVerls, TrainLoaderOfVerls, WorkerGroupOfVerls
from quadriga.compat.verl.workers import plain_class
from quadriga.config import Config
from quadriga.config.needs import need_critic, need_reference_policy, need_reward_model
from quadriga.rewards import load_reward_manager
from quadriga.tracking.run_directory import RunDirectory
from quadriga.trainer.ppo.episodes import Episodes
from quadriga.trainer.ppo.journal import Journal
from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer as _RayPPOTrainer

PARTS_OF_A_STEP = (
    "_balance_batch",
    "_compute_old_log_prob",
    "_compute_or_extract_reward",
    "_compute_ref_log_prob",
    "_compute_reward_colocate",
    "_compute_values",
    "_get_gen_batch",
    "_log_rollout_data",
    "_start_profiling",
    "_stop_profiling",
    "_update_actor",
    "_update_critic",
)
"""Methods of verl's that its `fit` calls: where a recipe has its own, `fit_as_verl` conducts the run, which calls them."""
ALSO_CALLED = ("_create_dataloader", "_load_checkpoint", "_save_checkpoint", "_validate")
"""Those that are called whoever conducts the run."""
NEVER_CALLED = (
    "_dump_generations",
    "_init_async_rollout",
    "_maybe_log_val_generations",
    "_maybe_log_val_generations_to_wandb",
    "_pad_batch_to_divisor",
    "_validate_config",
    "attach_async_rollout",
)
"""Those that verl has or had, and that nothing here would call."""


class _Own(_RayPPOTrainer):
    """Quadriga's trainer behind a recipe's: it calls what the recipe overrides."""

    follows_verl = False
    """Whether a loop of verl's kind conducts the run."""
    updates = 0
    """Its updates of the actor since the run began: the version of the weights."""
    _published = -1

    def take_overrides(self, outer: RayPPOTrainer) -> None:
        for name in _public_methods():
            own = getattr(type(outer), name)
            if own is not getattr(RayPPOTrainer, name):
                setattr(self, name, MethodType(own, outer))
        for theirs, ours in (("_validate", "validate"), ("_save_checkpoint", "save")):
            own = getattr(type(outer), theirs)
            if own is not getattr(RayPPOTrainer, theirs):
                setattr(self, ours, MethodType(own, outer))

    def bring_weights(self) -> None:
        """In a loop of verl's kind: the engines take the weights as they are, if they have not."""
        if not self.follows_verl or self._published == self.updates:
            return
        if self._published < 0:
            self.tracking.begin(self.config, self.step, self.total_steps)
            self.saver.rehearse(self.state_dict())
        with self.phase("update_weights"):
            self.crew.hand_over_weights(self.updates, self.stream.router)
        self.stream.published(self.updates, version=self.updates)
        self._published = self.updates

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Figures of a step that a loop of verl's kind tells; a checkpoint of it is complete now."""
        self.tracking.log(step, self.timings() | numbers)
        self.saver.step_recorded()


class RayPPOTrainer(BatchParts):
    """The driver of a run, with verl's constructor; run directory, metrics and checkpoints are made here.

    `own` is Quadriga's trainer; what this class has not is looked up there.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Any,
        resource_pool_manager: Any,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        **own: Any,
    ) -> None:
        checked = as_checked(config)
        data, self._opened = checked.data, ExitStack()
        self.config = config if isinstance(config, Config) else completed(config)
        self.tokenizer, self.processor, self.device_name = tokenizer, processor, device_name
        self.resource_pool_manager, self.hybrid_engine, self.async_rollout_mode = resource_pool_manager, True, True
        if ray_worker_group_cls is None:
            from quadriga.controller import RayWorkerGroup as ray_worker_group_cls
        if train_dataset is None:
            train_dataset = create_rl_dataset(
                data.train_files, self.config.data, tokenizer, processor, True, data.train_max_samples
            )
        if val_dataset is None:
            val_dataset = create_rl_dataset(
                data.val_files, self.config.data, tokenizer, processor, False, data.val_max_samples
            )
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        by_function = not checked.reward_model.enable or checked.custom_reward_function.path is not None
        if reward_fn is None and by_function:
            reward_fn = load_reward_manager(checked, tokenizer, 0)
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn or reward_fn
        self._conducted = False
        self.directory: RunDirectory | None = None
        self.found: Any = None
        if "tracking" not in own:
            own |= self._open_directory(checked)
        if "episodes" not in own:
            own["episodes"] = self._episodes(checked)
        self.own = _Own(
            checked,
            tokenizer,
            {role: plain_class(worker_class) for role, worker_class in role_worker_mapping.items()},
            resource_pool_manager,
            ray_worker_group_cls,
            reward_fn=reward_fn,
            val_reward_fn=self.val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            **own,
        )
        self.own.take_overrides(self)
        self.use_critic, self.use_rm = need_critic(checked), need_reward_model(checked)
        self.use_reference_policy = need_reference_policy(checked)
        self.ref_in_actor = checked.actor_rollout_ref.model.lora_rank > 0
        self.total_training_steps = self.own.total_steps
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)

    # ---- what recipes override, and what conducts the run ----

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if dead := [name for name in NEVER_CALLED if name in cls.__dict__]:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(dead)}, which nothing in Quadriga's alias of verl calls: override "
                f"{', '.join((*ALSO_CALLED, *PARTS_OF_A_STEP))}, or fit (docs/coming_from.md)"
            )
        if isinstance(cls.__dict__.get("fit"), FunctionType):
            cls.fit = _conducted(cls.__dict__["fit"])  # type: ignore[method-assign]

    def fit(self) -> None:
        """Train to the end, and leave no worker behind where the trainer was built alone."""
        own_parts = [n for n in PARTS_OF_A_STEP if getattr(type(self), n) is not getattr(RayPPOTrainer, n)]
        with self._conducted_by(verls_loop=bool(own_parts)):
            if own_parts:
                fit_as_verl(self)
            else:
                _RayPPOTrainer.fit(self.own)

    def init_workers(self) -> Any:
        """Start the workers; where there is a checkpoint, the run goes on after it."""
        reports = _RayPPOTrainer.init_workers(self.own)
        if self.directory is not None and self.found:
            self.own.resume(self.found)
            self.own.updates = self.own.step
        crew = self.own.crew
        self.actor_rollout_wg = WorkerGroupOfVerls(self, crew.actor)
        self.ref_policy_wg = WorkerGroupOfVerls(self, crew.reference)
        if crew.critic is not None:
            self.critic_wg = WorkerGroupOfVerls(self, crew.critic)
        if crew.reward_model is not None:
            self.rm_wg = WorkerGroupOfVerls(self, crew.reward_model)
        self.async_rollout_manager = self.checkpoint_manager = RolloutManagerOfVerls(self)
        return reports

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        """`train_dataloader`: dicts of columns, an epoch at a time."""
        if train_sampler is not None:
            self.own.loader.sampler = state_of(train_sampler)
        extra = collate_fn if collate_fn is not plain_collate else None
        self.train_dataloader = TrainLoaderOfVerls(self.own.loader, extra)

    def _validate(self, merged: bool = False) -> dict[str, float]:
        """Figures of the policy as it is, on the validation set."""
        self.own.bring_weights()
        return _RayPPOTrainer.validate(self.own)

    def _save_checkpoint(self) -> None:
        _RayPPOTrainer.save(self.own)

    def _load_checkpoint(self) -> int:
        """The step after which the run goes on: its checkpoint was loaded when the workers were started."""
        self.global_steps = self.found.step if self.found else 0
        return self.global_steps

    # ---- a run from begin to end ----

    def _open_directory(self, checked: Config) -> dict[str, Any]:
        """Files of the run, and where it goes on from."""
        self.directory = RunDirectory(checked.trainer.default_local_dir)
        self.directory.lock()
        self._opened.callback(self.directory.unlock)
        store = CheckpointStore(self.directory.checkpoints, checked.trainer.max_actor_ckpt_to_keep)
        self.found = store.find(checked.trainer.resume_mode, checked.trainer.resume_from_path)
        resumed = self.found.step if self.found else None
        RECORDERS[str(self.directory.path)] = lambda step, numbers: self.own.record(step, numbers)
        return {"tracking": Journal(checked, self.directory, None, resumed), "checkpoints": store}

    def _episodes(self, checked: Config) -> Episodes | None:
        log = None if self.directory is None else str(self.directory.logs / "agents.log")
        episodes = Episodes.of(checked, self.tokenizer, (self.train_dataset, self.val_dataset), log)
        if episodes is not None:
            self._opened.callback(episodes.close)
        return episodes

    @contextmanager
    def _conducted_by(self, verls_loop: bool) -> Iterator[None]:
        """A run, by one loop or the other; no worker is left behind where the trainer was built alone."""
        self.own.follows_verl, outermost = verls_loop, not self._conducted
        self._conducted = True
        try:
            yield
            if outermost:
                self.own.saver.finish()
        finally:
            if outermost and self.directory is not None:
                self.own.shutdown()
                RECORDERS.pop(str(self.directory.path), None)
                self._opened.close()

    # ---- names ----

    @property
    def global_steps(self) -> int:
        """The step at hand."""
        return self.own.step

    @global_steps.setter
    def global_steps(self, step: int) -> None:
        self.own.step = step
        self.own.tracking.phases.start_step(step)

    @property
    def kl_ctrl_in_reward(self) -> Any:
        return self.own.kl_controller

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("own")
        if own is not None and not name.startswith("_") and hasattr(own, name):
            return getattr(own, name)
        raise AttributeError(
            f"{type(self).__name__}.{name} has no counterpart in Quadriga's alias of verl, or is there only after init_workers() "
            "(docs/coming_from.md)"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get("own")
        if name in ("metrics", "step") and own is not None:
            setattr(own, name, value)
        else:
            super().__setattr__(name, value)


def _public_methods() -> list[str]:
    """What Quadriga's trainer does for a step or a run, by name."""
    kept = {"fit", "init_workers", *dir(object)}
    functions = {name for name, value in vars(_RayPPOTrainer).items() if isinstance(value, FunctionType)}
    return sorted(name for name in functions if not name.startswith("_") and name not in kept)


def _delegate(name: str) -> Callable[..., Any]:
    function = getattr(_RayPPOTrainer, name)

    @wraps(function)
    def call(self: RayPPOTrainer, *args: Any, **kwargs: Any) -> Any:
        return function(self.own, *args, **kwargs)

    return call


for _name in _public_methods():
    setattr(RayPPOTrainer, _name, _delegate(_name))


def _conducted(fit: Any) -> Any:
    """A recipe's own `fit`, from begin to end of the run."""

    @wraps(fit)
    def conducted(self: RayPPOTrainer, *args: Any, **kwargs: Any) -> Any:
        with self._conducted_by(verls_loop=True):
            return fit(self, *args, **kwargs)

    return conducted
