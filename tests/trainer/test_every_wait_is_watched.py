"""The driver is parked in each wait that it has: the watchdog sees all of them, from the first worker to the last file."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from tiny_policy import write_task

from quadriga.config.schema import WatchdogConfig
from quadriga.controller.local_group import LocalWorkerGroup
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.crew import Crew
from quadriga.trainer.ppo.journal import Journal
from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer
from quadriga.trainer.ppo.saver import Saver
from quadriga.trainer.ppo.stream import Stream
from quadriga.trainer.ppo.watchdog import Watchdog

PARKED_S, SOFT_S = 0.3, 0.1

WAITS = [
    (Crew, "start"),
    (Crew, "load_models"),
    (Crew, "load"),
    (Crew, "hand_over_weights"),
    (Crew, "copy_state"),
    (Crew, "begin_writing"),
    (Crew, "tell_calls"),
    (Crew, "shutdown"),
    (Stream, "take"),
    (Stream, "drain"),
    (Journal, "log"),
    (Journal, "close"),
    (Saver, "close"),
]
"""What the driver calls that waits for somebody else; every call of a worker is looked at besides, and every wait that Python's
own threads, events, queues and futures are made of."""


@pytest.fixture
def watched(monkeypatch):
    """Phases open at each wait, and what the watchdog says, of all runs in this process."""
    trainers, said, seen = [], [], {}

    def watchdog(trainer):
        trainers.append(trainer)
        return impatient(trainer, said)

    def look(name, park, call):
        def parked(*args, **kwargs):
            first = name not in seen
            phases = trainers[-1].tracking.phases.open_phases() if trainers else []
            seen.setdefault(name, []).append(phases[-1].path if phases else "")
            if park and first:
                time.sleep(PARKED_S)
            return call(*args, **kwargs)

        return parked

    monkeypatch.setattr(RayPPOTrainer, "watchdog", watchdog)
    for owner, name in WAITS:
        monkeypatch.setattr(owner, name, look(f"{owner.__name__}.{name}", True, getattr(owner, name)))
    for owner, name in ((threading.Condition, "wait"), (threading.Thread, "join")):
        monkeypatch.setattr(owner, name, look_at_primitive(getattr(owner, name), trainers, seen))
    monkeypatch.setattr(LocalWorkerGroup, "submit", look("a worker's call", False, LocalWorkerGroup.submit))
    return seen, said


NOT_SEEN_BY_A_WATCHDOG = ("quadriga.trainer.ppo.watchdog", "quadriga.checkpoint.manifest")
"""Its own end; and the checksums of the checkpoint to go on from, which are read where no worker runs."""


def look_at_primitive(call, trainers, seen):
    """Notes who waits in the driver's own thread from the first trainer on."""

    def waits(*args, **kwargs):
        of_the_driver = trainers and threading.current_thread() is threading.main_thread()
        if of_the_driver and not (isinstance(args[0], threading.Thread) and not args[0].is_alive()):
            frame, callers = sys._getframe(1), []
            while frame is not None and len(callers) < 12:
                callers.append((frame.f_globals.get("__name__", ""), f"{frame.f_code.co_qualname}:{frame.f_lineno}"))
                frame = frame.f_back
            ours = [f"{module} {place}" for module, place in callers if module.startswith("quadriga.")]
            begins_a_thread = callers[1][1].startswith("Thread.start:")
            if ours and not begins_a_thread and not ours[0].startswith(NOT_SEEN_BY_A_WATCHDOG):
                phases = trainers[-1].tracking.phases.open_phases()
                seen.setdefault(ours[0], []).append(phases[-1].path if phases else "")
        return call(*args, **kwargs)

    return waits


def impatient(trainer, said):
    """The watchdog of a run in this process."""
    deadlines = WatchdogConfig(soft_s=SOFT_S, soft_factor=1, hard_s=None)
    folder = trainer.tracking.directory.path / "stalls"
    return Watchdog(deadlines, trainer.tracking.phases, NobodyElse(), trainer.awaited_samples, folder, said.append)


class NobodyElse:
    """The workers are in this process."""

    def busy(self):
        return []

    def stacks(self):
        return []


def test_the_driver_waits_for_nothing_unwatched(tmp_path, watched):
    seen, said = watched
    config = write_task(tmp_path)
    config["algorithm"] = {"adv_estimator": "gae", "use_kl_in_reward": True}
    config["trainer"] |= {"total_training_steps": 1, "save_freq": 1, "test_freq": 1, "val_before_train": True}
    run_ppo(config)
    config["trainer"]["total_training_steps"] = 2
    run_ppo(config)
    unwatched = sorted(name for name, paths in seen.items() if "" in paths)
    assert not unwatched, f"the driver waits here, and no watchdog would see it: {unwatched}"
    for owner, name in WAITS:
        path = seen[f"{owner.__name__}.{name}"][0]
        assert any(f": {path} has been running for" in text for text in said), f"{name}, in {path}: no warning"


SLOW = """
import time

def slow_for_two_prompts(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(2.0 * (extra_info["index"] < 2))
    return float(len(solution_str))
"""


@pytest.mark.parametrize("ahead", [{"staleness": 0}, {"staleness": 1, "mode": "free"}])
def test_samples_whose_scores_training_waits_for_are_named(tmp_path, monkeypatch, ahead):
    said = []
    monkeypatch.setattr(RayPPOTrainer, "watchdog", lambda trainer: impatient(trainer, said))
    config = write_task(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    config["custom_reward_function"] = {"path": str(tmp_path / "slow.py"), "name": "slow_for_two_prompts"}
    config["reward"] |= {"num_workers": 4}
    config["actor_rollout_ref"]["rollout"]["n"] = 2
    config |= {"algorithm": {"adv_estimator": "grpo"}, "async_training": ahead}
    config["data"] |= {"train_max_samples": 8, "shuffle": False}
    config["trainer"] |= {"total_training_steps": 2, "save_freq": -1, "test_freq": -1}
    run_ppo(config)
    (first, *_) = [text for text in said if "step/reward has been running for" in text]
    named = first.partition("waits for the scores of the samples ")[2].splitlines()[0]
    assert named.startswith("0:0/0, 0:0/1, 0:1/0, 0:1/1")
