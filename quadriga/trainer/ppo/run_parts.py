"""What a run consists of besides its workers: tokenizer, data, scoring, its directory, and the checkpoint it goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quadriga.agents.load import SINGLE_TURN, plain_name
from quadriga.checkpoint.checkpoint import Checkpoint
from quadriga.checkpoint.store import CheckpointStore
from quadriga.config.load import as_plain_dict
from quadriga.config.run_name import nothing_left, refuse_another_task
from quadriga.config.schema import Config
from quadriga.controller.calls import WorkersDied
from quadriga.data import create_rl_dataset, create_rl_loader
from quadriga.models.load import load_tokenizer
from quadriga.rewards import check_sources, check_truths, has_scorers
from quadriga.tracking.run_directory import RunDirectory
from quadriga.trainer.ppo.restarts import Restarts, summary

SAME_TASK = ("actor_rollout_ref.model.path", "data.train_files")
"""Keys that must not differ when a run goes on by itself: else it is another run in the same directory."""


@dataclass
class RunParts:
    """All of it, checked. It outlives the workers: when they die, others are built around the same parts."""

    config: Config
    tokenizer: Any
    train_dataset: Any
    val_dataset: Any
    uses_function: bool
    """Whether a reward function scores training samples."""
    validates_by_function: bool
    directory: RunDirectory
    checkpoints: CheckpointStore
    first: Checkpoint | None
    """Where the run began."""
    restarts: Restarts
    began: float
    """When the run was started or resumed, in seconds since 1970."""
    start: Checkpoint | None = None
    """Where the next workers begin."""

    @property
    def nothing_left(self) -> str:
        """What to say if the run was at or after its last step already; else empty."""
        total = self.config.trainer.total_training_steps
        if total is None:
            loader = create_rl_loader(self.config.data, self.train_dataset, self.tokenizer)
            total = len(loader) * self.config.trainer.total_epochs
        if self.first is None or self.first.step < total or self.config.trainer.val_only:
            return ""
        return nothing_left(self.first.path, self.first.step, total)

    @property
    def resumed_step(self) -> int | None:
        """The step that the next workers go on after; None for a new run, -1 for one that begins again."""
        return self.start.step if self.start else -1 if self.restarts.deaths else None

    def heal(self, death: WorkersDied, trainer: Any) -> bool:
        """Note that workers have died under `trainer`, None before it was ready. False: no others may take their place.

        A death before the first training has begun is not healed: what cannot start once will not start twice.
        """
        if death in self.restarts.deaths:
            return True
        has_begun = trainer is not None or bool(self.restarts.deaths)
        if not has_begun or not self.restarts.left or (trainer is not None and trainer.stop_requested):
            return False
        self.restarts.count(death, "all workers are made anew")
        return True

    def go_on_after(self, death: WorkersDied, trainer: Any) -> str:
        """Choose from where new workers go on, and say so. Raises the death where none may."""
        if not self.heal(death, trainer):
            deaths = [*self.restarts.deaths, death]
            raise summary(deaths) from (deaths[0] if len(deaths) > 1 else None)
        self.start = self.checkpoints.find("auto") if self.checkpoints.has_written else self.first
        place = f"after step {self.start.step}" if self.start else "from the start, for want of a checkpoint"
        return f"new workers go on {place}"


@contextmanager
def run_parts(config: Config, record_restart: Callable[[dict[str, Any]], None]) -> Iterator[RunParts]:
    """The parts of a run; its directory is nobody else's meanwhile."""
    model, data = config.actor_rollout_ref.model, config.data
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
    # A reward function of the user's own needs no data source.
    source = None if config.custom_reward_function.path is None else "custom"
    train_dataset = create_rl_dataset(data.train_files, data, tokenizer, None, True, data.train_max_samples, source)
    val_dataset = create_rl_dataset(data.val_files, data, tokenizer, None, False, data.val_max_samples, source)
    uses_function = not config.reward_model.enable or config.custom_reward_function.path is not None
    scored = [*getattr(train_dataset, "sources", ()), *getattr(val_dataset, "sources", ())] if uses_function else []
    if (
        plain_name(config.actor_rollout_ref.rollout.agent.default_agent_loop) == SINGLE_TURN
    ):  # agents may score themselves
        check_sources(config, scored)
        if not config.reward_model.enable:
            check_truths(config, (train_dataset, val_dataset))
    directory = RunDirectory(config.trainer.default_local_dir)
    directory.lock()  # from here on nobody else writes checkpoints into it, or deletes any
    try:
        checkpoints = CheckpointStore(directory.checkpoints, config.trainer.max_actor_ckpt_to_keep)
        first = checkpoints.find(config.trainer.resume_mode, config.trainer.resume_from_path)
        if first and config.trainer.resume_mode == "auto":
            refuse_another_task(first.read_state()["config"], as_plain_dict(config), SAME_TASK, directory.path)
        yield RunParts(
            config=config,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            uses_function=uses_function,
            validates_by_function=uses_function or has_scorers(config, getattr(val_dataset, "sources", ())),
            directory=directory,
            checkpoints=checkpoints,
            first=first,
            restarts=Restarts(config.trainer.max_restarts, record_restart),
            began=time.time(),
            start=first,
        )
    finally:
        directory.unlock()
