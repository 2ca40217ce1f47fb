"""A real Ray with eight logical slots, and workers to put into them."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

# Ray's workers must be able to import the example workers too.
RUNTIME_ENV = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}


@pytest.fixture(scope="module")
def ray_8():
    """One node, eight CPU slots."""
    ray.shutdown()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env=RUNTIME_ENV,
    )
    yield
    ray.shutdown()


@pytest.fixture
def pool_of(ray_8):
    """Make pools that are given back when the test ends."""
    from quadriga.controller import RayResourcePool

    made = []

    def make(sizes, **options):
        pool = RayResourcePool(sizes, **options)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.shutdown()
