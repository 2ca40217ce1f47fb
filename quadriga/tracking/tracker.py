"""`Tracking`: one call a step, and the metrics are in metrics.jsonl, in every sink and on the console."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from quadriga.tracking.alarms import Alarms
from quadriga.tracking.events import EventLog
from quadriga.tracking.figures import plain_metrics
from quadriga.tracking.run_directory import RunDirectory
from quadriga.tracking.run_record import RunRecord, about_training
from quadriga.tracking.run_state import Validation, is_validation_accuracy, note_validations
from quadriga.tracking.sinks import Sink, SinkSetup, check_sinks, open_sinks

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 30.0
_GIVE_UP_AFTER = 3
_PAGE_EVERY_S = 30.0


class Tracking:
    """Records a run. `metrics.jsonl` is written before `log` returns; sinks work in the background.

    A sink that fails while the run goes on is reported, and left out after three failures in a row: a lost connection
    must not end a training run whose metrics are safe on disk.

    Args:
        config: the checked configuration of an RL or SFT run, a dataclass.
        run_directory: where the run's files go. It is taken over (`begin`), and the configuration is written to it.
        events: news for the console; made here if not given.
        resumed_step: the step that the loaded checkpoint was written after, None for a new run.
    """

    def __init__(
        self,
        config: Any,
        run_directory: RunDirectory,
        events: EventLog | None = None,
        resumed_step: int | None = None,
    ) -> None:
        self.run_directory = run_directory
        self.events = events if events is not None else EventLog()
        self._warned: set[str] = set()
        self._next_page = 0.0
        plain = asdict(config)
        trainer = config.trainer
        check_sinks(trainer.logger)
        if missing := run_directory.begin(resumed_step):
            self._warn(
                f"{run_directory.metrics_file} lacks {len(missing)} of the {resumed_step} steps that were done, the first is "
                f"step {missing[0]}: it was cut or changed after they were recorded. The weights have them; curves and "
                "summaries do not"
            )
        try:
            run_directory.write_config(plain)
            self._alarms = Alarms(run_directory.metrics_lines())
            validations: dict[str, Validation] = {}
            for line in run_directory.metrics_lines(is_validation_accuracy):
                note_validations(validations, line["step"], line)
            setup = SinkSetup(run_directory, trainer.project_name, trainer.experiment_name, plain, resumed_step)
            self._sinks = [_Background(n, s, self._warn) for n, s in open_sinks(trainer.logger, setup).items()]
            about = about_training(config)
            self._record = RunRecord(run_directory.path, about, max(resumed_step or 0, 0), validations)
        except BaseException:
            run_directory.close()
            raise
        self._stop_listening = self.events.listen(self._record.take)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record all metrics of a step. A value that is not a finite number becomes null, with a warning.

        Raises:
            ValueError: this step, or a later one, was logged before.
        """
        now = time.time()
        values, problems = plain_metrics(metrics)
        values |= self._alarms.metrics_of(step, values)
        self.run_directory.append_metrics(step, values, now)
        for name, problem in problems.items():
            if name not in self._warned:
                self._warned.add(name)
                self._warn(f"step {step}: the metric {name} is {problem}, not a finite number; recorded as null")
        finite = {name: value for name, value in values.items() if value is not None}
        for sink in self._sinks:
            sink.log(step, finite)
        for alarm in self._alarms.raised:
            self.events.append("alarm", {"step": step, "name": alarm.name, "text": alarm.text, "look": alarm.look})
        self.events.append("step", {"step": step, "metrics": values})
        self._write_page()

    def close(self, failed: bool = False) -> None:
        """Let the sinks finish, for half a minute at most, and give the run directory back."""
        for sink in self._sinks:
            sink.close(failed)
        self._sinks = []
        self._stop_listening()
        self._record.close()
        self.run_directory.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        self.close(failed=error_type is not None)

    def _write_page(self) -> None:
        """`summary.html`, from the first step on; renewed so seldom that it takes less than a hundredth of the time."""
        began = time.monotonic()
        if began < self._next_page:
            return
        from quadriga.tracking.summary import write_page

        try:
            write_page(self.run_directory)
        except (
            Exception
        ) as error:  # a full disk, a sample that somebody has edited: a picture is no reason to end a run
            self._warn(f"summary.html cannot be written: {type(error).__name__}: {error}")
        now = time.monotonic()
        self._next_page = now + max(_PAGE_EVERY_S, 100 * (now - began))

    def _warn(self, text: str) -> None:
        _LOG.warning("%s", text)
        self.events.append("message", {"level": "warning", "text": text})


class _Background:
    """Feeds a sink from its own thread, so that a slow network never slows a step."""

    def __init__(self, name: str, sink: Sink, warn: Callable[[str], None]) -> None:
        self._name = name
        self._sink = sink
        self._warn = warn
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1000)
        self._failures = 0
        self._skipped = False
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._failures >= _GIVE_UP_AFTER:
            return
        try:
            self._waiting.put_nowait(lambda: self._sink.log(step, metrics))
        except queue.Full:
            if not self._skipped:
                self._skipped = True
                self._warn(f"{self._name} is too slow; from step {step} on it lacks steps (metrics.jsonl has them all)")

    def close(self, failed: bool) -> None:
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        try:
            self._waiting.put(lambda: self._sink.close(failed), timeout=_CLOSE_TIMEOUT_S)
            self._waiting.put(None, timeout=max(deadline - time.monotonic(), 0.1))
            self._thread.join(max(deadline - time.monotonic(), 0.1))
        except queue.Full:
            pass  # said below
        if self._thread.is_alive():
            self._warn(f"{self._name} did not finish within {_CLOSE_TIMEOUT_S:.0f} s; its last steps may be missing")

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                job()
                self._failures = 0
            except Exception as error:  # whatever a package may raise: reported, and the run goes on
                self._failures += 1
                end = "; it is left out from now on" if self._failures == _GIVE_UP_AFTER else ""
                self._warn(f"{self._name} failed: {type(error).__name__}: {error}{end}")
