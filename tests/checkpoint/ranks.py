"""Run a function in a process of its own, or on several ranks: real processes that talk over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports these once, and every rank is a fork of it; it does not know the folder of this file.
_CONTEXT.set_forkserver_preload(
    [
        "transformers.models.llama.modeling_llama",
        "quadriga.engine",
        "quadriga.checkpoint.shards",
        "torch.distributed.fsdp",
    ]
)


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """`function(*arguments)` on each of `world_size` ranks; what each returned. A rank that raises fails the test."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world_size, mp_context=_CONTEXT) as pool:
        meeting = str(Path(folder) / "meeting")
        futures = [pool.submit(_run, rank, world_size, meeting, function, arguments) for rank in range(world_size)]
        results = [future.result(timeout=timeout_s) for future in futures]
    for rank, (_, error) in enumerate(results):
        if error:
            raise RuntimeError(f"rank {rank} of {world_size}:\n{error}")
    return [result for result, _ in results]


def start_process(function: Callable[..., Any], *arguments: Any, kill_after_s: float | None = None) -> int:
    """`function(*arguments)` in a fresh process; its exit status, negative for the signal that ended it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(120 if kill_after_s is None else kill_after_s)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode if process.exitcode is not None else 1


def _run(rank: int, world_size: int, meeting: str, function: Callable[..., Any], arguments: Any) -> tuple[Any, str]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    try:
        return function(*arguments), ""
    except Exception:
        return None, traceback.format_exc()
    finally:
        dist.destroy_process_group()
