"""`transfer_queue.enable`: the columns stay in the object store, the run is the same, the driver stays small."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf
from tiny_policy import write_task

from quadriga.controller.dispatch import Dispatch, register
from quadriga.trainer.main_ppo import TaskRunner, run_ppo
from quadriga.trainer.ppo.role import Role
from quadriga.trainer.ppo.row_functions import widened
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker

HERE = Path(__file__).parent
RUNTIME_ENV = {"env_vars": {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}}

REMOTE = {"transfer_queue": {"enable": True}}
SHORT = {
    "trainer": {"total_training_steps": 3, "test_freq": 2, "resume_mode": "disable"},
    "actor_rollout_ref": {"rollout": {"n": 4}},
}
MEASURED = ("timing_s/", "perf/", "memory/", "reward/seconds", "reward/queue")


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
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    roles = {"actor_rollout": "policy", "critic": "value", "rollout": "value"}
    placement = {"pools": {"policy": [2], "value": [1]}, "roles": roles}
    on_ray = {"trainer": {"executor": "ray", "placement": placement, "logger": []}}
    here, remote = train(on_ray), train(on_ray, REMOTE)
    ray.shutdown()
    assert told(remote) == told(here)


WIDTH = 192_000
ROWS = 64
BATCH_BYTES = ROWS * WIDTH * (5 * 8 + 4)
"""ids, mask and positions of the row, ids and mask of the response; log-probs of the rollout."""


class HeavyRollout(ActorRolloutRefWorker):
    """From the second step on, its rows are padded beyond all reason."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts):
        rows = super().generate_sequences(prompts)
        if prompts.meta_info["step"] < 2:
            return rows
        return widened(rows, rows.batch["prompts"].shape[1], WIDTH, self.pad_token_id)


class MeasuredRunner(TaskRunner):
    """Writes down the largest private memory of the driver in each step."""

    def add_actor_rollout_worker(self, config):
        _, group_class = super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = HeavyRollout
        return HeavyRollout, group_class

    def run(self, config):
        peaks: dict[int, int] = {}
        over = threading.Event()

        def watch():
            while not over.wait(0.01):
                lines = Path("/proc/self/status").read_text().splitlines()
                now = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon"))
                step = self.trainer.step if self.trainer is not None else 0
                peaks[step] = max(peaks.get(step, 0), now)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        super().run(config)
        over.set()
        watcher.join()
        Path(config.trainer.default_local_dir, "peaks.json").write_text(json.dumps(peaks))


@pytest.mark.slow
def test_the_driver_does_not_grow_with_the_batch(train):
    """A batch of 512 MB and more: the driver that holds it grows by as much, the one with handles by less than 50 MB."""
    assert BATCH_BYTES > 512 << 20
    ray.shutdown()
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False, runtime_env=RUNTIME_ENV)
    changes = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4, "use_kl_loss": True}, "rollout": {"n": 8}},
        "trainer": {"executor": "ray", "logger": [], "test_freq": -1},
    }
    growth = {}
    for name, plane in (("handles", REMOTE), ("data", {})):
        run = train(changes, plane, runner=MeasuredRunner)
        peaks = json.loads((run / "peaks.json").read_text())
        growth[name] = max(peaks["2"], peaks["3"]) - peaks["1"]
    ray.shutdown()
    print(f"the driver grew by {growth} MB for a batch of {BATCH_BYTES >> 20} MB")
    assert growth["handles"] < 50
    assert growth["data"] > 512
