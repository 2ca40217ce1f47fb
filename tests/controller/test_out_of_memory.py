"""What Ray ends because a node's memory runs out is a death, with its reason: it is healed like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from example_workers import Plain

from quadriga.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from quadriga.controller.calls import Seat, WorkersDied, death_among, fetch


@pytest.fixture
def ray_whose_memory_is_always_short():
    """Its monitor ends workers as soon as 1 % of the machine's memory is in use."""
    ray.shutdown()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
        _system_config={"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 100},
    )
    yield
    ray.shutdown()


def test_a_worker_that_the_memory_monitor_ends_has_died_and_memory_is_named(ray_whose_memory_is_always_short):
    with pytest.raises(WorkersDied) as died:
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Plain), call_timeout_s=60).sleep_for_ever()
    assert "a worker of Plain was ended by Ray" in died.value.what
    assert "its node ran out of memory:\n  " in died.value.what
    assert "used /" in died.value.what, "Ray's figures"
    assert "ray.get" not in died.value.what, "not its whole page"
    assert "quadriga plan" in died.value.fix

    @ray.remote(max_retries=0)
    def long():
        import time

        time.sleep(600)

    seats = [Seat("Plain", 0, 1)]
    pending = [long.remote()]
    with pytest.raises(WorkersDied):
        fetch(pending, lambda: seats, "long", 60)
    assert isinstance(death_among(pending, seats, "long"), WorkersDied), "what its peers raise meanwhile has this cause"
