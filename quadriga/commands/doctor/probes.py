"""What the doctor runs in processes of their own, `probes.py NAME ARGUMENT…`: each prints JSON lines, and may die or hang.

The doctor never imports this file. Heavy libraries are imported by the probe that needs them alone.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib import metadata
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)  # the doctor kills a probe long before
OBJECT_STORE_BYTES = 100 * 2**20
TCP_TIMEOUT_S = 3.0
PACKAGES = ("torch", "transformers", "quadriga")


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


# ---- torch


def torch_info() -> None:
    """What torch was built for; then use every device once."""
    import torch

    say(version=torch.__version__, built_for=_built_for(torch), threads=torch.get_num_threads())
    devices = [_try_device("cuda", torch.cuda, index) for index in range(torch.cuda.device_count())]
    npu = _npu_module(torch)
    if npu is not None:
        devices += [_try_device("npu", npu, index) for index in range(npu.device_count())]
    say(devices=devices, accelerator_error=_why_no_cuda(torch))


def _built_for(torch: Any) -> str | None:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else None


def _npu_module(torch: Any) -> Any:
    """`torch.npu`, which importing torch_npu adds; None where that package is absent or broken."""
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError):
        return None
    return getattr(torch, "npu", None)


def _try_device(kind: str, module: Any, index: int) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"device": f"{kind}:{index}", "name": "unknown", "error": None}
    try:
        facts["name"] = module.get_device_name(index)
        facts["free_bytes"], facts["total_bytes"] = module.mem_get_info(index)
        ones = torch.ones(64, 64, device=f"{kind}:{index}")
        if (ones @ ones)[0, 0].item() != 64:
            facts["error"] = "wrong result"
    except Exception as error:  # reported to the doctor, which decides
        facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return facts


def _why_no_cuda(torch: Any) -> str | None:
    if torch.cuda.is_available() or not _built_for(torch):
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # reported to the doctor, which decides
        return str(error).splitlines()[0]
    return None


def matmul(*names: str) -> None:
    """A matrix product on the CPU in each dtype; names each that equals the exact result."""
    import torch

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a SIGILL here is expected and must not litter core files
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    # Large enough for the vendor kernels; small integers, so that every format holds inputs and sums without rounding.
    left, right = (torch.randint(0, 2, (256, 256), generator=generator).double() for _ in range(2))
    for name in names:
        dtype = getattr(torch, name)
        if not torch.equal((left.to(dtype) @ right.to(dtype)).double(), left @ right):
            sys.exit(f"the {name} product gives wrong numbers")
        say(**{name: "right"})


def cpu_kernels() -> None:
    """Compile and load the kernels for CPUs, as a worker does."""
    from quadriga.models.kernels.cpu.library import load

    try:
        load()
    except (OSError, subprocess.SubprocessError) as error:
        say(failure=str(error))
    else:
        say(failure=None)


def all_reduce(backend: str, peer: str = "") -> None:
    """Sum one number over two processes that meet on 127.0.0.1, by gloo or nccl.

    Rank 0 starts rank 1 before it imports torch, so that both imports overlap; the port follows through a pipe.
    """
    if peer:
        _rank_one(backend)
    else:
        _rank_zero(backend)


def _rank_zero(backend: str) -> None:
    command = [sys.executable, "-P", __file__, "all_reduce", backend, "peer"]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    from torch import cuda
    from torch.distributed import TCPStore

    # NCCL refuses two ranks on one GPU, so the world is as large as the GPUs allow.
    world_size = 2 if backend == "gloo" else min(2, cuda.device_count())
    store = TCPStore(HOST, 0, world_size or 1, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    print(store.port if world_size == 2 else "", file=peer.stdin, flush=True)
    if world_size:
        _sum_over_ranks(backend, store, rank=0, world_size=world_size)
    nccl = ".".join(map(str, cuda.nccl.version())) if backend == "nccl" and world_size else None
    if peer.wait():
        sys.exit("the second process failed")
    say(world_size=world_size, nccl=nccl)


def _rank_one(backend: str) -> None:
    from torch.distributed import TCPStore

    port = sys.stdin.readline().strip()
    if port:
        store = TCPStore(HOST, int(port), 2, is_master=False, timeout=TIMEOUT)
        _sum_over_ranks(backend, store, rank=1, world_size=2)


def _sum_over_ranks(backend: str, store: Any, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    number = torch.tensor([float(rank + 1)], device=device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    dist.all_reduce(number)
    if number.item() != sum(range(1, world_size + 1)):
        sys.exit(f"the sum over {world_size} processes came out as {number.item()}")
    dist.destroy_process_group()


# ---- Ray


def ray_info() -> None:
    """Ray's version, and what it knows of token authentication."""
    import ray

    try:
        tokens: ModuleType | None = importlib.import_module("ray._private.authentication.authentication_token_setup")
    except ImportError:  # Rays before token authentication
        tokens = None
    # Ray offers no public question for this; a Ray that moves the name is merely reported as "not by default".
    by_default = hasattr(tokens, "enable_token_auth_by_default")
    say(version=ray.__version__, tokens=tokens is not None, tokens_by_default=by_default)


def ray_start() -> None:
    """Start a small local Ray and run one task on it."""
    import ray

    started = time.monotonic()
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    answer = ray.get(ray.remote(lambda: 6 * 7).remote())
    say(seconds=time.monotonic() - started)
    ray.shutdown()
    if answer != 42:
        raise SystemExit(f"the task answered {answer}")


def ray_cluster(address: str, deep: str = "") -> None:
    """Connect to a cluster and list its nodes; `deep` asks each for its software.

    Every step is announced before it is taken, since Ray may wait in one of them until the doctor kills this process.
    """
    if address != "auto":
        _reach_tcp(address)
    say(stage="ray", error=None)
    _watch_ray_log()
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # reported to the doctor, which decides
        say(error=" ".join(str(error).split())[:400])
        sys.exit(1)
    _list_nodes()
    if deep:
        _ask_every_node()
    ray.shutdown()


def _reach_tcp(address: str) -> None:
    """Fail at once, and with a plain reason, where Ray would retry for a minute."""
    scheme, default_port = ("", 10001) if "://" in address else ("tcp://", 6379)
    parts = urlsplit(scheme + address)
    say(stage="tcp", error=f"{parts.hostname} does not answer")
    try:
        socket.create_connection((parts.hostname, parts.port or default_port), TCP_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        say(error=str(error))
        sys.exit(1)


def _watch_ray_log() -> None:
    """Report why Ray keeps retrying: it logs the reason to stderr, waits a minute and then raises an error without it.

    A refused token will not become right by waiting, so that ends the probe at once.
    """
    read_end, write_end = os.pipe()
    real_stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    os.dup2(write_end, sys.stderr.fileno())

    def watch() -> None:
        for line in os.fdopen(read_end, errors="replace"):
            print(line, end="", file=real_stderr, flush=True)
            _, found, reason = line.partition("Failed to get cluster ID from GCS server: ")
            if found:
                say(error=f"Ray does not answer as expected: {reason.strip()}")
            if "Unauthenticated" in reason:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _list_nodes() -> None:
    import ray

    nodes = [
        {
            "name": node["NodeManagerHostname"] or node["NodeManagerAddress"],
            "alive": node["Alive"],
            "CPU": node["Resources"].get("CPU", 0),
            "GPU": node["Resources"].get("GPU", 0),
        }
        for node in ray.nodes()
    ]
    say(nodes=nodes, ray=ray.__version__, python=platform.python_version())


def _software() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def _ask_every_node() -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(_software)
    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answers[f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"] = ask.options(
                scheduling_strategy=here
            ).remote()
    say(software=dict(zip(answers, ray.get(list(answers.values())))))


PROBES = {
    probe.__name__: probe for probe in (torch_info, matmul, cpu_kernels, all_reduce, ray_info, ray_start, ray_cluster)
}

if __name__ == "__main__":
    PROBES[sys.argv[1]](*sys.argv[2:])
