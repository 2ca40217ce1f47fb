"""The commands that look at runs from a terminal: runs, watch, compare, samples, tell, dash."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli import run
from quadriga.config.schema import Config
from quadriga.tracking import RunDirectory, Tracking
from quadriga.tracking.steering import Steering


def record(folder: Path, steps: int, score: float, lr: float = 1e-6, **trainer: Any) -> Tracking:
    """A run of this process that has taken some steps and lives until it is closed."""
    config = Config()
    config.trainer.default_local_dir, config.trainer.experiment_name = str(folder), folder.name
    config.trainer.logger = []
    config.actor_rollout_ref.actor.optim.lr = lr
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    tracking = Tracking(config, RunDirectory(folder))
    tracking.events.append("start", {"total_steps": 10, "start_step": 0, "project": "p", "experiment": folder.name})
    for step in range(1, steps + 1):
        tracking.log(step, {"critic/score/mean": score * step / steps, "actor/entropy": 0.5, "timing_s/step": 1.0})
    return tracking


def end(tracking: Tracking, status: str, error: str = "") -> None:
    tracking.events.append("end", {"status": status, "error": error})
    tracking.close()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`outputs` in the working directory, with a finished and a failed run."""
    monkeypatch.chdir(tmp_path)
    end(record(tmp_path / "outputs" / "p" / "good", 10, 0.8, lr=1e-4), "finished")
    end(record(tmp_path / "outputs" / "p" / "bad", 4, 0.1), "failed", "DataError: no rows")
    rows = [
        {"uid": str(k), "prompt": f"{k}+1=", "response": f"#### {k}", "score": float(k % 2), "ground_truth": str(k + 1)}
        for k in range(6)
    ]
    RunDirectory(tmp_path / "outputs" / "p" / "good").write_samples(7, rows)
    return tmp_path / "outputs"


def test_runs_are_listed_with_state_step_and_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"p/good +train +finished +10/10", text)
    assert re.search(r"p/bad +train +failed DataError: no rows +4/10", text)
    assert run(["runs", "--state", "failed", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["p/bad"]
    assert run(["runs", "--root", str(root / "nowhere")]) == 1
    assert "there are no such runs" in capsys.readouterr().err


def test_runs_are_compared_by_what_was_set_and_what_came_of_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "good", "bad"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"actor_rollout_ref.actor.optim.lr +0.0001 +1e-06", text)
    assert re.search(r"critic/score/mean +0.800 +0.100", text)
    assert run(["compare", "good", "nothing"]) == 1
    assert "no run nothing" in capsys.readouterr().err


def test_samples_are_read_by_step_and_filter(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", "good", "--step", "7", "--only", "wrong"]) == 0
    text = capsys.readouterr().out
    assert text.count("wrong · score 0") == 3
    assert "right answer 1" in text
    assert run(["samples", "good", "--step", "8"]) == 1
    assert "--step 7" in capsys.readouterr().err


def test_a_run_is_watched_from_another_process_until_it_ends(root: Path) -> None:
    tracking = record(root / "p" / "live", 2, 0.5)
    command = [sys.executable, "-m", "quadriga", "watch", "live"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        time.sleep(1.0)
        tracking.log(3, {"critic/score/mean": 0.75})
        time.sleep(1.0)
        end(tracking, "finished")
        text, _ = watcher.communicate(timeout=30)
    finally:
        watcher.kill()
    assert watcher.returncode == 0
    assert "step 1/10" in text
    assert "step 3/10 · reward 0.750" in text
    assert text.endswith("p/live finished at step 3\n")


def test_a_live_run_is_told_and_answers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from types import SimpleNamespace

    tracking = record(root / "p" / "live", 3, 0.5, steering=True)
    steering = Steering(root / "p" / "live", True, lambda told: tracking.events.append("steered", told))
    trainer: Any = SimpleNamespace(step=3, config=Config(), crew=SimpleNamespace(), stop_requested=False)
    over = threading.Event()

    def step_by_step() -> None:
        while not over.wait(0.2):
            trainer.step += 1
            steering.obey(trainer)

    thread = threading.Thread(target=step_by_step)
    thread.start()
    try:
        assert run(["tell", "live", "set", "trainer.save_freq=5"]) == 0
        assert "-1 → 5" in capsys.readouterr().out
        assert trainer.config.trainer.save_freq == 5
        assert run(["tell", "live", "set", "actor.optim.lr=fast"]) == 1
    finally:
        over.set()
        thread.join()
        end(tracking, "finished")
    assert run(["tell", "live", "stop"]) == 1
    assert "is not running" in capsys.readouterr().err
    events = (root / "p" / "live" / "events.jsonl").read_text()
    assert "set trainer.save_freq=5" in events


def test_a_run_without_the_key_cannot_be_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = record(root / "p" / "deaf", 1, 0.5)
    assert run(["tell", "deaf", "stop"]) == 1
    assert "trainer.steering=True" in capsys.readouterr().err
    end(tracking, "finished")


def test_dash_starts_within_seconds_serves_the_page_and_ends_with_ctrl_c(root: Path) -> None:
    command = [sys.executable, "-m", "quadriga", "dash", "--no-browser", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(address[0] + "api/runs", timeout=20) as answer:
            rows = json.loads(answer.read())["rows"]
        assert sorted(row["name"] for row in rows) == ["p/bad", "p/good"]
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=20)
    finally:
        server.kill()
    assert server.returncode == 0
    assert errors == ""


def test_dash_beyond_this_machine_has_a_token_in_its_address(root: Path) -> None:
    command = [sys.executable, "-m", "quadriga", "dash", "--no-browser", "--host", "0.0.0.0", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        port = re.search(r":(\d+)/\?token=\S{20,}", line)
        assert port is not None, line
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/api/runs", timeout=20)
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()


def test_dash_exports_one_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dash", "--export", "page.html"]) == 0
    assert "2 runs" in capsys.readouterr().out
    text = (root.parent / "page.html").read_text()
    assert 'id="exported"' in text
    assert "static/" not in text
    assert "The MIT License" in text, "the licence of the charts goes with them"
    assert run(["dash", "nowhere", "--export", "page.html"]) == 1
    assert "there are no runs" in capsys.readouterr().err
