"""`--nproc-per-node`: the processes of a supervised run begin, fail and end as one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_sft import REPO, ROWS, as_arguments, run_module, sft_job, write_rows, write_shape

from quadriga.rewards.processes import descendants

PATIENCE_S = 100.0
"""For what takes a second on a machine that has nothing else to do."""


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> Path:
    return write_shape(tmp_path_factory.mktemp("shape"))


@pytest.fixture
def endless(tmp_path, shape) -> list[str]:
    """Arguments of a run that does not end by itself."""
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    trainer = {"total_training_steps": 1_000_000, "resume_mode": "auto", "save_freq": 1, "max_ckpt_to_keep": 2}
    return as_arguments(sft_job(rows, shape, tmp_path / "run", data={"val_files": None}, trainer=trainer))


def start(arguments: list[str], run_dir: Path) -> subprocess.Popen[str]:
    """The command, at work: it has written a checkpoint."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "quadriga", "sft", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    deadline = time.monotonic() + PATIENCE_S
    while not any((run_dir / "checkpoints").glob("global_step_*")):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run did not get going: {process.communicate()[1]}")
        time.sleep(0.05)
    return process


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_no_process_outlives_the_one_that_started_it(endless, tmp_path, number, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    parent = start(["--nproc-per-node=2", *endless], tmp_path / "run")
    ranks = descendants([parent.pid])
    assert len(ranks) == 2
    for pid in ranks:  # else gloo asks for the host's name, and listens wherever that leads
        assert b"GLOO_SOCKET_IFNAME=lo" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    parent.send_signal(number)
    try:
        _, errors = parent.communicate(timeout=PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while any(map(alive, ranks)):
            assert time.monotonic() < deadline, "the ranks go on without their parent"
            time.sleep(0.05)
    finally:
        for pid in filter(alive, ranks):
            os.kill(pid, signal.SIGKILL)
    if number == signal.SIGTERM:
        assert parent.returncode == 130
        assert errors.count("go on from there with:") == 1, errors
        assert "go on from there with: python -m quadriga sft --nproc-per-node=2 data.train_files=" in errors
        assert errors.count("interrupted") == 1, errors
        assert "Traceback" not in errors


def test_sigterm_is_a_ctrl_c_to_a_run_in_one_process(endless, tmp_path):
    process = start(endless, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "go on from there with: python -m quadriga sft data.train_files=" in errors
    assert "interrupted" in errors
    assert "Traceback" not in errors


def run_both(tmp_path: Path, shape: Path, rows: str | Path, **changes) -> str:
    """What the command says that ends with an error, in two processes."""
    job = as_arguments(sft_job(Path(rows), shape, tmp_path / "run", **changes))
    done = run_module(["sft", "--nproc-per-node=2", *job], module="quadriga")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_is_missing_is_told_once_with_everything_else_before_any_process_starts(tmp_path, shape):
    model = {"from_config": str(tmp_path / "no_shape")}
    told = run_both(tmp_path, shape, tmp_path / "none.jsonl", data={"val_files": "none.txt"}, model=model)
    assert told.startswith("ConfigError: 3 problems")
    for part in ("none.jsonl does not exist", "none.txt", "no_shape does not exist"):
        assert told.count(part) == 1, told
    assert not (tmp_path / "run").exists()


def test_a_row_that_all_processes_read_is_told_of_once(tmp_path, shape):
    rows = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"question": "1+1=", "answer": None}])
    told = run_both(tmp_path, shape, rows, data={"val_files": None})
    assert told.count("row 12: there is no 'answer'") == 1, told
    assert told.count("DataError") == 1, told


def test_torchrun_does_not_end_the_process_that_tells_before_it_has_told(tmp_path, shape):
    """The first process asks the hub for the model, which takes it seconds; the other one has found the wrong key at once."""
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    job = sft_job(rows, shape, tmp_path / "run", model={"from_config": None, "partial_pretrain": "some/model"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        done = run_module([*as_arguments(job), "trainer.foo=1"], processes=2, environment=environment)
    assert done.returncode == 1
    told, _, torchrun = done.stderr.partition("Traceback")
    assert told.count("ConfigError: 2 problems") == 1, done.stderr
    assert "unknown key trainer.foo" in told
    assert "ConfigError: 2 problems" in torchrun.partition("Root Cause")[2], "the end of what torchrun says"
