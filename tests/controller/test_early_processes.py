"""Processes that start before their workers are known: the workers move in, and find the process prepared."""

from __future__ import annotations

import ray
from example_workers import Plain

from quadriga.controller import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager


def started_early(preparation):
    pools = ResourcePoolManager({"some": [2]}, {"role": "some"}, device="cpu")
    pools.start_early(preparation)
    return pools


def early_pids(pool):
    handles = [handle for _, handle in pool._early._free.values()]
    return [place["pid"] for place in ray.get([handle.where.remote() for handle in handles], timeout=60)]


def test_the_first_group_moves_into_the_prepared_processes(ray_8):
    pools = started_early("preparations:note_threads")
    try:
        pools.create_resource_pool()  # as whoever does not know of the early start would
        pool = pools.get_resource_pool("role")
        waiting = early_pids(pool)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain))
        assert group.pid() == waiting
        for rank, seen in enumerate(group.environment("PREPARED_WITH", "OMP_NUM_THREADS", "RANK")):
            assert seen["PREPARED_WITH"] == seen["OMP_NUM_THREADS"]
            assert seen["RANK"] == str(rank)
        second = RayWorkerGroup(pool, RayClassWithInitArgs(Plain))
        assert not set(second.pid()) & set(waiting)
    finally:
        pools.shutdown()


def test_a_preparation_that_fails_does_no_harm(ray_8):
    pools = started_early("preparations:fail")
    try:
        group = RayWorkerGroup(pools.get_resource_pool("role"), RayClassWithInitArgs(Plain))
        assert group.whoami() == [(0, 2, 0), (1, 2, 0)]
    finally:
        pools.shutdown()


def test_processes_that_nobody_takes_end_with_their_pool(ray_8):
    free = ray.cluster_resources()["CPU"]
    pools = started_early("preparations:note_threads")
    pids = early_pids(pools.get_resource_pool("role"))
    assert len(set(pids)) == 2
    pools.shutdown()
    again = ResourcePoolManager({"all": [int(free)]}, {"role": "all"}, device="cpu", wait_s=30)
    again.create_resource_pool()  # would find no room otherwise
    again.shutdown()
