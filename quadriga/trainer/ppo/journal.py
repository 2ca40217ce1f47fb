"""What a run writes down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Phases:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"timing_s/{name}"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - start

    def take_timings(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken


class Journal:
    def __init__(self, config: Any) -> None:
        self.phases = _Phases()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        keys = (
            "critic/score/mean",
            "actor/entropy",
            "actor/grad_norm",
            "response_length/mean",
            "rollout/logprob_diff_mean",
            "critic/vf_loss",
        )
        times = {k.removeprefix("timing_s/"): round(v, 2) for k, v in metrics.items() if k.startswith("timing_s/")}
        print(step, {k: round(metrics[k], 5) for k in keys if k in metrics}, times, flush=True)

    def samples(self, step, rows, kind):
        pass

    def validation(self, step: int, figures: dict[str, float], rows: list[dict[str, Any]]) -> None:
        print(step, figures, [(r["prompt"], r["response"], r["ground_truth"]) for r in rows[:3]], flush=True)

    def finish(self, trainer: Any) -> None:
        pass
