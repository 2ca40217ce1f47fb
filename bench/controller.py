"""What the controller costs on top of plain Ray, on the same actors.

    python bench/controller.py [--repeats 15]

Two jobs, each against hand-written Ray code that does the same to the same actors, alternating in one run:
no-op calls to all workers, and dealing out a 64 MB DataProto, adding one on the workers, and collecting it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import ray
import torch

from quadriga import DataProto
from quadriga.controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register


class Bench(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add_one(self, data: DataProto) -> DataProto:
        data.batch["x"] += 1
        return data


def alternate(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each job, taken in turns so that the machine's mood hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    data = DataProto.from_dict(tensors={"x": torch.rand(4096, 2048), "y": torch.rand(4096, 2048)})
    print(f"{'workers':>7} {'job':<22} {'plain Ray':>12} {'Quadriga':>12} {'ratio':>6}")
    for workers in (1, 2, 4):
        pool = RayResourcePool([workers])
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Bench))
        group.wait_ready()
        handles = group.workers

        def ray_nothing(handles=handles) -> None:
            for _ in range(50):
                ray.get([h.call.remote("Bench", "nothing") for h in handles])

        def our_nothing(group=group) -> None:
            for _ in range(50):
                group.nothing()

        def ray_rows(handles=handles, workers=workers) -> DataProto:
            calls = [h.call.remote("Bench", "add_one", c) for h, c in zip(handles, data.chunk(workers))]
            return DataProto.concat(ray.get(calls))

        def our_rows(group=group) -> DataProto:
            return group.add_one(data)

        for job, plain, ours, unit in (
            ("50 no-op calls", ray_nothing, our_nothing, 50),
            ("64 MB there and back", ray_rows, our_rows, 0),
        ):
            seconds = alternate({"ray": plain, "ours": ours}, repeats)
            shown = [f"{unit / s:.0f} calls/s" if unit else f"{s * 1e3:.0f} ms" for s in seconds.values()]
            print(f"{workers:>7} {job:<22} {shown[0]:>12} {shown[1]:>12} {seconds['ours'] / seconds['ray']:>6.2f}")
        group.shutdown()
        pool.shutdown()


if __name__ == "__main__":
    main()
