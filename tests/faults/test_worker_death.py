"""Workers killed at their work: new ones take their place in the same driver, and nothing of it is seen in the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from mortal_workers import MortalRunner, faults_done, start_ray, write_plan
from test_killed_runs import ALGORITHMS, STEPS
from user_run import assert_same_run, merged

from quadriga.controller.calls import WorkersDied
from quadriga.errors import WorkerError
from quadriga.trainer.main_ppo import run_ppo

METHODS = {
    "grpo": ["generate", "update_actor", "update_weights", "copy_checkpoint", "write_checkpoint"],
    "ppo": ["generate", "update_critic", "update_actor", "write_checkpoint"],
}


@pytest.fixture(scope="module")
def ray_session():
    start_ray(num_cpus=2)
    yield
    ray.shutdown()


def configuration(task: dict, folder: Path, algorithm: str, world: int, **trainer: object) -> dict:
    settings = {
        "executor": "ray",
        "n_gpus_per_node": world,
        "total_training_steps": STEPS,
        "save_freq": 2,
        "default_local_dir": str(folder),
        **trainer,
    }
    return merged(task, ALGORITHMS[algorithm], {"trainer": settings})


def restarts(folder: Path) -> float:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["training/restarts"]


def seconds_to_notice(folder: Path) -> float:
    """From the fault to the end of the attempt that it hit."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    ended = next(event for event in events if event["kind"] == "end")
    assert "died" in ended["error"]
    return float(ended["time"] - (folder / "fault_0.done").stat().st_mtime)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("algorithm", "world", "deaths"), [("grpo", 2, 10), ("ppo", 1, 6)])
def test_a_run_whose_workers_die_again_and_again_equals_an_undisturbed_one(
    ray_session, task, tmp_path, chance, algorithm, world, deaths
):
    faults = [
        {
            "method": METHODS[algorithm][number % len(METHODS[algorithm])],
            "step": 1 if number == 0 else chance.choice([2, 4, 6, 8]),
            "rank": chance.randrange(world),
            "after_ms": chance.choice([0, chance.randrange(60)]),
        }
        for number in range(deaths)
    ]
    write_plan(tmp_path / "faulty", faults)
    write_plan(tmp_path / "whole", [])
    run_ppo(configuration(task, tmp_path / "whole", algorithm, world), MortalRunner)
    run_ppo(configuration(task, tmp_path / "faulty", algorithm, world, max_restarts=deaths), MortalRunner)
    met = faults_done(tmp_path / "faulty")
    print(f"{met} deaths, {restarts(tmp_path / 'faulty'):.0f} restarts")
    assert met >= deaths - 2, "two faults at the same moment may be one death"
    assert_same_run(tmp_path / "whole", tmp_path / "faulty")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [4, STEPS], ids=["under way", "the last"])
def test_a_rank_that_dies_while_a_checkpoint_is_being_written_is_healed_at_once(ray_session, task, tmp_path, step):
    """The driver only asks how far the writers are; at the last checkpoint it waits for nothing else."""
    write_plan(tmp_path / "whole", [])
    run_ppo(configuration(task, tmp_path / "whole", "grpo", 2), MortalRunner)
    write_plan(tmp_path / "faulty", [{"method": "background_write", "step": step, "rank": 1, "after_ms": 0}])
    run_ppo(configuration(task, tmp_path / "faulty", "grpo", 2), MortalRunner)
    assert faults_done(tmp_path / "faulty") == 1
    assert restarts(tmp_path / "faulty") == 1
    assert seconds_to_notice(tmp_path / "faulty") < 20, "whatever else the machine is doing: a start may take a minute"
    assert_same_run(tmp_path / "whole", tmp_path / "faulty")


@pytest.mark.slow
def test_more_deaths_than_restarts_end_the_run_with_the_first(ray_session, task, tmp_path):
    faults = [{"method": "update_actor", "step": step, "rank": 0, "after_ms": 0} for step in (2, 3)]
    write_plan(tmp_path, faults)
    with pytest.raises(WorkersDied, match=r"rank 0 of 1 .* died during update_actor[\s\S]*after 1 restarts"):
        run_ppo(configuration(task, tmp_path, "grpo", 1, max_restarts=1, save_freq=1), MortalRunner)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.slow
def test_an_exception_is_not_tried_again(ray_session, task, tmp_path):
    write_plan(tmp_path, [{"method": "update_actor", "step": 3, "rank": 1, "raises": True}])
    with pytest.raises(WorkerError, match="one over none") as error:
        run_ppo(configuration(task, tmp_path, "grpo", 2), MortalRunner)
    assert not isinstance(error.value, WorkersDied)
    assert restarts(tmp_path) == 0
