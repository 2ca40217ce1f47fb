"""Workers killed at their work: new ones take their place in the same driver, and nothing of it is seen in the result."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import ray
from mortal_workers import MortalRunner, ToldRunner, faults_done, start_ray, write_plan
from test_killed_runs import ALGORITHMS, STEPS
from user_run import assert_same_run, merged

from quadriga.controller.calls import WorkersDied
from quadriga.dashboard.catalog import Run
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
    """From the fault to the moment when the run knew of it."""
    known = next(event for event in events_of(folder) if event["kind"] == "restart")
    assert "died" in known["text"]
    return float(known["time"] - (folder / "fault_0.done").stat().st_mtime)


def events_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


class Onlooker:
    """Looks at the state of a run from outside, all the time."""

    def __init__(self, folder: Path) -> None:
        self.states: list[str] = []
        self.phases: set[str] = set()
        self._folder, self._over = folder, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Onlooker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        run = Run(self._folder, "run", "id")
        while not self._over.wait(0.05):
            if run.refresh():
                row = run.row(time.time())
                self.phases.add(row["phase"])
                if row["state"] not in self.states[-1:]:
                    self.states.append(row["state"])


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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("save_freq", [-1, 2], ids=["from the start", "from a checkpoint"])
def test_a_run_that_was_told_something_is_told_the_same_after_a_restart(ray_session, task, tmp_path, save_freq):
    """Told after step 3 to learn faster; a worker dies in step 4, and steps 1 to 3 or only step 3 come again."""
    for name, faults in (
        ("whole", []),
        ("faulty", [{"method": "update_actor", "step": 4, "rank": 0, "after_ms": 0}]),
    ):
        write_plan(tmp_path / name, faults)
        trainer = {"steering": True, "total_training_steps": 5, "save_freq": save_freq}
        with Onlooker(tmp_path / name) as seen:
            run_ppo(configuration(task, tmp_path / name, "grpo", 1, **trainer), ToldRunner)
    assert restarts(tmp_path / "faulty") == 1
    assert not {"failed", "interrupted"} & set(seen.states), (
        "to whoever looks, a run whose workers are replaced goes on"
    )
    assert "restart" in seen.phases
    (told,) = [event for event in events_of(tmp_path / "faulty") if event["kind"] == "restart"]
    assert (told["number"], told["at_most"], told["step"]) == (1, 3, 3)
    assert "died during update_actor" in told["text"]
    assert [event["status"] for event in events_of(tmp_path / "faulty") if event["kind"] == "end"] == ["finished"]
    rates = [json.loads(line)["actor/lr"] for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rates[:4] == pytest.approx([rates[0]] * 3 + [rates[0] / 2])
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
