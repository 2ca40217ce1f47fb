"""What a run writes down: its metrics, its samples, its phases. The driver's side of `quadriga.tracking`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from quadriga.config.schema import Config
from quadriga.tracking.events import EventLog, how_it_ended
from quadriga.tracking.phases import Phases
from quadriga.tracking.run_directory import RunDirectory
from quadriga.tracking.run_record import RESTART
from quadriga.tracking.steering import Steering
from quadriga.tracking.timeline import Timeline
from quadriga.tracking.tracker import Tracking

KEPT_SAMPLES = 1024
"""Rows of a step or a validation that the run directory keeps; `trainer.rollout_data_dir` has them all."""


class Journal:
    """One object for everything that a step leaves behind.

    Attributes:
        goes_on: whether new workers, with a journal of their own, take the place of those that died: the end of this one is
            not the run's.

    Args:
        config: the checked configuration.
        directory: where the run's files go.
        events: news for the console.
        resumed_step: the step that the loaded checkpoint was written after; None for a new run, -1 for one that begins
            again without a checkpoint.
        since: when the run was started or resumed, in seconds since 1970.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        events: EventLog | None = None,
        resumed_step: int | None = None,
        since: float = 0.0,
    ) -> None:
        self.events = events if events is not None else EventLog()
        self.directory = directory
        self.tracking = Tracking(config, self.directory, self.events, resumed_step)
        self.phases = Phases(Timeline(self.directory.timeline_file), self.events)
        trainer = config.trainer
        record = partial(self.events.append, "steered")
        self.steering = Steering(directory.path, config, record, self.say, since)
        self.goes_on = False
        self._sample_folders = {"train": trainer.rollout_data_dir, "val": trainer.validation_data_dir}
        self._shown_val_rows = trainer.log_val_generations

    def begin(self, config: Config, step: int, total_steps: int) -> None:
        self.events.append(
            "start",
            {
                "project": config.trainer.project_name,
                "experiment": config.trainer.experiment_name,
                "total_steps": total_steps,
                "start_step": step,
                "run_directory": str(self.directory.path),
            },
        )

    def say(self, text: str) -> None:
        """Tell the user something, on the terminal that started the run."""
        self.events.append("message", {"level": "info", "text": text})

    def warn(self, text: str) -> None:
        """Tell the user something that should not be."""
        self.events.append("message", {"level": "warning", "text": text})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tracking.log(step, metrics)

    def samples(self, step: int, rows: list[dict[str, Any]], kind: str) -> None:
        """Keep rows of a step (`train`) or of a validation (`val`): some in the run directory, all where the user asks."""
        self.directory.write_samples(step, rows[:KEPT_SAMPLES], kind)
        if self._sample_folders[kind]:
            self.directory.write_samples(step, rows, kind, self._sample_folders[kind])
        if kind == "val":
            for row in rows[: self._shown_val_rows]:
                text = f"{row['prompt']} → {row['response']}   (truth {row['ground_truth']}, score {row['score']:g})"
                self.say(text)

    def checkpoint_written(self, began: float, seconds: float) -> None:
        """A checkpoint was written beside the steps, from `began` (seconds since 1970) on."""
        self.phases.record("write_checkpoint", began, seconds, "checkpoint")

    def close(self, failed: bool) -> None:
        if self.goes_on:
            self.events.append("phase", {"step": self.phases.step, "open": [RESTART]})
            self.tracking.close()
            return
        error = sys.exception()  # the one that ends the run, if this is called because of it
        ended = how_it_ended(error if failed else None)
        self.events.append("end", ended if error or not failed else {"status": "failed", "error": ""})
        self.tracking.close(failed)
