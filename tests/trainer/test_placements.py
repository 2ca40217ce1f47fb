"""The same run in other places: more ranks, other pools, a rollout of its own. Tokens and losses stay what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
import torch
from omegaconf import OmegaConf
from tiny_policy import write_task

from quadriga.controller.dispatch import Dispatch, register
from quadriga.errors import WorkerError
from quadriga.rollout.weights import checksum
from quadriga.trainer.main_ppo import TaskRunner, run_ppo
from quadriga.trainer.ppo.crew import Role
from quadriga.workers.rollout import RolloutWorker
from quadriga.workers.weight_push import pulled, push

LOSSES = (
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/vpred_mean",
    "critic/advantages/max",
    "critic/returns/min",
)
PPO = {
    "algorithm": {"adv_estimator": "gae"},
    "actor_rollout_ref": {
        "actor": {"use_kl_loss": True, "kl_loss_coef": 0.1, "ppo_mini_batch_size": 4, "optim": {"lr": 3e-3}},
        "rollout": {"n": 2},
    },
    "critic": {"optim": {"lr": 3e-3}},
    "trainer": {"executor": "ray", "total_training_steps": 3, "test_freq": 2, "resume_mode": "disable", "logger": []},
}


HERE = {"trainer": {"executor": "local"}}


def apart(actor: int, rollout: int) -> dict:
    """Actor, reference and critic in one pool, the rollout engines in another."""
    roles = {"actor_rollout": "training", "ref": "training", "critic": "training", "rollout": "generation"}
    return {"trainer": {"placement": {"pools": {"training": [actor], "generation": [rollout]}, "roles": roles}}}


@pytest.fixture(scope="module")
def ray_8():
    ray.shutdown()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Run PPO with critic and reference; returns where it wrote."""
    task = write_task(tmp_path_factory.mktemp("task"))

    def run(*changes: dict, runner: type | None = None) -> Path:
        folder = tmp_path_factory.mktemp("run")
        run_ppo(OmegaConf.merge(task, PPO, {"trainer": {"default_local_dir": str(folder)}}, *changes), runner)
        return folder

    return run


@pytest.fixture(scope="module")
def single(train):
    """Everything in one process."""
    return train(HERE)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(run: Path) -> dict[str, list[dict]]:
    """Every kept row of every step and validation, but for numbers that shards may round otherwise."""
    files = sorted((run / "samples").glob("*.jsonl"))
    return {f.name: [_exact(json.loads(line)) for line in f.read_text().splitlines()] for f in files}


def _exact(row: dict) -> dict:
    tokens = {name: values for name, values in row.get("tokens", {}).items() if name in ("ids", "mask")}
    return {**row, "advantage": None, "tokens": tokens}


def losses(run: Path) -> list[dict[str, float]]:
    return [{name: m[name] for name in LOSSES} for m in metrics(run) if "actor/pg_loss" in m]


@pytest.mark.slow
def test_worlds_of_one_two_and_four_give_the_same_tokens_and_losses(ray_8, train, single):
    assert len(samples(single)) == 5, "three steps, two validations"
    for world in (1, 2, 4):
        run = train({"trainer": {"n_gpus_per_node": world}})
        assert samples(run) == samples(single), f"world {world} wrote other tokens"
        for step, (mine, theirs) in enumerate(zip(losses(run), losses(single), strict=True), start=1):
            assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-6), f"world {world}, step {step}"


def test_a_rollout_apart_writes_the_same_tokens(train, single):
    run = train(HERE, apart(actor=1, rollout=1))
    assert samples(run) == samples(single)
    assert losses(run) == losses(single)


@pytest.mark.slow
def test_two_rollout_engines_apart_from_two_actors_write_the_same_tokens(ray_8, train, single):
    """Real Ray: sharded weights, gathered and pushed through the object store to the other pool."""
    run = train(apart(actor=2, rollout=2))
    assert samples(run) == samples(single)
    assert losses(run) == [pytest.approx(theirs, rel=2e-4, abs=2e-6) for theirs in losses(single)]


class ForgetfulRollout(RolloutWorker):
    """Says that it has taken the weights, and has not."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, pushed):
        return self.service.take_weights(pushed.echo.version, None)


class LateRollout(RolloutWorker):
    """Takes the weights under an older version."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, pushed):
        return self.service.take_weights(pushed.echo.version - 1, pulled(pushed))


@pytest.mark.parametrize(("worker", "step"), [(ForgetfulRollout, 0), (LateRollout, 0)])
def test_an_engine_with_stale_or_other_weights_stops_the_run(train, worker, step):
    class Runner(TaskRunner):
        def add_rollout_worker(self, config):
            self._add(config, Role.Rollout, worker)

    message = f"step {step}: the rollout engines do not hold version {step} of the weights"
    with pytest.raises(WorkerError, match=message):
        train(HERE, apart(actor=1, rollout=1), runner=Runner)


def test_weights_are_pushed_in_buckets_and_come_out_as_they_went_in():
    sent = {
        "a": torch.randn(300, 7),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(3),
        "d": torch.randn(40, 40).t(),
    }
    pushed = push(7, sent.items(), bucket_bytes=4096)
    assert len(pushed.buckets) == 2
    assert pushed.echo.version == 7
    got = dict(pulled(pushed))
    assert list(got) == list(sent)
    assert all(torch.equal(got[name], sent[name]) and got[name].dtype == sent[name].dtype for name in sent)
    assert checksum(got.items()) == pushed.echo.checksum


def test_weights_that_were_pushed_stay_what_they_were_when_training_goes_on():
    """An engine takes them when it has finished its samples: also in a run of one process, maybe after the next update."""
    trained = {"a": torch.zeros(3)}
    pushed = push(1, trained.items())
    trained["a"] += 1
    assert checksum(pulled(pushed)) == pushed.echo.checksum
