"""Dispatch modes, on real worker processes and in the calling process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from example_workers import Plain, Rows

from quadriga import DataProto
from quadriga.controller import (
    Dispatch,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePool,
    Worker,
    create_colocated_worker_cls,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from quadriga.errors import ConfigError, WorkerError


def rows(n: int) -> DataProto:
    names = np.array([f"row{i}" for i in range(n)], dtype=object)
    return DataProto.from_dict(tensors={"x": torch.arange(n)}, non_tensors={"name": names}, meta_info={"t": 1})


@pytest.fixture(scope="module")
def groups(ray_8):
    """One pool of four slots, with a group of each kind of worker in them."""
    from quadriga.controller import RayResourcePool

    pool = RayResourcePool([4])
    made = {
        "plain": RayWorkerGroup(pool, RayClassWithInitArgs(Plain, 100)),
        "rows": RayWorkerGroup(pool, RayClassWithInitArgs(Rows, tensor_parallel=2)),
    }
    yield made
    for group in made.values():
        group.shutdown()
    pool.shutdown()


@pytest.fixture
def plain(groups):
    return groups["plain"]


@pytest.fixture
def on_rows(groups):
    return groups["rows"]


def test_one_to_all_replicates(plain):
    assert plain.echo("a", times=2) == ["aa"] * 4


def test_async_methods_are_awaited(plain):
    assert plain.echo_async(3) == [3] * 4


def test_all_to_all_deals_out_lists_of_the_right_length(plain):
    assert plain.own([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert plain.own([1, 2]) == [[1, 2]] * 4


def test_dp_compute_wants_one_entry_per_rank(plain):
    assert plain.add([1, 2, 3, 4], b=[10, 20, 30, 40]) == [111, 122, 133, 144]
    with pytest.raises(ConfigError, match="one entry for each of the 4 ranks, got list of length 2"):
        plain.add([1, 2], [3, 4])


def test_rank_zero_runs_on_the_first_rank_only(plain):
    assert plain.first("x") == (0, "x")
    assert plain.first_of_all("x") == (0, "x")


def test_non_blocking_calls_return_at_once(plain):
    assert plain.later("x", delay_s=0.2).get() == ["x"] * 4


def test_rows_are_dealt_out_in_order_and_collected(on_rows):
    out = on_rows.double(rows(8))
    assert out.batch["x"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert out.non_tensor_batch["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert out.non_tensor_batch["name"].tolist() == [f"row{i}" for i in range(8)]
    assert out.meta_info == {"t": 1}


@pytest.mark.parametrize("n", [1, 3, 5, 7, 9])
def test_rows_that_do_not_divide_come_back_in_their_own_number(on_rows, n):
    out = on_rows.double(rows(n))
    assert out.batch["x"].tolist() == [2 * i for i in range(n)]


def test_the_callers_data_is_left_alone(on_rows):
    data = rows(8)
    on_rows.double(data)
    assert data.batch["x"].tolist() == list(range(8))


def test_a_future_can_be_passed_on_without_being_fetched(on_rows):
    future = on_rows.double_later(rows(8))
    assert on_rows.double(future).batch["x"].tolist() == [4 * i for i in range(8)]
    assert on_rows.double_later(on_rows.double_later(rows(4))).get().batch["x"].tolist() == [0, 4, 8, 12]


def test_with_func_sends_the_function_along(on_rows):
    def triple(data):
        data.batch["x"] = data.batch["x"] * 3
        return data

    assert on_rows.apply(triple, rows(4)).batch["x"].tolist() == [0, 3, 6, 9]


def test_metric_mode_returns_one_answer_per_rank(on_rows):
    assert on_rows.count(rows(8)) == [2, 2, 2, 2]


def test_mesh_gives_the_same_rows_to_a_data_parallel_rank_and_keeps_one_answer(on_rows):
    out = on_rows.on_mesh(rows(4))
    assert out.batch["x"].tolist() == [0, 1, 2, 3]
    assert out.non_tensor_batch["rank"].tolist() == [0, 0, 2, 2]
    assert on_rows.on_mesh(rows(3)).batch["x"].tolist() == [0, 1, 2]


def test_a_mesh_nobody_registered_is_an_error(on_rows):
    with pytest.raises(WorkerError, match="no place in the mesh 'unknown'"):
        on_rows.on_unknown_mesh(rows(4))


def test_row_methods_refuse_other_arguments(on_rows):
    with pytest.raises(ConfigError, match="deals out rows of a DataProto, got int"):
        on_rows.double(5)


def test_an_error_in_a_row_method_names_the_worker(on_rows):
    with pytest.raises(WorkerError, match="RuntimeError: 2 rows are too many") as error:
        on_rows.fail(rows(8))
    assert "Rows rank" in str(error.value)


def test_large_arguments_go_through_the_object_store_once(plain, monkeypatch):
    import ray

    put = []
    monkeypatch.setattr(ray, "put", lambda value, real=ray.put: (put.append(value), real(value))[1])
    assert len(plain.echo(b"x" * 1_000_000)) == 4
    assert len(put) == 1
    plain.echo(b"small")
    assert len(put) == 1


def test_own_dispatch_mode():
    def reversed_ranks(group, values):
        return (list(reversed(values)),), {}

    def total(group, outputs):
        return sum(outputs)

    register_dispatch_mode("REVERSED", reversed_ranks, total)
    with pytest.raises(ConfigError, match="exists already"):
        register_dispatch_mode("REVERSED", reversed_ranks, total)

    class Mine(Worker):
        @register(Dispatch.REVERSED)
        def same(self, value):
            return value

        @register({"dispatch_fn": reversed_ranks, "collect_fn": total})
        def same_pair(self, value):
            return value

    group = LocalWorkerGroup(None, RayClassWithInitArgs(Mine))
    assert group.same([7]) == 7
    assert group.same_pair([7]) == 7
    with pytest.raises(ConfigError, match="2 entries for 1 ranks"):
        group.same([7, 8])
    update_dispatch_mode("REVERSED", reversed_ranks, lambda group, outputs: "replaced")

    class Updated(Worker):
        @register(Dispatch.REVERSED)
        def same(self, value):
            return value

    assert LocalWorkerGroup(None, RayClassWithInitArgs(Updated)).same([7]) == "replaced"


def test_unknown_modes_list_the_known_ones():
    with pytest.raises(ConfigError, match="unknown dispatch mode 'SOME'") as error:
        register("SOME")
    assert "DP_COMPUTE_PROTO" in error.value.fix
    with pytest.raises(ConfigError, match="unknown execute mode"):
        register(Dispatch.ONE_TO_ALL, execute_mode="TWICE")


def test_local_group_has_the_same_surface():
    group = LocalWorkerGroup(ResourcePool([1]), RayClassWithInitArgs(Plain, 100))
    assert group.whoami() == [(0, 1, 100)]
    assert group.echo_async(1) == [1]
    assert group.add([1], [2]) == [103]
    assert group.first("x") == (0, "x")
    assert group.later("x").get() == ["x"]
    assert group.execute_all_sync("echo", 1) == [1]
    assert group.execute_rank_zero_sync("echo", 1) == 1
    with pytest.raises(KeyError, match="no such thing"):
        group.raise_on(0)
    group.shutdown()
    with pytest.raises(WorkerError, match="shut down"):
        group.whoami()


def test_local_rows_and_roles():
    roles = {"a": RayClassWithInitArgs(Rows), "b": RayClassWithInitArgs(Plain)}
    host = LocalWorkerGroup(None, create_colocated_worker_cls(roles))
    spawned = host.spawn(roles)
    assert spawned["a"].double(rows(3)).batch["x"].tolist() == [0, 2, 4]
    assert spawned["a"].double(spawned["a"].double_later(rows(3))).batch["x"].tolist() == [0, 4, 8]
    assert host.b_whoami() == [(0, 1, 0)]
    assert spawned["a"].on_mesh(rows(2)).batch["x"].tolist() == [0, 1]


def test_local_group_is_one_rank():
    with pytest.raises(ConfigError, match="2 ranks cannot share one process"):
        LocalWorkerGroup(ResourcePool([2]), RayClassWithInitArgs(Plain))
