"""A real cluster of two raylets: pools spread over both, checked per node, with collectives across them."""

from __future__ import annotations

import threading
import time

import pytest
import ray
from conftest import RUNTIME_ENV
from example_workers import Plain
from ray.cluster_utils import Cluster

from quadriga.controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourcePoolManager
from quadriga.controller.calls import WorkersLost
from quadriga.controller.resources import reserve_nodes
from quadriga.errors import ResourceError


@pytest.fixture(scope="module")
def cluster():
    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    made.add_node(num_cpus=2)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR", runtime_env=RUNTIME_ENV)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_pool_of_unequal_nodes_is_spread_over_both(cluster):
    manager = ResourcePoolManager({"global_pool": [4, 2]}, {"actor": "global_pool"})
    manager.create_resource_pool()
    group = RayWorkerGroup(manager.get_resource_pool("actor"), RayClassWithInitArgs(Plain))
    try:
        assert [rank for rank, _, _ in group.whoami()] == list(range(6))
        names = ("RAY_LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        seen = group.environment(*names)
        assert [e["RAY_LOCAL_RANK"] for e in seen] == ["0", "1", "2", "3", "0", "1"]
        assert [e["LOCAL_WORLD_SIZE"] for e in seen] == ["4"] * 4 + ["2"] * 2
        assert len({e["MASTER_ADDR"] for e in seen}) == 1
        assert len({seat.node_id for seat in group.seats}) == 2
        assert group.sum_of_ranks() == [(15, "gloo")] * 6
    finally:
        group.shutdown()
        manager.shutdown()


def test_enough_in_total_but_not_on_each_node_is_refused(cluster):
    start = time.monotonic()
    with pytest.raises(ResourceError, match="enough in total, but not on each node") as error:
        ResourcePoolManager({"global_pool": [3, 3]}, {}).create_resource_pool()
    assert time.monotonic() - start < 10
    assert "trainer.n_gpus_per_node=2" in error.value.fix
    assert str(error.value).count("    node ") == 2


def test_more_nodes_than_there_are_is_refused(cluster):
    with pytest.raises(ResourceError, match="3 nodes are wanted and the cluster has 2"):
        ResourcePoolManager({"global_pool": [1, 1, 1]}, {}).create_resource_pool()


def test_two_pools_share_the_nodes(cluster):
    manager = ResourcePoolManager(
        {"actor_pool": [2, 1], "critic_pool": [2]}, {"actor": "actor_pool", "critic": "critic_pool"}
    )
    manager.create_resource_pool()
    try:
        groups = [
            RayWorkerGroup(manager.get_resource_pool(r), RayClassWithInitArgs(Plain)) for r in ("actor", "critic")
        ]
        assert [len(g.whoami()) for g in groups] == [3, 2]
        for group in groups:
            group.shutdown()
    finally:
        manager.shutdown()


def test_a_growing_cluster_is_waited_for(cluster):
    pool = RayResourcePool([2, 2, 2], wait_s=60)
    waiting = threading.Thread(target=pool.get_placement_groups, daemon=True)
    waiting.start()
    time.sleep(1.0)
    assert waiting.is_alive()
    cluster.add_node(num_cpus=3)
    waiting.join(30)
    assert not waiting.is_alive()
    assert len(pool.bundles()) == 6
    pool.shutdown()


def test_a_node_that_goes_away_takes_its_workers_and_says_so(cluster):
    node = cluster.add_node(num_cpus=5)
    pool = RayResourcePool([5], wait_s=30)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain))
    group.wait_ready()
    threading.Timer(1.0, lambda: cluster.remove_node(node, allow_graceful=False)).start()
    with pytest.raises(WorkersLost, match="Plain"):
        group.sleep_for_ever()
    pool.shutdown()


@pytest.mark.parametrize("graceful", [True, False])
def test_a_node_that_disappears_before_its_slots_are_reserved_is_named(cluster, graceful):
    node = cluster.add_node(num_cpus=7)
    pool = RayResourcePool([7])
    chosen = reserve_nodes(pool.demands(), wait_s=20)
    cluster.remove_node(node, allow_graceful=graceful)
    start = time.monotonic()
    with pytest.raises(ResourceError, match=rf"node {chosen[0].ip} went away after its slots were chosen"):
        pool.get_placement_groups(chosen)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("graceful", [True, False])
def test_a_node_that_disappears_before_its_workers_start_is_named(cluster, graceful):
    node = cluster.add_node(num_cpus=7)
    pool = RayResourcePool([7], wait_s=20)
    pool.get_placement_groups()
    cluster.remove_node(node, allow_graceful=graceful)
    start = time.monotonic()
    with pytest.raises((ResourceError, WorkersLost), match=r"went away|died"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain)).wait_ready()
    assert time.monotonic() - start < 10
    pool.shutdown()
