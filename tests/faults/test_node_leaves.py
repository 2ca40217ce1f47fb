"""A node leaves in the middle of a run, told or untold, and another joins later: the run waits for it and goes on, the same."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from test_killed_runs import ALGORITHMS
from user_run import assert_same_run, merged

from quadriga.errors import QuadrigaError
from quadriga.trainer.main_ppo import run_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 60
"""So many that a node which is drained leaves before the run is over."""


@pytest.fixture(scope="module")
def cluster():
    """A head with one slot, which is the driver's node and stays."""
    ray.shutdown()
    # Without handlers of signals: Ray sets them with each node, and one joins from a thread, where that cannot be done.
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}, shutdown_at_exit=False
    )
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def settings(task: dict, folder: Path, wait_s: float) -> dict:
    trainer = {
        "executor": "ray",
        "nnodes": 2,
        "n_gpus_per_node": 1,
        "total_training_steps": STEPS,
        "save_freq": 2,
        "resource_wait_s": wait_s,
        "default_local_dir": str(folder),
    }
    return merged(task, ALGORITHMS["grpo"], {"trainer": trainer})


@pytest.fixture(scope="module")
def undisturbed(cluster, task, tmp_path_factory):
    """A run of two nodes, of which the second is taken away afterwards."""
    folder = tmp_path_factory.mktemp("whole")
    node = cluster.add_node(num_cpus=1)
    run_ppo(settings(task, folder, 30))
    cluster.remove_node(node)
    return folder


def leave(cluster: Cluster, node: object, how: str) -> None:
    """Take the node away: after it was drained, as a cloud does before it takes a machine back, or by SIGKILL."""
    if how == "drained":
        drain = ["drain-node", "--address", cluster.address, "--node-id", node.node_id]
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the machine is taken back"]
        command = [sys.executable, "-m", "ray.scripts.scripts", *drain, *why, "--deadline-remaining-seconds", "3"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        time.sleep(3)
    cluster.remove_node(node, allow_graceful=how == "drained")


class Later(threading.Thread):
    """After so many recorded steps, takes a node away, and lets another join a while later."""

    def __init__(self, folder: Path, cluster: Cluster, node: object, how: str, joins: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.cluster, self.node, self.how, self.joins = folder, cluster, node, how, joins
        self.joined: object = None
        self.start()

    def run(self) -> None:
        metrics, until = self.folder / "metrics.jsonl", time.monotonic() + 200
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            if time.monotonic() > until:
                return
            time.sleep(0.02)
        leave(self.cluster, self.node, self.how)
        if self.joins:
            time.sleep(4)
            self.joined = self.cluster.add_node(num_cpus=1)


@pytest.mark.parametrize("how", ["killed", "drained"])
def test_a_run_goes_on_when_another_node_has_joined(cluster, task, tmp_path, undisturbed, how, capsys):
    later = Later(tmp_path, cluster, cluster.add_node(num_cpus=1), how, joins=True)
    try:
        run_ppo(settings(task, tmp_path, 60))
    finally:
        later.join(60)
        if later.joined is not None:
            cluster.remove_node(later.joined)
    assert_same_run(undisturbed, tmp_path)
    said = capsys.readouterr().out
    assert "restart 1 of at most 3" in said
    assert "waiting for resources" in said or "after step" in said


def test_a_run_ends_with_what_is_missing_when_none_joins(cluster, task, tmp_path):
    later = Later(tmp_path, cluster, cluster.add_node(num_cpus=1), "killed", joins=False)
    began = time.monotonic()
    with pytest.raises(QuadrigaError, match="Total available CPUs 1 is less than total desired CPUs 2"):
        run_ppo(settings(task, tmp_path, 5))
    later.join(60)
    assert time.monotonic() - began < 200
