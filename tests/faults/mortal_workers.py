"""Workers that die, or stop, where a plan says so. Importable by Ray's processes.

`faults.json` in the run directory lists the faults: method, step, rank, and how many milliseconds after its begin, or for a
rollout engine after how many samples that the driver has fetched. Each happens once, whatever is started again afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from quadriga.controller.dispatch import Dispatch, register
from quadriga.trainer.main_ppo import TaskRunner
from quadriga.trainer.ppo.role import Role
from quadriga.workers import ActorRolloutRefWorker, CriticWorker
from quadriga.workers.rollout import RolloutWorker


def start_ray(num_cpus: int) -> None:
    """A Ray of its own whose processes find this module."""
    import ray

    ray.shutdown()
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env=environment,
    )


def write_plan(run_directory: Path, faults: list[dict[str, Any]]) -> None:
    run_directory.mkdir(parents=True, exist_ok=True)
    (run_directory / "faults.json").write_text(json.dumps(faults))


def faults_done(run_directory: Path) -> int:
    return len(list(run_directory.glob("fault_*.done")))


def next_fault(run_directory: str, method: str, step: int, rank: int) -> dict[str, Any] | None:
    """The fault that is to happen now; it is noted as done."""
    folder = Path(run_directory)
    for number, fault in enumerate(json.loads((folder / "faults.json").read_text())):
        done = folder / f"fault_{number}.done"
        if (fault["method"], fault["step"], fault["rank"]) == (method, step, rank) and not done.exists():
            done.touch()
            return fault
    return None


def meet_fate(run_directory: str, method: str, step: int, rank: int) -> None:
    fault = next_fault(run_directory, method, step, rank)
    if fault is None:
        return
    if fault.get("raises"):
        raise ZeroDivisionError("one over none")
    how = getattr(signal, fault.get("signal", "SIGKILL"))
    if fault["after_ms"] == 0:
        os.kill(os.getpid(), how)
    threading.Timer(fault["after_ms"] / 1000, os.kill, (os.getpid(), how)).start()


def note(run_directory: str, **what: Any) -> None:
    """Write down what a process has done; `notes` reads it."""
    with (Path(run_directory) / "notes.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **what}) + "\n")


def notes(run_directory: Path, role: str) -> list[dict[str, Any]]:
    lines = (run_directory / "notes.jsonl").read_text().splitlines()
    return [said for line in lines if (said := json.loads(line))["role"] == role]


class MortalActor(ActorRolloutRefWorker):
    step = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts):
        self.step = prompts.meta_info["step"]
        meet_fate(self.config.trainer.default_local_dir, "generate_sequences", self.step, self.rank)
        return super().generate_sequences(prompts)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data):
        note(self.config.trainer.default_local_dir, role="actor", step=data.meta_info["step"])
        meet_fate(self.config.trainer.default_local_dir, "update_actor", data.meta_info["step"], self.rank)
        return super().update_actor(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version):
        meet_fate(self.config.trainer.default_local_dir, "update_weights", version, self.rank)
        return super().update_weights(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def copy_checkpoint(self):
        meet_fate(self.config.trainer.default_local_dir, "copy_checkpoint", self.step, self.rank)
        return super().copy_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_checkpoint(self, folder):
        meet_fate(self.config.trainer.default_local_dir, "write_checkpoint", self.step, self.rank)
        return super().write_checkpoint(folder)


class MortalCritic(CriticWorker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data):
        meet_fate(self.config.trainer.default_local_dir, "update_critic", data.meta_info["step"], self.rank)
        return super().update_critic(data)


class MortalRollout(RolloutWorker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts):
        folder, step = self.config.trainer.default_local_dir, prompts.meta_info["step"]
        meet_fate(folder, "rollout", step, self.rank)
        fault = next_fault(folder, "rollout_streaming", step, self.rank)
        engine = self.rollout
        if fault is not None:
            self.rollout = DoomedEngine(engine, self._finished, fault)
        rows = super().generate_sequences(prompts)
        finished = len(prompts.meta_info.get("finished", ()))
        note(folder, role="rollout", rank=self.rank, step=step, generated=len(prompts) - finished, kept=finished)
        return rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, pushed):
        meet_fate(self.config.trainer.default_local_dir, "take_weights", pushed.echo.version, self.rank)
        return super().take_weights(pushed)


class DoomedEngine:
    """A rollout engine whose process ends when the driver has fetched so many samples of it."""

    def __init__(self, engine, finished, fault):
        self.engine, self.finished, self.fault = engine, finished, fault

    def wake(self):
        self.engine.wake()

    def generate(self, requests, expected_version):
        for number, completion in enumerate(self.engine.generate(requests, expected_version)):
            if number == self.fault["after_samples"]:
                deadline = time.monotonic() + 10
                while self.finished and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(0.2)  # the answer is on its way
                os.kill(os.getpid(), getattr(signal, self.fault.get("signal", "SIGKILL")))
            yield completion


class MortalRunner(TaskRunner):
    def add_actor_rollout_worker(self, config):
        _, group_class = super().add_actor_rollout_worker(config)
        self._add(config, Role.ActorRollout, MortalActor)
        return ActorRolloutRefWorker, group_class

    def add_rollout_worker(self, config):
        super().add_rollout_worker(config)
        if Role.Rollout in self.role_worker_mapping:
            self._add(config, Role.Rollout, MortalRollout)

    def add_critic_worker(self, config):
        super().add_critic_worker(config)
        if Role.Critic in self.role_worker_mapping:
            self._add(config, Role.Critic, MortalCritic)
