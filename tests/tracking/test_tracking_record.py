"""What a run says of itself while it goes on: status.json, events.jsonl, summary.html."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from quadriga.config.schema import Config
from quadriga.dashboard.catalog import Catalog
from quadriga.tracking import RunDirectory, Tracking
from quadriga.tracking.run_record import RunRecord, about_training


def make_config(folder: Path) -> Config:
    config = Config()
    config.trainer.default_local_dir = str(folder)
    config.trainer.logger = []
    config.actor_rollout_ref.actor.optim.lr = 5e-5
    config.actor_rollout_ref.actor.ppo_mini_batch_size = config.data.train_batch_size
    return config


def status_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def test_a_run_is_seen_to_start_to_go_on_and_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tracking = Tracking(make_config(folder), RunDirectory(folder))
    (run,) = Catalog([tmp_path]).look()
    assert run.state(time.time()) == "running"
    assert run.status["changed"]["actor_rollout_ref.actor.optim.lr"] == 5e-5
    tracking.events.append("start", {"total_steps": 3, "start_step": 0})
    tracking.log(1, {"critic/score/mean": 0.5, "timing_s/step": 1.0})
    assert "0.5" in (folder / "summary.html").read_text() or "Reward" in (folder / "summary.html").read_text()
    tracking.events.append("phase", {"step": 2, "open": ["step", "gen"]})
    deadline = time.monotonic() + 10
    while status_of(folder)["phases"] != ["step", "gen"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (status_of(folder)["step"], status_of(folder)["total_steps"]) == (1, 3)
    tracking.events.append("end", {"status": "failed", "error": "DataError: no rows"})
    tracking.close(failed=True)
    run.refresh()
    assert run.state(time.time()) == "failed"
    assert run.row(time.time())["error"] == "DataError: no rows"
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds == ["start", "end"]


def test_alarms_are_in_metrics_events_and_status(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Tracking(make_config(folder), RunDirectory(folder)) as tracking:
        tracking.log(1, {"actor/grad_norm": float("nan")})
        assert "alarm/not_finite" in (folder / "metrics.jsonl").read_text()
        tracking.events.append("end", {"status": "stopped"})
        assert "not_finite" in status_of(folder)["alarms"]
        tracking.log(2, {"actor/grad_norm": 1.0})
    assert status_of(folder)["alarms"] == {}
    (alarm,) = [e for e in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if e["kind"] == "alarm"]
    assert (alarm["step"], alarm["name"]) == (1, "not_finite")


def test_a_record_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    record = RunRecord(folder, about_training(make_config(folder)))
    (folder / "events.jsonl").mkdir()
    record.take({"kind": "message", "time": 1.0, "level": "info", "text": "hello"})
    record.close()
    assert "events.jsonl cannot be written" in caplog.text


def test_a_page_that_cannot_be_made_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: RunDirectory) -> None:
        raise KeyError("response")

    monkeypatch.setattr("quadriga.tracking.summary.write_page", fail)
    folder = tmp_path / "run"
    with Tracking(make_config(folder), RunDirectory(folder)) as tracking:
        tracking.log(1, {"actor/grad_norm": 1.0})
        tracking.events.append("end", {"status": "finished"})
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert "summary.html cannot be written: KeyError" in (folder / "events.jsonl").read_text()
