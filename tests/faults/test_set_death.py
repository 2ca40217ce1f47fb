"""A tensor parallel set of rollout engines of which one member dies or hangs: the whole set is replaced, and nothing changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from mortal_workers import MortalRunner, faults_done, notes, start_ray, write_plan
from test_killed_runs import ALGORITHMS
from user_run import assert_same_run, merged

from quadriga.trainer.main_ppo import run_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = 64


@pytest.fixture(scope="module")
def ray_of_three():
    start_ray(num_cpus=4)
    yield
    ray.shutdown()


def run_in_a_set(task: dict, folder: Path, faults: list[dict], nccl_timeout: int = 120) -> Path:
    """Three steps of a policy that is trained in one process and generates in a set of two others."""
    roles = {"actor_rollout": "training", "rollout": "generation"}
    settings = {
        "actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 2}, "nccl_timeout": nccl_timeout},
        "trainer": {
            "executor": "ray",
            "placement": {"pools": {"training": [1], "generation": [2]}, "roles": roles},
            "total_training_steps": 3,
            "default_local_dir": str(folder),
        },
    }
    write_plan(folder, faults)
    run_ppo(merged(task, ALGORITHMS["grpo"], settings), MortalRunner)
    return folder


@pytest.fixture(scope="module")
def undisturbed(ray_of_three, task, tmp_path_factory):
    return run_in_a_set(task, tmp_path_factory.mktemp("whole"), [])


def assert_replaced_whole(folder: Path, undisturbed: Path) -> None:
    assert faults_done(folder) == 1
    assert_same_run(undisturbed, folder)
    generated = notes(folder, "rollout")
    assert {said["rank"] for said in generated} == {0}, "the first of the set answers for both"
    assert len({said["pid"] for said in generated}) == 2, "it was replaced, whoever died"
    told = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert told["training/restarts"] == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"method": "rollout_streaming", "step": 2, "rank": 0, "after_samples": 20},
        {"method": "take_weights", "step": 1, "rank": 1, "after_ms": 0},
        {"method": "take_weights", "step": 1, "rank": 1, "after_ms": 25},
    ],
    ids=["the leader while it generates", "a follower that takes weights", "a follower soon after"],
)
def test_a_death_in_a_set_replaces_the_set(task, tmp_path, undisturbed, fault, capsys):
    assert_replaced_whole(run_in_a_set(task, tmp_path, [fault]), undisturbed)
    assert "take the set's place and generate the samples that are missing" in capsys.readouterr().out


def test_a_member_that_hangs_is_noticed_by_the_others_deadline(task, tmp_path, undisturbed, capsys):
    stop = {"method": "take_weights", "step": 1, "rank": 1, "after_ms": 25, "signal": "SIGSTOP"}
    assert_replaced_whole(run_in_a_set(task, tmp_path, [stop], nccl_timeout=15), undisturbed)
    assert "tensor parallel set of 2 waited" in capsys.readouterr().out
