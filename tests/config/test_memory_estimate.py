"""The plan's memory is what an update and a generation take, within 15 %: measured in processes of their own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "memory.py"


spec = importlib.util.spec_from_file_location("bench_memory", BENCH)
assert spec is not None
assert spec.loader is not None
bench = importlib.util.module_from_spec(spec)
sys.modules["bench_memory"] = bench
spec.loader.exec_module(bench)


@pytest.mark.slow
@pytest.mark.parametrize("name", bench.CASES)
def test_a_worker_takes_what_the_plan_says(name, tmp_path):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the largest memory of a process can only be told on Linux")
    assert bench.predicted(name, tmp_path) == pytest.approx(bench.measured(name, tmp_path), rel=0.15)
