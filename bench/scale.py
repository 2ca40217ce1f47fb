"""How the controller grows with the number of workers: start-up, dispatch, the driver's processor time.

    python bench/scale.py [--workers 8 32 128] [--calls 40] [--predict 1000]

The workers are light: real processes in real slots, but without torch. Each figure is fitted by a + b · workers (least
squares on relative error), and the fit is printed with what it predicts.
"""

from __future__ import annotations

import argparse
import os
import statistics
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
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--predict", type=int, default=1000)
    options = parser.parse_args()
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
