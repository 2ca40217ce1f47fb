"""Probe: `all_reduce.py gloo|nccl` sums one number over two processes that meet on 127.0.0.1.

Rank 0 starts rank 1 before it imports torch, so that both imports overlap; the port follows through a pipe.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from typing import Any

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)  # the doctor kills this process long before


def rank_zero(backend: str) -> None:
    peer = subprocess.Popen([sys.executable, "-P", __file__, backend, "peer"], stdin=subprocess.PIPE, text=True)
    from torch import cuda
    from torch.distributed import TCPStore

    # NCCL refuses two ranks on one GPU, so the world is as large as the GPUs allow.
    world_size = 2 if backend == "gloo" else min(2, cuda.device_count())
    store = TCPStore(HOST, 0, world_size or 1, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    print(store.port if world_size == 2 else "", file=peer.stdin, flush=True)
    if world_size:
        all_reduce(backend, store, rank=0, world_size=world_size)
    nccl = ".".join(map(str, cuda.nccl.version())) if backend == "nccl" and world_size else None
    if peer.wait():
        sys.exit("the second process failed")
    print(json.dumps({"world_size": world_size, "nccl": nccl}), flush=True)


def rank_one(backend: str) -> None:
    from torch.distributed import TCPStore

    port = sys.stdin.readline().strip()
    if port:
        store = TCPStore(HOST, int(port), 2, is_master=False, timeout=TIMEOUT)
        all_reduce(backend, store, rank=1, world_size=2)


def all_reduce(backend: str, store: Any, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    number = torch.tensor([float(rank + 1)], device=device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    dist.all_reduce(number)
    if number.item() != sum(range(1, world_size + 1)):
        sys.exit(f"the sum over {world_size} processes came out as {number.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    is_peer = len(sys.argv) > 2
    (rank_one if is_peer else rank_zero)(sys.argv[1])
