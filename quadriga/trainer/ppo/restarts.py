"""Going on after workers have died, inside the same driver: everything is built anew from the last checkpoint.

A rollout engine in a pool of its own needs less, see `engines`; its deaths are counted here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quadriga.controller.calls import WorkersDied
from quadriga.errors import QuadrigaError, RunStopped


@dataclass
class Restarts:
    """How often dead workers were replaced in a run, and may be.

    Args:
        at_most: more deaths than these end the run with the first of them.
        record: shows that workers were replaced (`number`, `at_most`, `text`).
    """

    at_most: int
    record: Callable[[dict[str, Any]], None] = lambda told: None
    deaths: list[WorkersDied] = field(default_factory=list)
    samples_again: int = 0
    """Samples that were generated again because their engine had died."""

    @property
    def left(self) -> int:
        return self.at_most - len(self.deaths)

    def count(self, death: WorkersDied, how_it_goes_on: str) -> None:
        self.deaths.append(death)
        number, of = len(self.deaths), self.at_most
        text = f"{death.what}\nrestart {number} of at most {of}: {how_it_goes_on}"
        self.record({"number": number, "at_most": of, "text": text})

    def figures(self, samples_again: int = 0) -> dict[str, float]:
        """`samples_again`: of the attempt that is under way."""
        return {
            "training/restarts": float(len(self.deaths)),
            "training/samples_generated_again": float(self.samples_again + samples_again),
        }


def require_all_steps(trainer: Any, begun_after: int) -> None:
    """QuadrigaError unless every step after `begun_after` was done and recorded: a run must not end well with work undone."""
    if trainer.config.trainer.val_only:
        return
    if trainer.step < trainer.total_steps:
        raise RunStopped(
            f"stopped after step {trainer.step} of {trainer.total_steps}, as asked",
            "the same command goes on from there",
        )
    recorded = trainer.tracking.directory.recorded_steps()
    missing = [step for step in range(begun_after + 1, trainer.total_steps + 1) if step not in recorded]
    if missing:
        raise QuadrigaError(
            f"{trainer.tracking.directory.metrics_file} lacks {len(missing)} steps, the first is {missing[0]}",
            "did another program change the file? The checkpoints hold the state after every step",
        )


def summary(deaths: list[WorkersDied]) -> WorkersDied:
    """The first death; with others after it, how many."""
    first = deaths[0]
    if len(deaths) == 1:
        return first
    return WorkersDied(
        f"{first.what}\nand again after {len(deaths) - 1} restarts, at last: {deaths[-1].what.splitlines()[0]}",
        f"{first.fix}; the same command goes on after the last checkpoint, trainer.max_restarts allows more restarts",
    )
