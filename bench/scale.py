"""How the controller grows with the number of workers: start-up, dispatch, the driver's processor time.

    python bench/scale.py [--workers 8 32 128] [--calls 40] [--predict 1000]
    python bench/scale.py --plan [h100-80g]

The workers are light: real processes in real slots, but without torch. Each figure is fitted by a + b · workers (least
squares on relative error), and the fit is printed with what it predicts.

`--plan` starts nothing: it prints what the plan says about a model of 70B weights on 4 nodes of 8 GPUs, phase by phase.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ray

from quadriga.controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register


class Light(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(Dispatch.ONE_TO_ALL)
    def memory_mb(self) -> float:
        """Of this process alone."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024

    def finished(self) -> list[int]:
        return []


def measure(workers: int, calls: int) -> dict[str, float]:
    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    pool = RayResourcePool([workers], device="cpu")
    start = time.perf_counter()
    pool.get_placement_groups()
    placed = time.perf_counter()
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Light), start_timeout_s=280)
    group.wait_ready()
    ready = time.perf_counter()
    call_s, call_cpu_s = timed(group.nothing, calls)
    ask_s, ask_cpu_s = timed(lambda: group.ask("finished"), calls)
    told = {
        "placement s": placed - start,
        "start-up s": ready - placed,
        "call ms": call_s * 1e3,
        "driver CPU per call ms": call_cpu_s * 1e3,
        "poll ms": ask_s * 1e3,
        "driver CPU per poll ms": ask_cpu_s * 1e3,
        "memory MB": sum(group.memory_mb()),
        "driver threads": float(len(os.listdir("/proc/self/task"))),
        "driver sockets": float(sum("socket" in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files())),
    }
    group.shutdown()
    pool.shutdown()
    ray.shutdown()
    return told


def timed(job: Callable[[], object], calls: int) -> tuple[float, float]:
    """Median seconds of a call, and this process's own processor time for one."""
    for _ in range(3):
        job()
    seconds, cpu = [], time.process_time()
    for _ in range(calls):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), (time.process_time() - cpu) / calls


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def fit(workers: list[int], values: list[float]) -> tuple[float, float]:
    """a and b of a + b · workers, every point with the same relative weight."""
    weight = 1 / np.asarray(values)
    lines = np.stack([np.ones(len(workers)), np.asarray(workers, dtype=float)], axis=1) * weight[:, None]
    a, b = np.linalg.lstsq(lines, np.ones(len(workers)), rcond=None)[0]
    return float(a), float(b)


LLAMA_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8} | {
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
ASSUMED = {
    "trainer.nnodes": 4,
    "trainer.n_gpus_per_node": 8,
    "data.train_batch_size": 128,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 8192,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192,
    "actor_rollout_ref.model.enable_gradient_checkpointing": "auto",
    "data.train_files": "train.parquet",
    "data.val_files": "val.parquet",
}


def plan_70b(gpu: str) -> None:
    """Print the assumptions, bytes of a worker by phase, and the verdict, for a few layouts."""
    from omegaconf import OmegaConf

    from quadriga.config import load_config
    from quadriga.config.memory import PHASES
    from quadriga.config.plan import format_bytes, make_plan

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_70B))
        print("assumed: Llama 70B, " + ", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in ASSUMED.items()))
        optimiser, actor = "actor_rollout_ref.actor.optim.name", "actor_rollout_ref.actor.fsdp_config"
        for name, changes in (
            ("AdamW", {}),
            ("adamw_8bit, bf16 gradients", {optimiser: "adamw_8bit", f"{actor}.grad_dtype": "bfloat16"}),
            ("optimiser offloaded", {f"{actor}.optimizer_offload": True}),
        ):
            merged = OmegaConf.create({})
            for key, value in {**ASSUMED, **changes, "actor_rollout_ref.model.path": folder}.items():
                OmegaConf.update(merged, key, value)
            plan = make_plan(load_config(merged), gpu)
            memory = plan.memory[0]
            print(f"\n{name} on {gpu}: {'fits' if plan.fits else 'does not fit'}")
            for phase in PHASES:
                parts = [item for item in memory.items if phase in item.phases and item.size]
                print(f"  {phase:<14}{format_bytes(memory.in_phase(phase)):>10}", end="   ")
                print(", ".join(f"{item.role} {item.what} {format_bytes(item.size)}" for item in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--predict", type=int, default=1000)
    parser.add_argument("--plan", nargs="?", const="h100-80g", metavar="GPU")
    options = parser.parse_args()
    if options.plan:
        plan_70b(options.plan)
        return
    found = [measure(workers, options.calls) for workers in options.workers]
    head = "".join(f"{n:>10}" for n in options.workers)
    print(f"{'workers':<24}{head}   a + b · workers{'':<12}at {options.predict}")
    for name in found[0]:
        values = [told[name] for told in found]
        a, b = fit(options.workers, values)
        shown = "".join(f"{v:>10.3g}" for v in values)
        print(f"{name:<24}{shown}   {a:.3g} + {b:.3g} · workers{'':<6}{a + b * options.predict:.4g}")


if __name__ == "__main__":
    main()
