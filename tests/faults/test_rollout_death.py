"""Rollout engines in a pool of their own, killed at their work: each is replaced alone, and only what is missing comes again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
import torch
from mortal_workers import MortalRunner, faults_done, notes, start_ray, write_plan
from test_killed_runs import ALGORITHMS
from user_run import assert_same_run, merged

from quadriga.controller.calls import WorkersDied
from quadriga.trainer.main_ppo import run_ppo

ROWS = 64  # of a step: 8 prompts, 8 samples each

WHOLE_BATCHES = """
def lengths(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(len(text)) for text in solution_strs]
"""


@pytest.fixture(scope="module")
def ray_of_four():
    start_ray(num_cpus=4)
    yield
    ray.shutdown()


def configuration(task: dict, folder: Path, engines: int, steps: int, *changes: dict, **trainer: object) -> dict:
    """No checkpoint is written but at the end: who goes back to one goes back to the start."""
    roles = {"actor_rollout": "training", "rollout": "generation"}
    settings = {
        "executor": "ray",
        "placement": {"pools": {"training": [1], "generation": [engines]}, "roles": roles},
        "total_training_steps": steps,
        "default_local_dir": str(folder),
        **trainer,
    }
    return merged(task, ALGORITHMS["grpo"], {"trainer": settings}, *changes)


def run_here(task: dict, folder: Path, steps: int, *changes: dict) -> Path:
    """An undisturbed run, all in this process, with as many threads as each of several processes has."""
    torch.set_num_threads(1)
    trainer = {"executor": "local", "total_training_steps": steps, "default_local_dir": str(folder)}
    run_ppo(merged(task, ALGORITHMS["grpo"], {"trainer": trainer}, *changes))
    return folder


def last_metrics(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def assert_actor_stayed(folder: Path, steps: int) -> None:
    updates = notes(folder, "actor")
    assert [update["step"] for update in updates] == list(range(1, steps + 1)), "no step was done twice"
    assert len({update["pid"] for update in updates}) == 1


def test_an_engine_killed_mid_generation_is_replaced_and_only_its_missing_samples_come_again(
    ray_of_four, task, tmp_path, capsys
):
    whole, faulty = run_here(task, tmp_path / "whole", 2), tmp_path / "faulty"
    write_plan(faulty, [{"method": "rollout_streaming", "step": 2, "rank": 0, "after_samples": 20}])
    run_ppo(configuration(task, faulty, engines=1, steps=2), MortalRunner)
    assert faults_done(faulty) == 1
    assert_same_run(whole, faulty)
    assert_actor_stayed(faulty, steps=2)
    told = last_metrics(faulty)
    assert (told["training/restarts"], told["training/samples_generated_again"]) == (1, ROWS - 20)
    said = capsys.readouterr().out
    assert "died during generation" in said
    assert "restart 1 of at most 3: rollout rank 0 of 1" in said
    assert "takes its place and generates the samples that are missing" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("changes", [{}, {"transfer_queue": {"enable": True}}], ids=["plain", "transfer_queue"])
def test_of_two_engines_the_other_one_goes_on(ray_of_four, task, tmp_path, changes):
    whole, faulty = run_here(task, tmp_path / "whole", 3), tmp_path / "faulty"
    write_plan(faulty, [{"method": "rollout_streaming", "step": 2, "rank": 1, "after_samples": 20}])
    run_ppo(configuration(task, faulty, 2, 3, changes), MortalRunner)
    assert_same_run(whole, faulty)
    assert_actor_stayed(faulty, steps=3)
    generated = notes(faulty, "rollout")
    assert len({said["pid"] for said in generated if said["rank"] == 0}) == 1, "the other process has stayed"
    assert len({said["pid"] for said in generated if said["rank"] == 1}) == 2
    half = ROWS // 2
    assert sum(said["asked"] for said in generated if said["step"] == 2) == ROWS + half - 20
    assert last_metrics(faulty)["training/samples_generated_again"] == half - 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engines", [1, 2])
def test_engines_that_die_again_and_again_change_nothing(ray_of_four, task, tmp_path, chance, engines):
    """At any instant of generating or of taking weights; both at once too."""
    steps, faults = 8, []
    for step in range(1, steps):
        kind = chance.choice(["rollout", "rollout_streaming", "take_weights"])
        ranks = range(engines) if step == 4 else [chance.randrange(engines)]
        when = {"after_samples": chance.randrange(ROWS // engines), "after_ms": chance.choice([0, 1, 5, 20])}
        faults += [{"method": kind, "step": step, "rank": rank, **when} for rank in ranks]
    whole, faulty = run_here(task, tmp_path / "whole", steps), tmp_path / "faulty"
    write_plan(faulty, faults)
    run_ppo(configuration(task, faulty, engines, steps, max_restarts=99), MortalRunner)
    told = last_metrics(faulty)
    print(f"{faults_done(faulty)} deaths, {told['training/restarts']:.0f} healed, ", end="")
    print(f"{told['training/samples_generated_again']:.0f} of {steps * ROWS} samples generated again")
    assert faults_done(faulty) == len(faults)
    assert_same_run(whole, faulty)
    assert_actor_stayed(faulty, steps)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_that_hangs_is_replaced_alone_after_the_hard_deadline(ray_of_four, task, tmp_path, capsys):
    whole, faulty = run_here(task, tmp_path / "whole", 6), tmp_path / "faulty"
    stop = {"method": "rollout_streaming", "step": 5, "rank": 1, "after_samples": 8, "signal": "SIGSTOP"}
    write_plan(faulty, [stop])
    deadlines = {"watchdog": {"soft_s": 2.0, "hard_s": 5.0}}
    run_ppo(configuration(task, faulty, 2, 6, **deadlines), MortalRunner)
    assert_same_run(whole, faulty)
    assert_actor_stayed(faulty, steps=6)
    told = last_metrics(faulty)
    assert (told["training/restarts"], told["training/samples_generated_again"]) == (1, ROWS // 2 - 8)
    said = capsys.readouterr().out
    assert "step 5: step/gen has been running for" in said
    assert "takes its place" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_finished_samples_are_kept_also_where_scoring_waits_for_the_whole_batch(ray_of_four, task, tmp_path):
    (tmp_path / "reward.py").write_text(WHOLE_BATCHES)
    changes = {
        "custom_reward_function": {"path": str(tmp_path / "reward.py"), "name": "lengths"},
        "reward_model": {"reward_manager": "batch"},
    }
    whole, faulty = run_here(task, tmp_path / "whole", 2, changes), tmp_path / "faulty"
    write_plan(faulty, [{"method": "rollout_streaming", "step": 2, "rank": 0, "after_samples": 20}])
    run_ppo(configuration(task, faulty, 1, 2, changes), MortalRunner)
    assert_same_run(whole, faulty)
    assert last_metrics(faulty)["training/samples_generated_again"] == ROWS - 20


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_more_deaths_than_allowed_end_the_run_with_the_first(ray_of_four, task, tmp_path):
    write_plan(tmp_path, [{"method": "rollout", "step": step, "rank": 0, "after_ms": 0} for step in (1, 2)])
    with pytest.raises(WorkersDied, match=r"rollout rank 0 of 1 .* died during generation[\s\S]*after 1 restarts"):
        run_ppo(configuration(task, tmp_path, 1, 3, max_restarts=1), MortalRunner)
