"""The plan's memory of an update is what an update takes, within 15 %: measured in processes of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "memory.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["half the tokens", "activations recomputed"])
def test_an_update_takes_what_the_plan_says(name, tmp_path):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the largest memory of a process can only be told on Linux")
    spec = importlib.util.spec_from_file_location("bench_memory", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    assert bench.predicted(name, tmp_path) == pytest.approx(bench.measured(name, tmp_path), rel=0.15)
