"""Generation ahead of training, disturbed: other engines, slow rewards and deaths change no bit of an ordered run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import ray
from mortal_workers import MortalRunner, faults_done, notes, start_ray, write_plan
from user_run import UserRun, assert_same_run, merged

from quadriga.trainer.main_ppo import run_ppo

STEPS = 8
KILLS = int(os.environ.get("QUADRIGA_KILLS", "3"))
"""Times that the command is killed; the long campaign sets more."""

SLOW = """
import random, time

def score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(random.random() * 0.05)
    return float(len(solution_str))
"""


def configuration(task: dict, folder: Path, k: int, engines: int, *changes: dict, **trainer: object) -> dict:
    """`engines` in a pool of their own; 0: in the actor's process."""
    placement = {
        "pools": {"training": [1], "generation": [engines]},
        "roles": {"actor_rollout": "training", "rollout": "generation"},
    }
    settings = {
        "executor": "ray",
        "total_training_steps": STEPS,
        "save_freq": 2,
        "test_freq": 3,
        "default_local_dir": str(folder),
        **({"placement": placement} if engines else {}),
        **trainer,
    }
    return merged(
        task,
        {"trainer": settings, "algorithm": {"adv_estimator": "grpo"}, "async_training": {"staleness": k}},
        *changes,
    )


@pytest.fixture(scope="module")
def ray_of_four():
    start_ray(num_cpus=4)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("k", [1, 3])
def test_an_ordered_run_depends_neither_on_its_engines_nor_on_the_time_of_its_rewards(ray_of_four, task, tmp_path, k):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "fast.py").write_text(SLOW.replace("time.sleep(random.random() * 0.05)", "pass"))

    def run(name: str, engines: int, reward: str) -> Path:
        folder = tmp_path / name
        own = {"custom_reward_function": {"path": str(tmp_path / f"{reward}.py"), "name": "score"}}
        run_ppo(configuration(task, folder, k, engines, own))
        return folder

    first = run("two engines", 2, "fast")
    for name, engines, reward in (("slow rewards", 2, "slow"), ("one engine", 1, "slow"), ("colocated", 0, "fast")):
        # A process that has the machine to itself computes with more threads, which may change the last bits.
        other = run(name, engines, reward)
        assert written(other) == written(first), name
        if engines:
            assert_same_run(first, other)


def written(folder: Path) -> list[tuple[str, str]]:
    files = sorted((folder / "samples").glob("train_*"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["uid"], line["response"]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_and_trainers_that_die_with_a_full_window_change_nothing(ray_of_four, task, tmp_path, chance):
    faults, steps = [], 2 * STEPS
    for step in range(1, steps):
        kind = chance.choice(["rollout", "rollout_streaming", "take_weights", "update_actor"])
        rank = chance.randrange(2) if kind != "update_actor" else 0
        when = {"after_samples": chance.randrange(20), "after_ms": chance.choice([0, 1, 5, 20])}
        faults.append({"method": kind, "step": step, "rank": rank, **when})
    write_plan(tmp_path / "whole", [])
    run_ppo(configuration(task, tmp_path / "whole", 2, 2, total_training_steps=steps), MortalRunner)
    write_plan(tmp_path / "faulty", faults)
    run_ppo(configuration(task, tmp_path / "faulty", 2, 2, total_training_steps=steps, max_restarts=99), MortalRunner)
    print(f"{faults_done(tmp_path / 'faulty')} of {len(faults)} faults met")
    # Not all: a rank that is just being replaced gets nothing of a step, and takes none of its weights.
    assert faults_done(tmp_path / "faulty") >= 2 / 3 * len(faults)
    assert_same_run(tmp_path / "whole", tmp_path / "faulty")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_is_replaced_though_training_goes_on_while_its_process_starts(ray_of_four, task, tmp_path):
    """The weights that were the newest when it died are of no use to anybody, and gone, when the new process is there."""
    (tmp_path / "slow.py").write_text(SLOW.replace("random.random() * 0.05", "0.01"))
    reward = {"custom_reward_function": {"path": str(tmp_path / "slow.py"), "name": "score"}}
    # The first of these steps of which this engine is given a sample: which one that is, is a matter of timing.
    deaths = [{"method": "rollout", "step": step, "rank": 1, "after_ms": 0} for step in (3, 4, 5, 6)]
    write_plan(tmp_path / "faulty", deaths)
    # By its scores a step takes more than half a second: a process starts within so many steps, and in more than two.
    long = {"total_training_steps": 60, "save_freq": -1, "test_freq": -1}
    run_ppo(configuration(task, tmp_path / "faulty", 1, 2, reward, **long), MortalRunner)
    lines = [json.loads(line) for line in (tmp_path / "faulty" / "metrics.jsonl").read_text().splitlines()]
    healed = [line["step"] for line in lines if line.get("training/restarts") == 1]
    assert healed, "the new engine has joined"
    died = next(line["step"] for line in lines if line.get("training/samples_generated_again"))
    assert healed[0] > died + 1, "training went on meanwhile"
    ranks = notes(tmp_path / "faulty", "rollout")
    assert len({said["pid"] for said in ranks if said["rank"] == 1}) == 2, "and it generates"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_command_killed_with_a_full_window_goes_on_bit_for_bit(task, tmp_path, chance):
    ray_init = {"ray_kwargs": {"ray_init": {"address": "local", "num_cpus": 3, "log_to_driver": False}}}
    whole = UserRun(configuration(task, tmp_path / "whole", 2, 1, ray_init))
    whole.run()
    killed = UserRun(configuration(task, tmp_path / "killed", 2, 1, ray_init))
    for number in range(KILLS):
        killed.start()
        print(killed.kill_during(chance, STEPS, whole_tree=number % 2 == 0))
    killed.run()
    assert_same_run(whole.folder, killed.folder)
