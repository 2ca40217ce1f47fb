"""Ctrl-C and SIGTERM: the run ends soon, leaves nothing running, and goes on where it was."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_policy import write_task

from quadriga.dashboard.catalog import Catalog
from quadriga.errors import RunStopped
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from user_run import overrides


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGINT, id="ctrl-c"), pytest.param(signal.SIGTERM, id="sigterm")],
)
def test_an_interrupted_run_stops_within_seconds_and_resumes(tmp_path, how):
    config = write_task(tmp_path / "task")
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["trainer"] |= {"executor": "ray", "total_training_steps": 400, "test_freq": -1, "save_freq": -1}
    config["ray_kwargs"] = {"ray_init": {"num_cpus": 2, "log_to_driver": False}}
    command = [sys.executable, "-m", "quadriga.trainer.main_ppo", *overrides(config)]
    run = tmp_path / "task" / "run"

    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _wait_for(lambda: _steps(run) and _steps(run)[-1] >= 3, first)
    first.send_signal(how)
    try:
        _, errors = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130, errors
    assert "Traceback" not in errors
    assert not _left_behind(run), "processes of the run are still there"
    done = _steps(run)[-1]
    assert done < 400

    assert f"the checkpoint of step {done} is {run / 'checkpoints' / f'global_step_{done}'}" in errors
    again = re.search(r"^go on from there with: python (.+)$", errors, re.MULTILINE)
    assert again is not None, errors
    changed = [sys.executable, *shlex.split(again[1]), f"trainer.total_training_steps={done + 3}"]
    subprocess.run(changed, check=True, timeout=120, start_new_session=True, capture_output=True)
    assert _steps(run) == list(range(1, done + 4)), "every step once, none lost"


def test_ctrl_c_in_a_run_of_one_process_interrupts_it_and_does_not_fail_it(tmp_path, monkeypatch, capsys):
    config = write_task(tmp_path / "task")
    config["trainer"] |= {"executor": "local", "total_training_steps": 400, "test_freq": 2, "save_freq": -1}

    def interrupted(trainer):
        raise KeyboardInterrupt

    monkeypatch.setattr(RayPPOTrainer, "validate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ppo(config)
    assert "no checkpoint was written yet; trainer.save_freq=N" in capsys.readouterr().err
    (run,) = Catalog([tmp_path / "task" / "run"]).look()
    assert (run.state(time.time()), run.status["error"]) == ("interrupted", "")


@pytest.mark.parametrize("moment", ["validate", "report"])
def test_whenever_it_is_asked_to_stop_a_run_ends_with_a_checkpoint(tmp_path, monkeypatch, moment):
    """In particular between the time to save and the end of a step."""
    config = write_task(tmp_path / "task")
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["trainer"] |= {"total_training_steps": 400, "test_freq": 1, "save_freq": -1}
    method = getattr(RayPPOTrainer, moment)

    def and_be_asked(trainer, *arguments):
        trainer.stop_requested |= trainer.step == 2
        return method(trainer, *arguments)

    monkeypatch.setattr(RayPPOTrainer, moment, and_be_asked)
    with pytest.raises(RunStopped) as stopped:
        run_ppo(config)
    run = tmp_path / "task" / "run"
    done = _steps(run)[-1]
    assert done < 400
    assert f"stopped after step {done}" in str(stopped.value)
    assert (run / "checkpoints" / f"global_step_{done}").is_dir()


def _steps(run) -> list[int]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def _wait_for(condition, process, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.05)


def _left_behind(run) -> list[str]:
    """Processes that still have a file of the run open."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        found += [pid for file in files if file.startswith(str(run))]
    return found
