"""Columns in the object store: workers fetch the rows that are theirs, and leave their answers there."""

from __future__ import annotations

import pytest
import torch
from example_workers import Rows

from quadriga import DataProto
from quadriga.controller import RayClassWithInitArgs, RayWorkerGroup, object_store
from quadriga.controller.calls import WorkersDied


def test_rows_whose_holder_has_died_are_named(pool_of):
    holders, users = (RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Rows)) for _ in range(2))
    users.wait_ready()
    data = DataProto.from_dict(tensors={"x": torch.zeros(4, 3)}, non_tensors={"name": ["a", "b", "c", "d"]})
    there = holders.double(data.leave_in_store(object_store.STORE))
    holders.shutdown()
    with pytest.raises(WorkersDied, match="data that double of Rows needs is gone"):
        users.double(there)
    users.shutdown()


@pytest.mark.parametrize("rows", [6, 7])
def test_workers_fetch_their_rows_and_leave_their_answers_in_the_store(pool_of, rows):
    group = RayWorkerGroup(pool_of([3]), RayClassWithInitArgs(Rows))
    data = DataProto.from_dict(
        tensors={"x": torch.arange(rows * 4.0).view(rows, 4), "n": torch.arange(rows)},
        non_tensors={"name": [f"row {i}" for i in range(rows)]},
    )
    there = group.double(data.leave_in_store(object_store.STORE))
    assert list(there.elsewhere) == ["x"]
    assert torch.equal(there.batch["n"], data.batch["n"])
    assert there == group.double(data)
    group.shutdown()


def test_an_answer_in_the_store_can_be_given_on_before_it_is_ready(pool_of):
    group = RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Rows))
    data = DataProto.from_dict({"x": torch.arange(8.0).view(4, 2)}, {"name": ["a", "b", "c", "d"]})
    there = group.double(group.start("double", data.leave_in_store(object_store.STORE)))
    assert list(there.elsewhere) == ["x"]
    assert torch.equal(there.fetch().batch["x"], 4 * data.batch["x"])
    group.shutdown()
