"""Is there enough, node by node? Told in seconds, with what is needed, what is there, and which key to change."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from quadriga.controller import RayResourcePool, ResourcePoolManager
from quadriga.controller.resources import Demand, Node, place, shortage
from quadriga.errors import ResourceError


def node(number: int, **resources: float) -> Node:
    return Node(f"id{number}", f"10.0.0.{number}", resources, resources)


def demands(pool: str, *slots: int) -> list[Demand]:
    return [Demand(pool, s, {"CPU": float(s), "GPU": float(s)}) for s in slots]


def test_entries_of_a_pool_go_to_different_nodes():
    big = node(1, CPU=64, GPU=16)
    assert place(demands("p", 8, 8), [big]) is None
    assert place(demands("p", 8, 8), [big, node(2, CPU=8, GPU=8)]) is not None


def test_different_pools_may_share_a_node():
    assert place(demands("a", 4) + demands("b", 4), [node(1, CPU=8, GPU=8)]) is not None
    assert place(demands("a", 4) + demands("b", 5), [node(1, CPU=8, GPU=8)]) is None


def test_enough_in_total_but_not_on_each_node():
    nodes = [node(1, CPU=32, GPU=12), node(2, CPU=32, GPU=4)]
    wanted = demands("global_pool", 8, 8)
    assert place(wanted, nodes) is None
    text = str(shortage(wanted, nodes))
    assert "enough in total, but not on each node" in text
    assert "node 10.0.0.2: 4 GPU (4 free), 32 CPU (32 free)" in text
    assert "2 nodes with 8 slots = 8 GPU + 8 CPU each" in text
    assert "trainer.n_gpus_per_node=4" in text


def test_cpus_count_as_well_as_gpus():
    wanted = demands("global_pool", 8)
    text = str(shortage(wanted, [node(1, CPU=2, GPU=8)]))
    assert "Total available CPUs 2 is less than total desired CPUs 8" in text


def test_too_few_nodes_is_said():
    text = str(shortage(demands("p", 1, 1, 1), [node(1, CPU=8, GPU=8), node(2, CPU=8, GPU=8)]))
    assert "3 nodes are wanted and the cluster has 2" in text


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), max_size=3),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_a_placement_never_overbooks_and_is_found_when_one_exists(first, second, sizes):
    nodes = [node(i, CPU=c, GPU=g) for i, (c, g) in enumerate(sizes)]
    wanted = demands("a", *first) + demands("b", *second)
    found = place(wanted, nodes)
    if found is None:
        assert not any(_fits(wanted, nodes, choice) for choice in _choices(len(wanted), len(nodes)))
    else:
        assert _fits(wanted, nodes, [nodes.index(n) for n in found])


def _choices(length, options):
    from itertools import product

    return product(range(options), repeat=length)


def _fits(wanted, nodes, choice):
    if any(choice[i] == choice[j] and wanted[i].pool == wanted[j].pool for i in range(len(wanted)) for j in range(i)):
        return False
    used = {}
    for demand, where in zip(wanted, choice):
        for resource, amount in demand.need.items():
            used[where, resource] = used.get((where, resource), 0) + amount
    return all(amount <= nodes[where].total.get(resource, 0) for (where, resource), amount in used.items())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"global_pool": [9]}, "Total available CPUs 8 is less than total desired CPUs 9"),
        ({"global_pool": [4, 4]}, "2 nodes are wanted and the cluster has 1"),
        ({"a": [5], "b": [4]}, "Total available CPUs 8 is less than total desired CPUs 9"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_within_seconds(ray_8, spec, message):
    start = time.monotonic()
    with pytest.raises(ResourceError, match=message) as error:
        ResourcePoolManager(spec, {}).create_resource_pool()
    assert time.monotonic() - start < 10
    assert "Insufficient resources" in str(error.value)
    assert "node " in str(error.value)
    assert "trainer." in error.value.fix


def test_gpus_on_a_machine_without_any(ray_8):
    start = time.monotonic()
    with pytest.raises(ResourceError, match="Total available GPUs 0 is less than total desired GPUs 1"):
        ResourcePoolManager({"global_pool": [1]}, {}, device="cuda").create_resource_pool()
    assert time.monotonic() - start < 10


def test_a_failed_request_leaves_nothing_reserved(ray_8):
    with pytest.raises(ResourceError):
        ResourcePoolManager({"a": [4], "b": [5]}, {}).create_resource_pool()
    whole = ResourcePoolManager({"all": [8]}, {})
    whole.create_resource_pool()
    whole.shutdown()


def test_busy_slots_are_told_apart_from_missing_ones(ray_8):
    holder = RayResourcePool([6])
    holder.get_placement_groups()
    try:
        with pytest.raises(ResourceError, match="other work holds part of it") as error:
            RayResourcePool([4]).get_placement_groups()
        assert "8 CPU (2 free)" in str(error.value)
    finally:
        holder.shutdown()


def test_slots_just_given_back_can_be_taken_at_once(ray_8):
    for _ in range(3):
        pool = RayResourcePool([8])
        pool.get_placement_groups()
        pool.shutdown()


def test_without_ray_the_error_says_so():
    code = (
        "from quadriga.controller import ResourcePoolManager\n"
        "ResourcePoolManager({'p': [1]}, {}).create_resource_pool()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "Ray not initialized" in run.stderr
    assert "ray.init()" in run.stderr


def test_waiting_for_resources_reports_what_is_missing(ray_8):
    from quadriga.controller.resources import reserve_nodes

    said: list[str] = []
    wanted = [Demand("global_pool", 9, {"CPU": 9.0})]
    start = time.monotonic()
    with pytest.raises(ResourceError):
        reserve_nodes(wanted, wait_s=1.2, say=said.append, say_every_s=0.3)
    assert 1.1 < time.monotonic() - start < 5
    assert len(said) >= 2
    assert "Total available CPUs 8 is less than total desired CPUs 9" in said[0]
    assert ray.is_initialized()


def test_the_limit_of_open_files_is_raised_for_many_workers_and_named_where_it_cannot_be():
    code = (
        "import resource\n"
        "from quadriga.controller.ray_pool import allow_connections\n"
        "from quadriga.errors import ResourceError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 4000))\n"
        "allow_connections(8)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300, 'enough already'\n"
        "allow_connections(1000)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2256\n"
        "try:\n"
        "    allow_connections(3000)\n"
        "except ResourceError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "6256 open files for 3000 workers, and may have 4000" in run.stdout
    assert "ulimit -n" in run.stdout
