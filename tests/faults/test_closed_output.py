"""A terminal that goes away, a pipe that closes, a full disk behind standard output: the run goes on to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from user_run import merged, overrides


@pytest.fixture
def command(task, tmp_path) -> list[str]:
    config = merged(
        task,
        {
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {
                "executor": "local",
                "total_training_steps": 3,
                "test_freq": -1,
                "save_freq": -1,
                "default_local_dir": str(tmp_path / "run"),
            },
        },
    )
    return [sys.executable, "-m", "quadriga.trainer.main_ppo", *overrides(config)]


def steps_of(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_reader_that_has_seen_enough_does_not_end_the_run(command, tmp_path):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()  # type: ignore[union-attr]
    assert process.wait(timeout=120) == 0, errors
    assert steps_of(tmp_path / "run")[-3:] == [1, 2, 3]
    assert any((tmp_path / "run" / "checkpoints").glob("global_step_3"))
    assert "standard output is gone (Broken pipe); the run goes on" in errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@pytest.mark.parametrize("how", ["> /dev/full", ">&-", "> /dev/full 2>&1"])
def test_a_full_disk_or_a_closed_stream_does_not_end_the_run(command, tmp_path, how):
    script = f'"$@" {how}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command], stderr=subprocess.PIPE, timeout=120, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0, done.stderr.decode()
    assert steps_of(tmp_path / "run")[-3:] == [1, 2, 3]
    assert b"Traceback" not in done.stderr
