"""What a supervised run writes down and shows: metrics, samples, phases, the live panel, the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from quadriga.tracking import EventLog, Phases, RunDirectory, Timeline, Tracking
from quadriga.tracking.console import LiveView
from quadriga.tracking.events import how_it_ended
from quadriga.tracking.steering import Steering
from quadriga.trainer.supervised.ranks import same_on_all_ranks


class Journal:
    """One object for everything that the steps leave behind; a context manager around them. On one process only.

    Attributes:
        keeps_samples: whether it is worth making any.
        steering: what `quadriga tell` told the run.

    Args:
        config: the checked configuration.
        directory: of the run.
        step, total_steps: where the run begins, and where it ends.
        resumed_step: the step that the loaded checkpoint was written after; None for a new run.
    """

    keeps_samples = True

    def __init__(
        self, config: Any, directory: RunDirectory, step: int, total_steps: int, resumed_step: int | None
    ) -> None:
        began = (
            time.time()
        )  # of the run, for whoever tells it something: that is possible once its files say that it lives
        self.directory = directory
        self.events = EventLog()
        self._trainer = config.trainer
        self._shows = "console" in config.trainer.logger
        self._view = LiveView(line_every=config.trainer.log_freq) if self._shows else None
        self._tracking = Tracking(config, self.directory, self.events, resumed_step)
        self._phases = Phases(Timeline(self.directory.timeline_file), self.events)
        if self._view is not None:
            self.events.listen(lambda event: self._view.update([event]))  # type: ignore[union-attr]
        record = partial(self.events.append, "steered")
        self.steering = Steering(directory.path, config, record, self.say, began, same_on_all_ranks)
        self._start = {"start_step": step, "total_steps": total_steps, "run_directory": str(self.directory.path)}

    def __enter__(self) -> Journal:
        names = {"project": self._trainer.project_name, "experiment": self._trainer.experiment_name}
        if self._view is not None:
            self._view.__enter__()
        self.events.append("start", {**names, **self._start})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.events.append("end", how_it_ended(error))
        if self._view is not None:
            self._view.__exit__(kind, error, at)
        self._tracking.close(failed=error is not None)

    def say(self, text: str) -> None:
        """Tell the user something, where the run's news are shown."""
        self.events.append("message", {"level": "info", "text": text})

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return self._phases(name)

    def begin_step(self, step: int) -> None:
        self._phases.start_step(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step, with the seconds of its phases."""
        self._tracking.log(step, {**metrics, **self._phases.take_timings()})

    def sync(self) -> None:
        """What was logged will survive a power cut."""
        self.directory.sync_metrics()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
        """Keep what the model said of some examples: `train` or `val`."""
        self.directory.write_samples(step, rows, kind)

    def conclude(self, model: Path) -> None:
        """The summary of the finished run, on disk and on the console."""
        from quadriga.tracking.summary import report

        report(self.directory, model, Console(quiet=not self._shows))


class NoJournal:
    """The journal of the other processes: it keeps nothing, and does what the first one is told."""

    keeps_samples = False

    def __init__(self, config: Any) -> None:
        self.steering = Steering(None, config, lambda told: None, self.say, share=same_on_all_ranks)

    def __enter__(self) -> NoJournal:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def say(self, text: str) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin_step(self, step: int) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def sync(self) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], kind: str) -> None: ...

    def conclude(self, model: Path) -> None: ...
