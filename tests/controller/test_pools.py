"""Pools: arithmetic, splitting, merging, and where their slots land."""

from __future__ import annotations

import pytest
from example_workers import Plain
from hypothesis import given
from hypothesis import strategies as st

from quadriga.controller import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from quadriga.errors import ConfigError


@given(st.lists(st.integers(1, 9), max_size=6))
def test_ranks_are_counted_node_by_node(sizes):
    pool = ResourcePool(sizes)
    assert pool.world_size == sum(sizes) == len(pool.local_rank_list())
    assert pool() == pool.store == sizes
    pairs = list(zip(pool.local_rank_list(), pool.local_world_size_list()))
    assert pairs == [(local, size) for size in sizes for local in range(size)]


def test_a_node_can_be_added_later():
    pool = ResourcePool([2])
    pool.add_node(3)
    assert pool.store == [2, 3]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_a_node_without_slots_is_refused(bad):
    with pytest.raises(ConfigError, match="slots on a node"):
        ResourcePool([bad])


def test_unequal_nodes_keep_their_sizes(pool_of):
    # One node cannot hold two entries of a pool, so [4] and [2] stand for a [4, 2] pool here; see test_two_nodes for that.
    pool = pool_of([4])
    assert [(b.group_number, b.index) for b in pool.bundles()] == [(0, i) for i in range(4)]


def test_split_pools_run_workers_on_disjoint_slots(pool_of):
    left, right = split_resource_pool(pool_of([4]), [1, 3])
    assert (left.world_size, right.world_size) == (1, 3)
    groups = [RayWorkerGroup(p, RayClassWithInitArgs(Plain)) for p in (left, right)]
    assert [r for r, _, _ in groups[1].whoami()] == [0, 1, 2]
    bundles = [{(b.group.id, b.index) for b in p.bundles()} for p in (left, right)]
    assert not bundles[0] & bundles[1]
    for group in groups:
        group.shutdown()


def test_split_into_equal_parts_and_merge_back(pool_of):
    pool = pool_of([4])
    parts = split_resource_pool(pool, 2)
    assert [p.world_size for p in parts] == [2, 2]
    assert merge_resource_pool(*parts).bundles() == pool.bundles()


@pytest.mark.parametrize("sizes", [3, 0, [1, 2], [5], [4, 0], [-1, 5]])
def test_split_sizes_must_cover_the_pool(pool_of, sizes):
    with pytest.raises(ConfigError):
        split_resource_pool(pool_of([4]), sizes)


def test_pools_of_different_kind_do_not_merge(pool_of):
    with pytest.raises(ConfigError, match="max_colocate_count"):
        merge_resource_pool(pool_of([1]), pool_of([1], max_colocate_count=2))


def test_manager_gives_each_role_its_pool(ray_8):
    manager = ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a", "critic": "b"})
    manager.create_resource_pool()
    try:
        assert manager.get_resource_pool("actor").world_size == 2
        assert manager.get_resource_pool("critic").world_size == 1
        assert manager.get_n_gpus() == 3
        assert manager.get_resource_pool("actor").device == "cpu"
    finally:
        manager.shutdown()


def test_role_in_an_unknown_pool_is_refused():
    with pytest.raises(ConfigError, match="'nowhere', which does not exist") as error:
        ResourcePoolManager({"a": [2]}, {"actor": "nowhere"})
    assert "one of a" in error.value.fix


def test_two_groups_share_the_slots_of_one_pool(pool_of):
    pool = pool_of([2], max_colocate_count=2)
    first = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 1))
    second = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 2))
    assert [o for _, _, o in first.whoami() + second.whoami()] == [1, 1, 2, 2]
    assert not set(first.pid()) & set(second.pid())
