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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quadriga.controller.dispatch import Dispatch, register
from quadriga.tracking.steering import parse_command, tell
from quadriga.trainer.main_ppo import TaskRunner
from quadriga.trainer.ppo.crew import Role
from quadriga.workers import ActorRolloutRefWorker, CriticWorker
from quadriga.workers.rollout import RolloutWorker


def start_ray(num_cpus: int) -> None:
    """A Ray of its own whose processes find this module."""
    import ray

    ray.shutdown()
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env=environment,
    )


def free_slots(wait_s: float = 20.0) -> None:
    """A new Ray in place of one whose slots are not given back: a test was cut off with its workers at work."""
    import ray

    if not ray.is_initialized():
        return
    slots, deadline = ray.cluster_resources().get("CPU", 0.0), time.monotonic() + wait_s
    while ray.available_resources().get("CPU", 0.0) < slots:
        if time.monotonic() > deadline:
            start_ray(int(slots))
            return
        time.sleep(0.1)


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

    def submit_requests(self, requests):
        self.step = requests[0].step
        meet_fate(self.config.trainer.default_local_dir, "generate", self.step, self.rank)
        super().submit_requests(requests)

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

    def checkpoint_parts(self):
        """The parts of a checkpoint; the process may end while a thread of it writes the first."""
        parts = super().checkpoint_parts()
        first = next(iter(parts))
        parts[first] = FatalPart(parts[first], self.config.trainer.default_local_dir, self.step, self.rank)
        return parts


class FatalPart:
    def __init__(self, part, run_directory, step, rank):
        self.part, self.bytes, self.place = part, part.bytes, (run_directory, "background_write", step, rank)

    def write(self, folder):
        if next_fault(*self.place) is not None:
            time.sleep(0.5)  # the driver has got its answer: from here on it only asks how far the writing is
            os.kill(os.getpid(), signal.SIGKILL)
        self.part.write(folder)


class MortalCritic(CriticWorker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data):
        meet_fate(self.config.trainer.default_local_dir, "update_critic", data.meta_info["step"], self.rank)
        return super().update_critic(data)


class MortalRollout(RolloutWorker):
    def submit_requests(self, requests):
        folder, step = self.config.trainer.default_local_dir, requests[0].step
        meet_fate(folder, "rollout", step, self.rank)
        fault = next_fault(folder, "rollout_streaming", step, self.rank)
        if fault is not None:
            self.service.engine.step = Doom(self.service, fault)
        asked = sum(len(request.sample_indices) for request in requests)
        note(folder, role="rollout", rank=self.rank, step=step, asked=asked)
        super().submit_requests(requests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, pushed):
        meet_fate(self.config.trainer.default_local_dir, "take_weights", pushed.echo.version, self.rank)
        return super().take_weights(pushed)


class Doom:
    """Steps of an engine whose process ends when the driver has fetched so many samples of it."""

    def __init__(self, service, fault):
        self.service, self.step, self.fault = service, service.engine.step, fault
        self.left = fault["after_samples"]
        if self.left == 0:
            self.end()

    def __call__(self):
        finished = self.step()[: self.left]
        self.left -= len(finished)
        if self.left == 0:
            threading.Thread(target=self.end, daemon=True).start()
        return finished

    def end(self):
        deadline = time.monotonic() + 10
        while self.service._finished and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # the answer is on its way
        os.kill(os.getpid(), getattr(signal, self.fault.get("signal", "SIGKILL")))


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


class ToldRunner(MortalRunner):
    """A run that somebody tells, during the update of step 3, to learn half as fast. He says it once."""

    @contextmanager
    def trainer_of(self, parts, pools):
        with super().trainer_of(parts, pools) as trainer:
            update, folder = trainer.update, parts.directory.path

            def tell_and_update(batch):
                if trainer.step == 3 and not (folder / "steering").exists():
                    lr = parts.config.actor_rollout_ref.actor.optim.lr
                    tell(folder, parse_command(["set", f"actor.optim.lr={lr / 2}"]))
                update(batch)

            trainer.update = tell_and_update
            yield trainer
