"""What generation ahead of training brings, and whether driver and router keep up.

python bench/stream.py judge [--steps 40] [--latency 0.4] [--rounds 2]
    The quickstart's job with a judge that takes its time (an async reward function): steps per minute of k = 0, ordered
    k = 1 and k = 3, and free, taking turns.
python bench/stream.py learn [--seeds 3]
    Held-out accuracy of the quickstart with k = 0, 1 and 4.
python bench/stream.py ragged
    Two engines and lengths with a long tail: engine time spent idle while requests wait, with the router and with a static
    split of the requests.
python bench/stream.py latency [--rounds 200]
    Driver to engine and back over Ray: seconds from submitting a request of one token until its sample is with the driver.
python bench/stream.py driver [--engines 64] [--in-flight 4096] [--episodes 50000]
    Finished samples a second through router, groups and scoring hand-over of one driver, with stubs as engines.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

JUDGE = """
import asyncio

async def judge(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep({latency})
    return float(solution_str.split("####")[-1].strip() == str(ground_truth))
"""


def train(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Metrics of a run of the quickstart."""
    command = [sys.executable, "-m", "quadriga.cli", "train", "--config-name=quickstart", "trainer.logger=[]"]
    command += [f"trainer.default_local_dir={folder}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ahead(k: int, mode: str = "ordered") -> list[str]:
    return [f"async_training.staleness={k}", *([f"async_training.mode={mode}"] if k else [])]


def judge(arguments: argparse.Namespace) -> None:
    kinds = {"k = 0": ahead(0), "ordered k = 1": ahead(1), "ordered k = 3": ahead(3), "free k = 3": ahead(3, "free")}
    pace: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "judge.py")
        file.write_text(JUDGE.format(latency=arguments.latency))
        common = [
            f"custom_reward_function.path={file}",
            "custom_reward_function.name=judge",
            f"trainer.total_training_steps={arguments.steps}",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.val_before_train=false",
            "reward.num_workers=1",
            "reward.max_concurrent=1024",
        ]
        for turn in range(arguments.rounds):
            for name, keys in kinds.items():
                lines = [m for m in train(Path(folder, f"{turn}{name}"), *common, *keys) if m["step"]]
                steady = lines[len(lines) // 4 :]
                seconds = (steady[-1]["time"] - steady[0]["time"]) / (len(steady) - 1)
                pace[name].append(60 / seconds)
                print(
                    f"{name}: {60 / seconds:.0f} steps a minute, score {lines[-1]['critic/score/mean']:.2f}", flush=True
                )
    base = median(pace["k = 0"])
    for name, values in pace.items():
        print(f"{name:14} {median(values):6.0f} steps a minute, {median(values) / base:.2f} ×")


def learn(arguments: argparse.Namespace) -> None:
    for seed in range(arguments.seeds):
        for k in (0, 1, 4):
            with tempfile.TemporaryDirectory() as folder:
                seeds = [f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
                lines = train(Path(folder), *seeds, *ahead(k))
            held_out = [v for m in lines for name, v in m.items() if name.endswith("/acc/mean@1")]
            print(f"seed {seed}, k = {k}: {held_out[0]:.1%} → {held_out[-1]:.1%}", flush=True)


class StubEngines:
    """Engines without a model: a sample takes a while, on a clock of their own thread."""

    def __init__(self, engines: int, capacity: int, seconds: Any) -> None:
        self.capacities, self._seconds = [capacity] * engines, seconds
        self._running: list[deque[tuple[float, Any, int]]] = [deque() for _ in range(engines)]
        self._lock = threading.Lock()
        self.busy_s = [0.0] * engines

    def submit(self, rank: int, requests: list[Any]) -> None:
        now = time.monotonic()
        with self._lock:
            self._running[rank] += [(now + self._seconds(r, k), r, k) for r in requests for k in r.sample_indices]

    def abort(self, rank: int, request_ids: list[str]) -> None: ...

    def take_weights(self, rank: int, version: int) -> None: ...

    def events(self, timeout_s: float) -> list[Any]:
        import numpy as np

        from quadriga.rollout.router import Delivered
        from quadriga.rollout.service import Delivery, Sample

        ids, zeros = np.zeros(16, np.int32), np.zeros(16, np.float32)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            events = []
            with self._lock:
                now = time.monotonic()
                for rank, running in enumerate(self._running):
                    done = [one for one in running if one[0] <= now]
                    if done:
                        self._running[rank] = deque(one for one in running if one[0] > now)
                        samples = [Sample(r.request_id, k, ids, zeros, zeros, "stop", ((0, 16),)) for _, r, k in done]
                        events.append(Delivered(rank, Delivery(samples, None, 0.0, 0.0, [])))
            if events:
                return events
            time.sleep(0.0005)
        return []


def driver(arguments: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from quadriga.protocol import DataProto
    from quadriga.rollout.interface import SamplingParams
    from quadriga.rollout.router import Router
    from quadriga.trainer.ppo.groups import batch_of
    from quadriga.trainer.ppo.stream import Stream, Window

    n, size = 8, arguments.in_flight // 8 // 2
    draw = random.Random(0)

    class Loader:
        """Prompts without end."""

        batch_size, drawn = size, 0

        def next_batch(self) -> tuple[int, DataProto]:
            first, self.drawn = self.drawn, self.drawn + size
            columns = {
                "uid": np.array([f"0:{i}" for i in range(first, first + size)], object),
                "epoch": np.zeros(size, np.int64),
                "index": np.arange(first, first + size),
            }
            ids = torch.ones(size, 32, dtype=torch.long)
            return 0, DataProto.from_dict({"input_ids": ids, "attention_mask": ids}, columns)

    class NoPhase:
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    engines = StubEngines(
        arguments.engines, -(-arguments.in_flight // arguments.engines), lambda r, k: draw.random() * 0.2
    )
    stream = Stream(
        Window(1, True),
        Loader(),  # type: ignore[arg-type]
        lambda on_samples: Router(engines, on_samples),
        total_steps=1 << 30,
        n=n,
        greedy=False,
        sampling=SamplingParams(max_new_tokens=16),
        scorer=None,
        phase=lambda name: NoPhase(),
    )
    stream.router.holds(0)
    stream.published(0, 0)
    began, done, step = time.perf_counter(), 0, 0
    while done < arguments.episodes:
        step += 1
        groups, _ = stream.take(step, size)
        batch_of(groups, 0, lambda rows: rows)
        done += len(groups) * n
        stream.router.holds(step)
        stream.published(step, step)
    seconds = time.perf_counter() - began
    stream.close()
    print(f"{arguments.engines} engines, {arguments.in_flight} in flight: {done / seconds:,.0f} samples a second")


def latency(arguments: argparse.Namespace) -> None:
    import ray

    from quadriga.config.load import load_config
    from quadriga.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from quadriga.rollout.interface import Request, SamplingParams
    from quadriga.rollout.router import Router
    from quadriga.trainer.ppo.engines import PublishedWeights, RayEngines
    from quadriga.trainer.ppo.restarts import Restarts
    from quadriga.workers import RolloutWorker

    config = load_config({"actor_rollout_ref": {"model": {"path": "builtin:arithmetic"}}})
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    pool = RayResourcePool([1], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(RolloutWorker, config=config, role="rollout"))
    group.join()
    group.init_model()
    came: list[Any] = []
    engines = RayEngines(group, PublishedWeights(), 64, alone=False, restarts=Restarts(0, print))
    router = Router(engines, came.extend)
    router.holds(0)
    seconds = []
    for k in range(arguments.rounds):
        began = time.perf_counter()
        router.submit([Request(str(k), [1, 2, 3], SamplingParams(max_new_tokens=1))])
        router.wait(lambda k=k: len(came) > k)
        seconds.append(time.perf_counter() - began)
    router.close()
    ray.shutdown()
    ordered = sorted(seconds[len(seconds) // 10 :])
    print(f"request to sample: median {1e3 * median(ordered):.1f} ms, 95 % within ", end="")
    print(f"{1e3 * ordered[int(0.95 * len(ordered))]:.1f} ms")


def ragged(arguments: argparse.Namespace) -> None:
    from quadriga.rollout.interface import Request, SamplingParams
    from quadriga.rollout.router import Router

    draw, count, capacity = random.Random(1), 600, 16
    lengths = [min(2.0, 0.02 * draw.paretovariate(1.1)) for _ in range(count)]
    requests = [Request(str(i), [1], SamplingParams()) for i in range(count)]

    def static_split() -> float:
        """Each engine has its half from the start: when the other is done, it waits."""
        ends = []
        for half in (lengths[: count // 2], lengths[count // 2 :]):
            rows = [0.0] * capacity
            for seconds in half:
                rows[rows.index(min(rows))] += seconds
            ends.append((max(rows), sum(rows)))
        whole = max(end for end, _ in ends)
        return 1 - sum(end for end, _ in ends) / (2 * whole)

    came: list[Any] = []
    engines = StubEngines(2, capacity, lambda r, k: lengths[int(r.request_id)])
    router = Router(engines, came.extend)
    router.holds(0)
    router.submit(requests)
    idle = waiting = 0
    while len(came) < count:
        time.sleep(0.002)
        if router.waiting():
            waiting += 2
            idle += 2 - len(router.loads())
    router.close()
    print(f"idle share of engine time while requests wait: router {idle / max(1, waiting):.1%}, ", end="")
    print(f"static split {static_split():.1%} (idle while the other engine still works)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("judge", "learn", "ragged", "latency", "driver"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--latency", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=4096)
    parser.add_argument("--episodes", type=int, default=50_000)
    arguments = parser.parse_args()
    globals()[arguments.what](arguments)


if __name__ == "__main__":
    main()
