"""`transfer_queue.enable`: the columns stay in the object store, the run is the same, the driver stays small."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from omegaconf import OmegaConf
from tiny_policy import write_task

from quadriga.controller.object_store import STORE
from quadriga.protocol import DataProto
from quadriga.rollout.service import Sample
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.groups import Group, batch_of

HERE = Path(__file__).parent
RUNTIME_ENV = {"env_vars": {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}}

REMOTE = {"transfer_queue": {"enable": True}}
SHORT = {
    "trainer": {"total_training_steps": 3, "test_freq": 2, "resume_mode": "disable"},
    "actor_rollout_ref": {"rollout": {"n": 4}},
}
MEASURED = ("timing_s/", "perf/", "memory/", "reward/seconds", "reward/queue", "stream/")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    task = write_task(tmp_path_factory.mktemp("task"))

    def run(*changes: dict, runner: type | None = None) -> Path:
        folder = tmp_path_factory.mktemp("run")
        run_ppo(OmegaConf.merge(task, SHORT, {"trainer": {"default_local_dir": str(folder)}}, *changes), runner)
        return folder

    return run


def told(run: Path) -> list[dict]:
    """Everything that a run writes down, but for what it measures."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith(MEASURED) and k != "time"} for line in lines]
    samples = [
        json.loads(line) for file in sorted((run / "samples").iterdir()) for line in file.read_text().splitlines()
    ]
    return kept + samples


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "horizon": 64}},
                "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4, "shuffle": True, "ppo_epochs": 2}},
            },
            id="ppo",
        ),
        pytest.param({"algorithm": {"adv_estimator": "remax"}}, id="remax"),
        pytest.param(
            {"algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": True, "metric": "acc"}}}, id="dapo"
        ),
        pytest.param(
            {
                "algorithm": {
                    "adv_estimator": "grpo",
                    "rollout_correction": {
                        "rollout_is": "token",
                        "rollout_rs": "seq_mean_k1",
                        "rollout_rs_threshold": 1.5,
                    },
                },
                "actor_rollout_ref": {"rollout": {"top_p": 0.9}},
            },
            id="corrected",
        ),
        pytest.param(
            {"algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": True}}}, id="bypass"
        ),
    ],
)
def test_a_run_with_its_data_in_the_store_is_the_same_run(train, changes):
    here, remote = train(changes), train(changes, REMOTE)
    assert told(remote) == told(here)


@pytest.mark.slow
def test_it_is_the_same_on_two_ranks_and_in_pools_of_their_own(train):
    ray.shutdown()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    roles = {"actor_rollout": "policy", "critic": "value", "rollout": "value"}
    placement = {"pools": {"policy": [2], "value": [1]}, "roles": roles}
    on_ray = {"trainer": {"executor": "ray", "placement": placement, "logger": []}}
    here, remote = train(on_ray), train(on_ray, REMOTE)
    ray.shutdown()
    assert told(remote) == told(here)


def test_the_driver_does_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch):
    """A batch of 512 MB and more: who keeps it grows by as much, who leaves it in the store by little more than a part of it."""
    monkeypatch.setattr("quadriga.trainer.ppo.groups.TOKENS_AT_A_TIME", 1 << 20)
    prompts = DataProto.from_dict(
        {"input_ids": torch.ones(8, 4, dtype=torch.long), "attention_mask": torch.ones(8, 4, dtype=torch.long)},
        {"uid": np.array([f"0:{k}" for k in range(8)], object)},
    )
    groups = [Group(prompts, row, 8, 1, 0) for row in range(8)]
    ids, zeros = np.ones(192_000, np.int32), np.zeros(192_000, np.float32)
    for group in groups:
        group.samples = [Sample("", k, ids, zeros, zeros, "length", ((0, 192_000),)) for k in range(8)]
    ray.shutdown()
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        growth = {
            name: growth_mb(lambda leave=leave: batch_of(groups, 0, leave))
            for name, leave in (("store", lambda rows: rows.leave_in_store(STORE)), ("here", lambda rows: rows))
        }
    finally:
        ray.shutdown()
    print(f"grew by {growth} MB")
    assert growth["here"] > 512
    assert growth["store"] < growth["here"] / 2


def growth_mb(work: Callable[[], object]) -> int:
    """By how much this process grows while it does `work`."""

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon"))

    before, most, over = now(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.005):
            most = max(most, now())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    over.set()
    watcher.join()
    del result
    return most - before
