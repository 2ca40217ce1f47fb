"""Groups of real worker processes: their place in the world, calls by name, shared processes, detached ones."""

from __future__ import annotations

import os

import pytest
import ray
from example_workers import CannotStart, Plain, Rows
from ray.util import placement_group_table

from quadriga.controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    register,
)
from quadriga.controller.calls import WorkersLost
from quadriga.controller.worker import ray_noset_visible_devices
from quadriga.errors import ConfigError, ResourceError, WorkerError


@pytest.fixture
def group_of(pool_of):
    def make(worker_class, *args, slots=2, **options):
        return RayWorkerGroup(pool_of([slots]), RayClassWithInitArgs(worker_class, *args), **options)

    return make


def test_eight_workers_know_their_place(group_of):
    group = group_of(Plain, 7, slots=8)
    assert group.world_size == 8
    assert group.whoami() == [(rank, 8, 7) for rank in range(8)]
    assert len(set(group.pid())) == 8


def test_workers_get_the_environment_of_their_rank(group_of):
    group = group_of(Plain, worker_env={"MINE": "yes"})
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "QUADRIGA_DEVICE",
        "MINE",
    )
    first, second = group.environment(*names)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == second["MASTER_PORT"] == str(group.master_port)
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == group.master_address
    assert (first["QUADRIGA_DEVICE"], first["MINE"]) == ("cpu", "yes")


def test_cores_are_divided_between_the_workers_of_a_node(group_of):
    (threads, *_) = {e["OMP_NUM_THREADS"] for e in group_of(Plain).environment("OMP_NUM_THREADS")}
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK"])
def test_the_groups_own_variables_cannot_be_overridden(group_of, name):
    with pytest.raises(ConfigError, match=f"Cannot override protected system env: {{{name}}}"):
        group_of(Plain, worker_env={name: "1"})


def test_collectives_connect_the_workers(group_of):
    assert group_of(Plain, slots=3).sum_of_ranks() == [(3, "gloo")] * 3


def test_collectives_honour_dist_init_method(group_of, tmp_path):
    group = group_of(Plain, worker_env={"DIST_INIT_METHOD": f"file://{tmp_path}/meet"})
    assert group.sum_of_ranks() == [(1, "gloo")] * 2
    assert (tmp_path / "meet").exists()


def test_light_workers_do_not_import_torch(group_of):
    group = group_of(Plain)
    group.whoami()
    assert group.modules() == [[], []]


def test_calls_by_name(group_of):
    group = group_of(Plain)
    assert group.execute_all_sync("echo", "x", times=2) == ["xx", "xx"]
    assert group.execute_all_sync("echo", [1, 2]) == [1, 2]
    assert group.execute_all_sync("echo", [1, 2, 3]) == [[1, 2, 3]] * 2
    assert ray.get(group.execute_all_async("echo", 5)) == [5, 5]
    assert group.execute_all("echo", 5).get() == [5, 5]
    assert group.execute_rank_zero_sync("whoami") == (0, 2, 0)
    assert group.execute_rank_zero("echo", [1, 2]).get() == [1, 2]
    assert group.execute_rank_zero_async("echo", 3).get() == 3


def test_a_remote_class_works_like_a_plain_one(pool_of):
    group = RayWorkerGroup(pool_of([1]), RayClassWithInitArgs(ray.remote(Plain), 3))
    assert group.whoami() == [(0, 1, 3)]


def test_colocated_roles_share_one_process_per_slot(pool_of):
    roles = {
        "actor": RayClassWithInitArgs(Plain, 1),
        "critic": RayClassWithInitArgs(Plain, offset=2),
        "rows": RayClassWithInitArgs(Rows),
    }
    host = RayWorkerGroup(pool_of([2]), create_colocated_worker_cls(roles))
    assert host.actor_whoami() == [(0, 2, 1), (1, 2, 1)]
    groups = host.spawn(roles)
    assert groups["critic"].whoami() == [(0, 2, 2), (1, 2, 2)]
    assert groups["actor"].pid() == groups["critic"].pid() == host.critic_pid()
    assert not hasattr(groups["critic"], "double")
    assert groups["actor"].sum_of_ranks() == groups["critic"].sum_of_ranks() == [(1, "gloo")] * 2
    with pytest.raises(ConfigError, match="no role 'judge'"):
        host.spawn(["judge"])


def test_detached_workers_are_found_again_by_name(pool_of):
    group = RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Plain, 4), detached=True, name_prefix="found_again_")
    group.wait_ready()
    assert group.worker_names == ["found_again_Plain_0:0", "found_again_Plain_0:1"]
    again = RayWorkerGroup.from_detached(group.worker_names, RayClassWithInitArgs(Plain))
    assert again.whoami() == [(0, 2, 4), (1, 2, 4)]
    assert again.pid() == group.pid()
    group.shutdown()
    with pytest.raises(WorkerError, match="not there"):
        RayWorkerGroup.from_detached(["nobody"], RayClassWithInitArgs(Plain))


def test_additional_resources_and_options_reach_the_processes(pool_of):
    member = RayClassWithInitArgs(Plain)
    member.update_options({"runtime_env": {"env_vars": {"FROM_OPTIONS": "1"}}})
    group = RayWorkerGroup(pool_of([1]), member)
    assert group.environment("FROM_OPTIONS") == [{"FROM_OPTIONS": "1"}]
    greedy = RayClassWithInitArgs(Plain)
    greedy.set_additional_resource({"unobtainium": 1})
    with pytest.raises(ResourceError, match="does not fit into a slot"):
        RayWorkerGroup(pool_of([1]), greedy)


def test_a_worker_method_may_not_hide_a_method_of_the_group(pool_of):
    class Hides(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def shutdown(self):
            return 1

    with pytest.raises(ConfigError, match="rename the worker's method"):
        RayWorkerGroup(pool_of([1]), RayClassWithInitArgs(Hides))


def test_a_worker_outside_a_group_says_what_it_misses(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorkerError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        CannotStart()


def test_conflicting_device_visibility_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    with pytest.raises(ResourceError, match="ROCR_VISIBLE_DEVICES"):
        Worker()
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    with pytest.raises(ResourceError, match="disagree"):
        Worker()


@pytest.mark.parametrize("family", ["CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"])
def test_the_noset_family_is_recognised(family):
    assert ray_noset_visible_devices({f"RAY_EXPERIMENTAL_NOSET_{family}": "1"})
    assert not ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_OTHER": "1"})


def test_device_number_follows_ray_where_all_devices_are_visible():
    from quadriga.controller.placement_env import rank_environments

    def place(ids, noset):
        return {
            "node_id": "n",
            "node_ip": "10.0.0.1",
            "interfaces": ["lo", "eth0", "eth1"],
            "cores": 8,
            "chosen_interface": None,
            "noset": noset,
            "accelerator_ids": {"GPU": ids},
        }

    own = rank_environments([place(["5"], []), place(["6"], [])], "cuda", "")
    assert [e["LOCAL_RANK"] for e in own] == ["0", "0"]
    shared = rank_environments([place(["5"], ["x"]), place(["6"], ["x"])], "cuda", "")
    assert [e["LOCAL_RANK"] for e in shared] == ["5", "6"]
    assert [e["RAY_LOCAL_RANK"] for e in shared] == ["0", "1"]


@pytest.mark.parametrize(("inherited", "used"), [(None, "eth0"), ("lo", "eth0"), ("ib0", None)])
def test_between_nodes_the_collectives_take_the_interface_of_the_node_unless_another_was_chosen(inherited, used):
    """Loopback is no choice between nodes: it is what a process that ran a group alone passes on."""
    from quadriga.controller.placement_env import rank_environments

    places = [
        {
            "node_id": n,
            "node_ip": n,
            "interfaces": ["lo", "eth0", "ib0"],
            "cores": 8,
            "interface": "eth0",
            "chosen_interface": inherited,
        }
        for n in ("10.0.0.1", "10.0.0.2")
    ]
    assert [e.get("GLOO_SOCKET_IFNAME") for e in rank_environments(places, "cpu", "")] == [used, used]


def test_a_group_needs_a_pool_or_names():
    with pytest.raises(ConfigError):
        RayWorkerGroup(None, RayClassWithInitArgs(Plain))


def test_a_worker_is_replaced_in_its_slot_but_not_after_the_end_of_its_group(pool_of):
    pool = pool_of([2])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 7))
    before = group.pid()
    group.replace([1])
    after = group.pid()
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    group.shutdown()
    pool.shutdown()
    groups = {name for name, about in placement_group_table().items() if about["state"] != "REMOVED"}
    with pytest.raises(WorkersLost, match="shut down"):
        group.replace([1])  # as by a thread that has heard of a death, and not that its run has ended
    assert {name for name, about in placement_group_table().items() if about["state"] != "REMOVED"} <= groups
