"""The files for clusters: the Slurm job on a real Slurm of one node with two tasks, the Kubernetes manifest as far as it can be read."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from quadriga.config.schema import Config
from quadriga.config.typed import is_known

REPO = Path(__file__).resolve().parents[2]
CLUSTER = REPO / "examples" / "cluster"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(pid_file: Path) -> None:
    if pid_file.exists():
        os.kill(int(pid_file.read_text()), signal.SIGTERM)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which `sbatch` reaches a Slurm of this machine's own, with two slots of one core."""
    host, folder = socket.gethostname(), tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "key").chmod(0o400)
    (folder / "slurm.conf").write_text(
        "\n".join(
            (
                "ClusterName=test",
                f"SlurmctldHost={host}(127.0.0.1)",
                "AuthType=auth/munge",
                "CryptoType=crypto/munge",
                f"AuthInfo=socket={folder}/socket",
                "SlurmUser=root",
                "SlurmdUser=root",
                f"StateSaveLocation={folder}/state",
                f"SlurmdSpoolDir={folder}/spool",
                f"SlurmctldPidFile={folder}/slurmctld.pid",
                f"SlurmdPidFile={folder}/slurmd.pid",
                f"SlurmctldLogFile={folder}/slurmctld.log",
                f"SlurmdLogFile={folder}/slurmd.log",
                f"SlurmctldPort={free_port()}",
                f"SlurmdPort={free_port()}",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_Core",
                "SlurmdParameters=config_overrides",
                "MpiDefault=none",
                f"NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN",
                f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP",
            )
        )
        + "\n"
    )
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    munge = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "log", "seed")]
    start = ["munged", "--force", f"--key-file={folder}/key", f"--socket={folder}/socket", *munge]
    try:
        subprocess.run(start, check=True, capture_output=True, timeout=30)
        for daemon in ("slurmctld", "slurmd"):
            subprocess.run([daemon], check=True, capture_output=True, timeout=30, env=environment)
        deadline = time.monotonic() + 30
        while b"idle" not in subprocess.run(["sinfo"], capture_output=True, timeout=30, env=environment).stdout:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.5)
        yield environment
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            end(folder / f"{name}.pid")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason="needs slurm-wlm and munge, and root to start them")
def test_a_slurm_job_of_two_tasks_trains_to_the_end(slurm: dict[str, str], tmp_path: Path) -> None:
    """Both tasks are on the one node there is; each is a Ray node with one worker."""
    job = ["sbatch", "--wait", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=2", f"--output={tmp_path}/said"]
    keys = [
        "--config-name=quickstart",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    done = subprocess.run(
        [*job, str(CLUSTER / "slurm.sh"), *keys], env=slurm, cwd=REPO, timeout=300, capture_output=True, text=True
    )
    said = (tmp_path / "said").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{said}"
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (written["trainer"]["nnodes"], written["trainer"]["n_gpus_per_node"]) == (2, 1)
    left = subprocess.run(["squeue", "--noheader"], env=slurm, capture_output=True, text=True, timeout=30).stdout
    assert not left.strip(), "nothing of the job stays"


def test_the_manifest_for_kubernetes_is_whole() -> None:
    manifest = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    spec = manifest["spec"]
    command = shlex.split(spec["entrypoint"])
    assert command[:2] == ["quadriga", "train"]
    keys = [argument.lstrip("+").split("=")[0] for argument in command[2:]]
    unknown = [key for key in keys if not is_known(Config, key) and not key.startswith("ray_kwargs.ray_init.")]
    assert not unknown
    cluster = spec["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in pod["containers"][0]["volumeMounts"]}
    given = dict(argument.lstrip("+").split("=", 1) for argument in command[2:])
    assert workers["replicas"] == int(given["trainer.nnodes"])
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == int(given["trainer.n_gpus_per_node"])
