"""RemoteBatch: what it does with rows and columns is what DataProto does; workers fetch theirs and leave their answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from example_workers import Rows
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga import DataProto
from quadriga.controller import RayClassWithInitArgs, RayWorkerGroup
from quadriga.controller.calls import WorkersDied
from quadriga.controller.remote_batch import RemoteBatch, add_columns, column_names, in_parts


def table(rows: int, width: int = 5, start: int = 0) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "ids": torch.arange(rows * width).view(rows, width) + start,
            "image": torch.randn(rows, 2, 3).bfloat16(),
            "length": torch.arange(rows) + start,
        },
        non_tensors={"uid": [f"u{start + i}" for i in range(rows)]},
        meta_info={"step": 3},
    )


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rows_and_columns_behave_as_in_a_data_proto(data):
    rows = data.draw(st.integers(1, 12))
    here = table(rows)
    there = RemoteBatch.put(here)
    for _ in range(data.draw(st.integers(0, 4))):
        index = data.draw(st.lists(st.integers(0, len(here) - 1), min_size=1, max_size=12))
        operation = data.draw(st.sampled_from(["index", "mask", "slice", "repeat", "reorder", "concat", "select"]))
        if operation == "index":
            here, there = here[index], there[index]
        elif operation == "mask":
            mask = np.isin(np.arange(len(here)), index)
            here, there = here[mask], there[mask]
        elif operation == "slice":
            end = data.draw(st.integers(1, len(here)))
            here, there = here[:end], there[:end]
        elif operation == "repeat":
            here, there = here.repeat(2), there.repeat(2)
        elif operation == "reorder":
            order = torch.randperm(len(here))
            here.reorder(order)
            there.reorder(order)
        elif operation == "concat":
            here, there = DataProto.concat([here, here[index]]), RemoteBatch.concat([there, there[index]])
        else:
            keys = [name for name in ("ids", "length") if name in column_names(there)]
            here, there = here.select(keys, None), there.select(keys, None)
        assert len(there) == len(here)
        assert there.fetch() == here


def test_small_columns_are_at_hand_and_wide_ones_are_not():
    there = RemoteBatch.put(table(4))
    assert there.batch["length"].tolist() == [0, 1, 2, 3]
    assert set(there.batch) == {"length"}
    assert there.widths == {"ids": (5,), "image": (2, 3)}
    assert there.row_bytes == 5 * 8 + 6 * 2


def test_new_columns_replace_old_ones():
    there = RemoteBatch.put(table(4))
    add_columns(there, {"ids": torch.ones(4, 2), "score": torch.zeros(4)})
    assert sorted(column_names(there)) == ["ids", "image", "length", "score"]
    assert torch.equal(there.fetch().batch["ids"], torch.ones(4, 2))


def test_a_rank_is_given_the_pieces_that_hold_its_rows_and_no_others():
    wide = RemoteBatch.put(DataProto.from_dict({"x": torch.randn(8, 1 << 18)}))  # a megabyte a row
    assert len(wide.sources[0].pieces) == 8
    first, second = wide[[7, 0, 3, 3, 1, 2]].chunk(2)
    assert (len(first.sources[0].pieces), len(second.sources[0].pieces)) == (3, 3)


def test_parts_are_small_and_make_the_whole():
    whole = table(10)
    parts = list(in_parts(RemoteBatch.put(whole), ["ids"], part_bytes=3 * 40))
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert DataProto.concat(parts) == whole.select(["ids"], None)
    assert len(list(in_parts(whole, ["ids"], part_bytes=1))) == 1


def test_rows_whose_holder_has_died_are_named(pool_of):
    holders, users = (RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Rows)) for _ in range(2))
    users.wait_ready()
    data = DataProto.from_dict(tensors={"x": torch.zeros(4, 3)}, non_tensors={"name": ["a", "b", "c", "d"]})
    there = holders.double(RemoteBatch.put(data))
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
    there = group.double(RemoteBatch.put(data))
    assert isinstance(there, RemoteBatch)
    assert torch.equal(there.batch["n"], data.batch["n"])
    assert there.fetch() == group.double(data)
    group.shutdown()
