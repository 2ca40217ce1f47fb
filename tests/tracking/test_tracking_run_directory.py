from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from quadriga.atomic_file import write_atomically
from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.tracking import RunDirectory, run_directory


def steps_of(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()]


def test_all_folders_of_the_layout_are_made(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "outputs" / "project" / "experiment")
    assert run.samples.is_dir()
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()
    assert run.log_file("critic", 3).name == "critic_3.log"


def test_a_folder_that_cannot_be_made_names_the_key_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir"):
        RunDirectory(tmp_path / "file" / "run")


def test_written_config_loads_to_the_same_run(tmp_path: Path) -> None:
    config = load_config(
        {"actor_rollout_ref": {"actor": {"optim": {"lr": 3e-6}}}, "data": {"chat_template": "{{ x }}\n# é: {a}"}}
    )
    run = RunDirectory(tmp_path)
    run.write_config(config)
    loaded = OmegaConf.load(run.config_file)
    assert isinstance(loaded, DictConfig)
    assert load_config(loaded) == config


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    write_atomically(path, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_resume_cuts_the_steps_that_come_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.begin()
    for step in range(8):
        run.append_metrics(step, {"critic/score/mean": step / 10})
        run.write_samples(step, [{"prompt": "1+1=", "response": "2"}])
    run.write_samples(7, [{"prompt": "1+1=", "response": "2"}], kind="val")
    before = run.metrics_file.read_text().splitlines()

    resumed = RunDirectory(tmp_path)
    resumed.begin(resumed_step=4)
    assert resumed.metrics_file.read_text().splitlines() == before[:5]
    assert list(resumed.sample_files("train")) == [0, 1, 2, 3, 4]
    assert list(resumed.sample_files("val")) == []
    for step in range(5, 8):
        resumed.append_metrics(step, {"critic/score/mean": 1.0})
    assert steps_of(resumed) == list(range(8))
    assert [line["critic/score/mean"] for line in resumed.read_metrics()][5:] == [1.0, 1.0, 1.0]


def test_resume_removes_a_line_that_a_crash_left_unfinished(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics(1, {"a": 1.0})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 2, "a": 0.')
    assert [line["step"] for line in run.read_metrics()] == [1]
    resumed = RunDirectory(tmp_path)
    resumed.begin(resumed_step=2)
    resumed.append_metrics(3, {"a": 3.0})
    assert steps_of(resumed) == [1, 3]


def test_a_step_is_recorded_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics(3, {"a": 1})
    with pytest.raises(ValueError, match="step 3 cannot be logged after step 3"):
        run.append_metrics(3, {"a": 2})
    with pytest.raises(ValueError, match="once"):
        RunDirectory(tmp_path).append_metrics(2, {"a": 2})
    assert steps_of(run) == [3]


def test_a_new_run_in_the_same_folder_keeps_the_files_of_the_earlier_one(tmp_path: Path) -> None:
    for attempt in range(3):
        run = RunDirectory(tmp_path)
        run.begin()
        run.write_config({"attempt": attempt})
        run.write_samples(1, [{"prompt": str(attempt)}])
        run.append_metrics(1, {"attempt": attempt})
        run.close()
    assert [line["attempt"] for line in run.read_metrics()] == [2]
    assert run.read_samples(1) == [{"step": 1, "prompt": "2"}]
    for attempt in range(2):
        earlier = RunDirectory(tmp_path / "earlier" / str(attempt + 1))
        assert [line["attempt"] for line in earlier.read_metrics()] == [attempt]
        assert earlier.read_samples(1)[0]["prompt"] == str(attempt)
        assert OmegaConf.load(earlier.config_file).attempt == attempt


def test_samples_keep_any_text_and_numpy_values(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    odd = "line\u2028separator \n tab\t 東京 \x0b \ud800 end"
    rows = [{"prompt": odd, "score": np.float32(0.5), "ids": np.arange(3), "uid": (0, 7), "pred": float("nan")}]
    path = run.write_samples(12, rows)
    assert path.name == "train_00000012.jsonl"
    (row,) = run.read_samples(12)
    assert row["prompt"] == odd
    assert (row["step"], row["score"], row["ids"], row["uid"], row["pred"]) == (12, 0.5, [0, 1, 2], [0, 7], None)
    assert path.read_bytes().count(b"\n") == 1, "one line a row, for any reader"


def test_samples_can_go_to_a_folder_of_the_user(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    path = run.write_samples(1, [{"prompt": "x"}], folder=tmp_path / "mine")
    assert path.parent == tmp_path / "mine"
    assert not list(run.samples.iterdir())


WRITER = """
import sys
from quadriga.tracking import Phases, RunDirectory, Timeline
run = RunDirectory(sys.argv[1])
run.begin()
phases = Phases(Timeline(run.timeline_file))
print("ready", flush=True)
step = 0
while True:
    phases.start_step(step)
    with phases("step"):
        pass
    run.append_metrics(step, {"a": 1.0} | phases.take_timings())
    step += 1
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_cannot_write_to_one_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start_writer(tmp_path)
    try:
        run = RunDirectory(tmp_path)
        acquire = run_directory.RunLock.acquire
        monkeypatch.setattr(run_directory.RunLock, "acquire", lambda lock: acquire(lock, wait_s=0.3))
        with pytest.raises(ConfigError, match=f"in use by pid {process.pid}"):
            run.begin(resumed_step=0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run.begin(resumed_step=0)  # a killed run holds nothing
    assert steps_of(run) == [0]


def test_a_killed_run_leaves_whole_lines_and_a_valid_timeline(tmp_path: Path) -> None:
    process = start_writer(tmp_path)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = RunDirectory(tmp_path)
    assert steps_of(run) == list(range(len(steps_of(run))))
    assert len(steps_of(run)) > 3
    events = json.loads(run.timeline_file.read_text())
    assert len([event for event in events if event["ph"] == "X"]) >= len(steps_of(run))


def test_files_that_a_killed_process_did_not_finish_are_removed(tmp_path):
    run = RunDirectory(tmp_path)
    for folder in (run.path, run.samples):
        (folder / ".metrics.jsonl.12.34.tmp").write_text("half a")
    run.begin(resumed_step=3)
    assert not list(tmp_path.rglob(".*.tmp"))
    run.close()


def test_a_run_that_starts_anew_moves_checkpoints_aside_too(tmp_path):
    run = RunDirectory(tmp_path)
    (run.checkpoints / "global_step_3").mkdir()
    run.begin()
    run.close()
    assert not any(run.checkpoints.iterdir())
    assert (tmp_path / "earlier" / "1" / "checkpoints" / "global_step_3").is_dir()
