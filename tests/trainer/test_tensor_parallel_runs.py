"""Training that generates with one model over two slots: the same tokens as without, at every size and placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf
from tiny_policy import write_task

from quadriga.trainer.main_ppo import run_ppo

GRPO = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 3e-3}},
        "rollout": {"n": 2},
    },
    "trainer": {"executor": "ray", "total_training_steps": 3, "test_freq": 2, "resume_mode": "disable", "logger": []},
}
LOSSES = ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/rewards/mean")
SETS_OF_TWO = {"actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 2}}}


@pytest.fixture(scope="module")
def ray_of_five():
    ray.shutdown()
    ray.init(address="local", num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    task = write_task(tmp_path_factory.mktemp("task"))

    def run(*changes: dict) -> Path:
        folder = tmp_path_factory.mktemp("run")
        run_ppo(OmegaConf.merge(task, GRPO, {"trainer": {"default_local_dir": str(folder)}}, *changes))
        return folder

    return run


def apart(actor: int, rollout: int) -> dict:
    roles = {"actor_rollout": "training", "rollout": "generation"}
    return {"trainer": {"placement": {"pools": {"training": [actor], "generation": [rollout]}, "roles": roles}}}


def tokens(run: Path) -> dict[str, list[list[int]]]:
    files = sorted((run / "samples").glob("*.jsonl"))
    return {f.name: [json.loads(line)["tokens"]["ids"] for line in f.read_text().splitlines()] for f in files}


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[dict[str, float]]:
    return [{name: m[name] for name in LOSSES} for m in metrics(run) if "actor/pg_loss" in m]


@pytest.fixture(scope="module")
def single(train):
    """Everything in one process."""
    return train({"trainer": {"executor": "local"}})


def assert_alike(run: Path, single: Path) -> None:
    assert tokens(run) == tokens(single)
    for step, (mine, theirs) in enumerate(zip(losses(run), losses(single), strict=True), start=1):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-6), f"step {step}"
    gaps = [m["rollout/logprob_diff_mean"] for m in metrics(run) if "rollout/logprob_diff_mean" in m]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5, "the set does not compute what is trained"


def test_a_set_that_shares_its_slots_with_training(ray_of_five, train, single):
    assert_alike(train(SETS_OF_TWO, {"trainer": {"n_gpus_per_node": 2}}), single)


@pytest.mark.slow
def test_two_sets_that_share_their_slots_with_training(ray_of_five, train, single):
    assert_alike(train(SETS_OF_TWO, {"trainer": {"n_gpus_per_node": 4}}), single)


@pytest.mark.slow
def test_a_set_in_a_pool_of_its_own(ray_of_five, train, single):
    """The shards of two trainers go to the two parts of the engine."""
    assert_alike(train(SETS_OF_TWO, apart(actor=2, rollout=2)), single)
