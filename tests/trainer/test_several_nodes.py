"""PPO over two Ray nodes, to the end: two raylets on one machine, and two network namespaces with addresses of their own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster
from tiny_policy import write_task

from quadriga.trainer.main_ppo import run_ppo

REPO = Path(__file__).resolve().parents[2]
TWO_NODES = {
    "algorithm": {"adv_estimator": "gae"},
    "actor_rollout_ref": {"actor": {"use_kl_loss": True}, "rollout": {"n": 2}},
    "trainer": {"executor": "ray", "nnodes": 2, "total_training_steps": 2, "resume_mode": "disable", "logger": []},
}
PLACEMENTS = ("colocated", "split")


@pytest.fixture(scope="module")
def cluster():
    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def steps(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [m for m in map(json.loads, lines) if "actor/pg_loss" in m and "critic/vf_loss" in m]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ppo_over_two_raylets(cluster, tmp_path, placement):
    task = write_task(tmp_path / "task")
    losses = []
    for in_store in (False, True):  # rows that stay in the object store are fetched from the other node's
        run = tmp_path / f"run{in_store}"
        changes = {
            "trainer": {"placement": placement, "default_local_dir": str(run)},
            "transfer_queue": {"enable": in_store},
        }
        run_ppo(OmegaConf.merge(task, TWO_NODES, changes))
        losses.append([(m["actor/pg_loss"], m["critic/vf_loss"], m["critic/score/mean"]) for m in steps(run)])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


IN_TWO_NAMESPACES = """
set -e
ip link set lo up
unshare --net sleep 1000 & other=$!
sleep 0.3
inside() { nsenter --target $other --net "$@"; }
ip link add here type veth peer name there netns $other
ip address add 10.77.0.1/24 dev here; ip link set here up
inside ip link set lo up; inside ip address add 10.77.0.2/24 dev there; inside ip link set there up
mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray
$PYTHON -m ray.scripts.scripts start --head --node-ip-address=10.77.0.1 --port=6399 --num-cpus=1 --include-dashboard=false
inside $PYTHON -m ray.scripts.scripts start --address=10.77.0.1:6399 --node-ip-address=10.77.0.2 --num-cpus=1
for placement in $PLACEMENTS; do
    $PYTHON -m quadriga.trainer.main_ppo --config-path=$TASK --config-name=task +trainer.placement=$placement \\
        trainer.default_local_dir=$TASK/$placement +transfer_queue.enable=true +ray_kwargs.ray_init.address=10.77.0.1:6399
done
"""


def can_make_namespaces() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    return (
        tools
        and subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces are not permitted here")
def test_ppo_between_two_network_namespaces(tmp_path):
    """Each raylet has an address that the other can reach only over the wire; all of it ends with the namespaces."""
    task = OmegaConf.merge(write_task(tmp_path), TWO_NODES, {"trainer": {"logger": ["console"]}})
    OmegaConf.save(task, tmp_path / "task.yaml")
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    run = subprocess.run(
        [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
            IN_TWO_NAMESPACES,
        ],
        cwd=REPO,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "TASK": str(tmp_path),
            "PLACEMENTS": " ".join(PLACEMENTS),
            "PYTHONPATH": str(REPO),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        },
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    for placement in PLACEMENTS:
        assert len(steps(tmp_path / placement)) == 2
    assert "10.77.0.2" in run.stdout
