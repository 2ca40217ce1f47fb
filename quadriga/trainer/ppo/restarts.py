"""Going on after workers have died, inside the same driver: everything is built anew from the last checkpoint.

A rollout engine in a pool of its own needs less, see `rollout_pool`; its deaths are counted here too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from quadriga.checkpoint.checkpoint import Checkpoint
from quadriga.checkpoint.store import CheckpointStore
from quadriga.controller.calls import WorkersDied
from quadriga.errors import QuadrigaError


@dataclass
class Restarts:
    """How often dead workers were replaced in a run, and may be.

    Args:
        at_most: more deaths than these end the run with the first of them.
        say: tells the user.
    """

    at_most: int
    say: Callable[[str], None]
    deaths: list[WorkersDied] = field(default_factory=list)
    samples_again: int = 0
    """Samples that were generated again because their engine had died."""

    @property
    def left(self) -> int:
        return self.at_most - len(self.deaths)

    def count(self, death: WorkersDied, how_it_goes_on: str) -> None:
        self.deaths.append(death)
        self.say(f"{death.what}\nrestart {len(self.deaths)} of at most {self.at_most}: {how_it_goes_on}")

    def figures(self) -> dict[str, float]:
        return {
            "training/restarts": float(len(self.deaths)),
            "training/samples_generated_again": float(self.samples_again),
        }


Attempt = Callable[[Checkpoint | None, Restarts], AbstractContextManager[Any]]
"""`attempt(checkpoint, restarts)`: a trainer with workers of its own that goes on from a checkpoint (None: the start)."""


def train_to_the_end(
    attempt: Attempt, checkpoints: CheckpointStore, first: Checkpoint | None, restarts: Restarts
) -> None:
    """Train; when workers die, begin again after the last checkpoint with new ones.

    A death before the first training has begun is not healed: what cannot start once will not start twice. Neither is
    an exception, which would come again.

    Args:
        first: where the run begins; a checkpoint that it writes takes its place.
    """
    found = first
    while True:
        trainer = None
        try:
            with attempt(found, restarts) as trainer:
                trainer.fit()
                require_all_steps(trainer, first.step if first else 0)
                return
        except WorkersDied as death:
            if trainer is None and not restarts.deaths:
                raise
            if not restarts.left or (trainer is not None and trainer.stop_requested):
                deaths = [*restarts.deaths, death]
                raise _summary(deaths) from deaths[0]
            found = checkpoints.find("auto") if checkpoints.has_written else first
            place = f"after step {found.step}" if found else "from the start, for want of a checkpoint"
            restarts.count(death, f"new workers go on {place}")


def require_all_steps(trainer: Any, begun_after: int) -> None:
    """QuadrigaError unless every step after `begun_after` was done and recorded: a run must not end well with work undone."""
    if trainer.config.trainer.val_only:
        return
    if trainer.step < trainer.total_steps:
        raise QuadrigaError(
            f"stopped after step {trainer.step} of {trainer.total_steps}, as asked",
            "the same command goes on from there",
        )
    recorded = {line["step"] for line in trainer.tracking.directory.read_metrics()}
    missing = [step for step in range(begun_after + 1, trainer.total_steps + 1) if step not in recorded]
    if missing:
        raise QuadrigaError(
            f"{trainer.tracking.directory.metrics_file} lacks {len(missing)} steps, the first is {missing[0]}",
            "did another program change the file? The checkpoints hold the state after every step",
        )


def _summary(deaths: list[WorkersDied]) -> WorkersDied:
    """The first death; with others after it, how many."""
    first = deaths[0]
    if len(deaths) == 1:
        return first
    return WorkersDied(
        f"{first.what}\nand again after {len(deaths) - 1} restarts, at last: {deaths[-1].what.splitlines()[0]}",
        f"{first.fix}; the same command goes on after the last checkpoint, trainer.max_restarts allows more restarts",
    )
