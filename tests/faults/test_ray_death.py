"""Ray itself dies: the command says so in a sentence, and the same command goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from user_run import UserRun, descendants, merged


def processes(run: UserRun, name: str) -> list[int]:
    """Ids of the run's processes of that program."""
    assert run.process is not None
    found = []
    for pid in descendants(run.process.pid):
        try:
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:
            continue
        found += [pid] if Path(program).name == name else []
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_ray_that_dies_ends_the_run_with_a_sentence_and_the_same_command_goes_on(task, tmp_path, part):
    trainer = {
        "executor": "ray",
        "save_freq": 2,
        "total_training_steps": 1000,
        "default_local_dir": str(tmp_path / "run"),
    }
    config = merged(task, {"algorithm": {"adv_estimator": "grpo"}, "trainer": trainer})
    config["ray_kwargs"] = {"ray_init": {"address": "local", "num_cpus": 1, "log_to_driver": False}}
    run = UserRun(config)
    run.start()
    deadline = time.monotonic() + 180
    while run.steps_recorded() < 4:
        assert time.monotonic() < deadline, run.console()[-4000:]
        time.sleep(0.1)
    (victim,) = processes(run, part)
    os.kill(victim, signal.SIGKILL)
    assert run.finish(120) == 1
    said = run.console()
    assert {"gcs_server": "ClusterGone: the head of the Ray cluster", "raylet": "WorkerError: the process that steers"}[
        part
    ] in said
    assert "run the same command again" in said, said[-4000:]
    assert "Traceback" not in said, said[-4000:]

    done = run.steps_recorded()
    run.config["trainer"]["total_training_steps"] = done + 2
    run.run()
    assert "resumed after step" in run.console()
    assert run.steps_recorded() == done + 2
