from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from quadriga.config import Config, load_config
from quadriga.config.names import METRIC_SINKS
from quadriga.errors import ConfigError
from quadriga.tracking import RunDirectory, Tracking, check_sinks, sinks, tracker


def config_with(*loggers: str) -> Config:
    return load_config({"trainer": {"logger": list(loggers), "project_name": "p", "experiment_name": "e"}})


def scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars(name)}


def test_the_configuration_offers_exactly_the_sinks_there_are() -> None:
    assert set(METRIC_SINKS) == set(sinks.SINKS)


def test_an_unknown_sink_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        check_sinks(["console", "tensorbord"])
    for name in sinks.SINKS:
        assert name in str(error.value)
    assert "did you mean 'tensorboard'" in str(error.value)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_package_names_the_extra_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=rf"pip install 'quadriga\[{name}\]'"):
        check_sinks([name])


def test_a_missing_package_is_found_before_the_run_directory_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    run = RunDirectory(tmp_path)
    run.append_metrics(1, {"a": 1})
    with pytest.raises(ConfigError):
        Tracking(config_with("wandb"), run)
    assert len(run.read_metrics()) == 1
    assert not run.config_file.exists()


def test_the_slim_mlflow_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == "sqlalchemy" else object())
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        check_sinks(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    check_sinks(["mlflow"])


def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    with Tracking(config_with("tensorboard"), RunDirectory(tmp_path)) as tracking:
        for step in range(5):
            tracking.log(step, {"critic/score/mean": step / 4, "bad": float("nan"), "val/a/acc/mean@4": 0.5})
    assert scalars(tmp_path / "tensorboard", "critic/score/mean") == {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert scalars(tmp_path / "tensorboard", "val/a/acc/mean@4")[4] == 0.5
    with pytest.raises(KeyError):
        scalars(tmp_path / "tensorboard", "bad")


def test_tensorboard_shows_the_steps_of_a_resumed_run_once(tmp_path: Path) -> None:
    with Tracking(config_with("tensorboard"), RunDirectory(tmp_path)) as tracking:
        for step in range(1, 7):
            tracking.log(step, {"a": 1.0})
    time.sleep(1.1)  # event files of one second have the same time in their name; the reader goes by name
    with Tracking(config_with("tensorboard"), RunDirectory(tmp_path), resumed_step=3) as tracking:
        for step in range(4, 6):
            tracking.log(step, {"a": 2.0})
    assert scalars(tmp_path / "tensorboard", "a") == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0}


def test_metrics_file_is_written_without_any_sink(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with Tracking(config_with(), run) as tracking:
        tracking.log(1, {"a": 0.5})
        assert run.read_metrics()[0]["a"] == 0.5, "it is on disk before log returns"
    assert OmegaConf.load(run.config_file).trainer.project_name == "p"


def test_a_value_that_is_not_finite_is_null_with_one_warning(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with Tracking(config_with(), run) as tracking:
        tracking.log(1, {"mine/ratio": float("inf"), "ok": 1})
        tracking.log(2, {"mine/ratio": float("nan"), "ok": 2})
        events, _ = tracking.events.since()
    assert [line["mine/ratio"] for line in run.read_metrics()] == [None, None]
    assert [line["ok"] for line in run.read_metrics()] == [1, 2]
    warnings = [event["text"] for event in events if event["kind"] == "message"]
    assert len(warnings) == 1
    assert "mine/ratio is inf" in warnings[0]


class BrokenSink:
    """Fails on every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("no route to host")

    def close(self, failed: bool) -> None:
        pass


def test_a_sink_that_loses_its_connection_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sinks.SINKS, "tensorboard", lambda setup: BrokenSink())
    run = RunDirectory(tmp_path)
    tracking = Tracking(config_with("tensorboard"), run)
    for step in range(10):
        tracking.log(step, {"a": 1.0})
        time.sleep(0.005)
    tracking.close()
    assert len(run.read_metrics()) == 10
    texts = [event["text"] for event in tracking.events.since()[0] if event["kind"] == "message"]
    assert "tensorboard failed: ConnectionError: no route to host" in texts[0]
    assert any("left out from now on" in text for text in texts)
    assert len(texts) < 10


def test_a_slow_sink_slows_neither_the_steps_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()

    class SlowSink(BrokenSink):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            hang.wait(60)

    monkeypatch.setitem(sinks.SINKS, "tensorboard", lambda setup: SlowSink())
    monkeypatch.setattr(tracker, "_CLOSE_TIMEOUT_S", 0.3)
    tracking = Tracking(config_with("tensorboard"), RunDirectory(tmp_path))
    began = time.perf_counter()
    for step in range(50):
        tracking.log(step, {"a": 1.0})
    tracking.close()
    assert time.perf_counter() - began < 5
    hang.set()
    texts = [event["text"] for event in tracking.events.since()[0] if event["kind"] == "message"]
    assert any("did not finish" in text for text in texts)


def test_wandb_keeps_one_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for resumed in (None, 2):
        with Tracking(config_with("wandb"), RunDirectory(tmp_path), resumed_step=resumed) as tracking:
            tracking.log(3 if resumed else 1, {"a": 0.5, "val/a/acc/mean@4": 0.25})
        assert not [event for event in tracking.events.since()[0] if event["kind"] == "message"]
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert folders
    assert {folder.name.rpartition("-")[2] for folder in folders} == {
        json.loads((tmp_path / "sinks.json").read_text())["wandb"]
    }


def test_wandb_without_a_login_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the package wandb")
    code = (
        "import sys\n"
        "from quadriga.config import load_config\n"
        "from quadriga.tracking import RunDirectory, Tracking\n"
        "Tracking(load_config({'trainer': {'logger': ['wandb']}}), RunDirectory(sys.argv[1]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(  # its own process: wandb reads its settings once
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=environment | {"HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "quadriga.errors.ConfigError" in done.stderr
    assert "WANDB_MODE=offline" in done.stderr


def test_mlflow_keeps_one_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow")
    pytest.importorskip("sqlalchemy", reason="needs the full package mlflow, with its local store")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for resumed in (None, 2):
        with Tracking(config_with("mlflow"), RunDirectory(tmp_path / "p" / "e"), resumed_step=resumed) as tracking:
            tracking.log(3 if resumed else 1, {"a": 0.5, "val/a/acc/mean@4": 0.25})
        assert not [event for event in tracking.events.since()[0] if event["kind"] == "message"]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'p' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "val/a/acc/mean_at_4")] == [1, 3]
    assert run.data.params["trainer.experiment_name"] == "e"
