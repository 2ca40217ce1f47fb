"""Where metrics go besides `metrics.jsonl`: the names that `trainer.logger` may hold.

`console` is the live view that the driver shows (see `console.py`); the others are packages that are imported only when
they are asked for. `check_sinks` refuses, before anything starts, a name that is unknown or whose package is missing.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quadriga.atomic_file import write_atomically
from quadriga.errors import ConfigError
from quadriga.tracking.run_directory import RunDirectory


class Sink(Protocol):
    """Takes the finite metrics of each step, in order; used by one thread."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


@dataclass(frozen=True)
class SinkSetup:
    """What a sink may need to know about the run.

    Attributes:
        config: the whole configuration as plain nested dicts.
        resumed_step: last step of the run that is continued, None for a new one.
    """

    run_directory: RunDirectory
    project: str
    experiment: str
    config: Mapping[str, Any]
    resumed_step: int | None

    def remembered_id(self, sink: str, make: Callable[[], str]) -> tuple[str, bool]:
        """This run's id at a service, kept in the run directory so that a resumed run continues the same one there.

        Returns:
            The id, and whether `make` has just made it.
        """
        path = self.run_directory.path / "sinks.json"
        ids = json.loads(path.read_bytes()) if path.exists() else {}
        if sink in ids:
            return ids[sink], False
        ids[sink] = make()
        write_atomically(path, json.dumps(ids).encode())
        return ids[sink], True


class TensorBoardSink:
    """Event files in `<run directory>/tensorboard/`, written without the help of torch or tensorflow."""

    def __init__(self, setup: SinkSetup) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(setup.run_directory.path / "tensorboard"))
        if setup.resumed_step is not None:  # tells TensorBoard to forget the steps that come again
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=setup.resumed_step + 1, wall_time=time.time(), session_log=restart))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandbSink:
    """One run of Weights & Biases; its local files lie in the run directory."""

    def __init__(self, setup: SinkSetup) -> None:
        import wandb

        run_id, _ = setup.remembered_id("wandb", lambda: uuid.uuid4().hex[:10])
        try:
            self._run = wandb.init(
                project=setup.project,
                name=setup.experiment,
                id=run_id,
                resume="allow",
                dir=str(setup.run_directory.path),
                config=dict(setup.config),
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"trainer.logger has wandb, which did not start: {error}",
                "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to keep the data here",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowSink:
    """One MLflow run, on the server that MLFLOW_TRACKING_URI names, else in `mlflow.db` beside the project's runs."""

    def __init__(self, setup: SinkSetup) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{setup.run_directory.path.parent / 'mlflow.db'}"
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self._run_id, is_new = setup.remembered_id("mlflow", lambda: self._create_run(setup))
            if is_new:
                params = [Param(_mlflow_name(key), str(value)[:500]) for key, value in _flat(setup.config)]
                for start in range(0, len(params), 100):  # a request may hold 100
                    self._client.log_batch(self._run_id, params=params[start : start + 100])
            else:
                self._client.update_run(self._run_id, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(
                f"trainer.logger has mlflow, which did not start at {uri}: {error.message}",
                "set MLFLOW_TRACKING_URI to a server that can be reached, or take mlflow out of trainer.logger",
            ) from error

    def _create_run(self, setup: SinkSetup) -> str:
        experiment = self._client.get_experiment_by_name(setup.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(setup.project)
        return self._client.create_run(number, run_name=setup.experiment).info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        batch = [self._metric(_mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        for start in range(0, len(batch), 1000):  # a request may hold 1000
            self._client.log_batch(self._run_id, metrics=batch[start : start + 1000])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


SINKS: dict[str, Callable[[SinkSetup], Sink] | None] = {
    "console": None,  # drawn by the driver from the event log
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}


def check_sinks(names: Iterable[str]) -> None:
    """Refuse names of `trainer.logger` that cannot work, without importing anything heavy.

    Raises:
        ConfigError: unknown, with the known names; or its package is missing, with the command that installs it.
    """
    for what, fix in sink_problems(names):
        raise ConfigError(what, fix)


def sink_problems(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Why names of `trainer.logger` cannot work on this machine, each with its fix."""
    for name in names:
        if name not in SINKS:
            near = difflib.get_close_matches(name, SINKS, n=1)
            yield (
                f"trainer.logger has the unknown sink {name!r}.",
                (f"did you mean {near[0]!r}? " if near else "") + f"known sinks: {', '.join(SINKS)}",
            )
        elif SINKS[name] is not None and importlib.util.find_spec(name) is None:
            yield (
                f"trainer.logger has {name}, but the package {name} is not installed.",
                f"pip install 'quadriga[{name}]', or take {name} out of trainer.logger",
            )
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI") and not importlib.util.find_spec("sqlalchemy"):
        yield (
            "trainer.logger has mlflow, but no server is set, and the slim MLflow package cannot store runs itself.",
            "set MLFLOW_TRACKING_URI=http://… to your server, or pip install mlflow to keep runs in a local file",
        )


def open_sinks(names: Iterable[str], setup: SinkSetup) -> dict[str, Sink]:
    """The sinks of these names (checked ones), started: all, or none and the error. `console` has none here."""
    opened: dict[str, Sink] = {}
    try:
        for name in names:
            make = SINKS[name]
            if make is not None and name not in opened:
                opened[name] = make(setup)
    except BaseException:
        for sink in opened.values():
            sink.close(failed=True)
        raise
    return opened


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _mlflow_name(name: str) -> str:
    """MLflow allows letters, digits and `_-. :/` in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)
