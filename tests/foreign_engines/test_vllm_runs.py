"""Runs that generate with vLLM, through the command a user types. Where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_models import arithmetic_with_wide_heads

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.timeout(1800),
]

GAP = "rollout/logprob_diff_mean"
CORE = b"quadriga.rollout.vllm.core"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return arithmetic_with_wide_heads(tmp_path_factory.mktemp("model"))


class Run:
    """A quickstart with changes, under way."""

    def __init__(self, folder: Path, model: Path, *overrides: str) -> None:
        self.folder = folder / "run"
        self.log = folder / "log"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "quadriga.cli", "train", "--config-name=quickstart"]
        command += [f"actor_rollout_ref.model.path={model}", *overrides, f"trainer.default_local_dir={self.folder}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def metrics(self) -> list[dict]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def finish(self, timeout_s: float = 900) -> list[dict]:
        code = self.process.wait(timeout_s)
        assert code == 0, self.log.read_text()[-4000:]
        return self.metrics()

    def cores(self) -> list[int]:
        """Engine processes of this run, found by their command line and by an ancestor that works for it."""
        return [pid for pid in all_cores() if str(self.folder.parent).encode() in environment_of(pid)]

    def wait_for_steps(self, count: int, timeout_s: float = 300) -> None:
        until = time.monotonic() + timeout_s
        while sum(GAP in m for m in self.metrics()) < count:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until, self.log.read_text()[-4000:]
            time.sleep(0.2)


def all_cores() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if CORE in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + os.readlink(f"/proc/{pid}/cwd").encode()
    except OSError:
        return b""


def accuracies(metrics: list[dict]) -> list[float]:
    return [v for m in metrics for k, v in m.items() if k.startswith("val/") and k.endswith("/acc/mean@1")]


SHORT = ("trainer.total_training_steps=4", "trainer.val_before_train=False", "trainer.test_freq=-1")
VLLM = "actor_rollout_ref.rollout.name=vllm"


def test_a_run_in_one_process(tmp_path, model):
    run = Run(tmp_path, model, VLLM, "trainer.executor=local", *SHORT)
    told = run.finish()
    gaps = [m[GAP] for m in told if GAP in m]
    assert len(gaps) == 4
    assert max(gaps) < 1e-3, "float32 on both sides"
    assert "the update weighs its tokens" in run.log.read_text()
    assert run.cores() == []


def test_a_merged_adapter_goes_over(tmp_path, model):
    told = Run(tmp_path, model, VLLM, "actor_rollout_ref.model.lora_rank=4", "trainer.executor=local", *SHORT).finish()
    gaps = [m[GAP] for m in told if GAP in m]
    assert len(gaps) == 4
    assert max(gaps) < 1e-3


POOL = "trainer.placement={pools: {train: [1], gen: [1]}, roles: {actor_rollout: train, rollout: gen}}"


def test_an_engine_that_is_killed_in_a_run_is_replaced_and_nothing_is_left(tmp_path, model):
    run = Run(tmp_path, model, VLLM, POOL, "trainer.total_training_steps=12", *SHORT[1:])
    run.wait_for_steps(2)
    (core,) = run.cores()
    os.kill(core, signal.SIGKILL)
    told = run.finish()
    assert sum(GAP in m for m in told) == 12
    assert max(m[GAP] for m in told if GAP in m) < 1e-3
    assert run.cores() == []


def test_a_driver_that_is_killed_leaves_no_engine(tmp_path, model):
    run = Run(tmp_path, model, VLLM, "trainer.total_training_steps=500", *SHORT[1:])
    run.wait_for_steps(2)
    assert len(run.cores()) == 1
    run.process.kill()
    run.process.wait()
    until = time.monotonic() + 60
    while run.cores() and time.monotonic() < until:
        time.sleep(0.5)
    assert run.cores() == []


@pytest.mark.slow
def test_vllm_learns_what_native_learns(tmp_path, model):
    """Same seeds, same steps, the same function to start from; other random numbers, since vLLM draws its own."""
    reached = {}
    for name in ("native", "vllm"):
        run = Run(tmp_path / name, model, f"actor_rollout_ref.rollout.name={name}")
        told = run.finish(1500)
        reached[name] = accuracies(told)
        gaps = [m[GAP] for m in told if GAP in m]
        assert len(gaps) == 50
        print(name, "accuracy", reached[name], "gap", max(gaps))
        assert max(gaps) < 1e-3
    assert reached["native"][-1] >= reached["native"][0] + 0.3, "there is something to learn"
    assert abs(reached["vllm"][-1] - reached["native"][-1]) <= 0.03
