"""Columns that live elsewhere: everything means what it means for columns that are here, and no data is moved for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga import DataProto
from quadriga.protocol import Store, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim

SHELF: dict[int, object] = {}
FETCHED: list[int] = []


def put(value):
    SHELF[len(SHELF)] = value.copy()
    return len(SHELF) - 1


def get(handles, timeout_s=None):
    FETCHED.extend(handles)
    return [SHELF[handle] for handle in handles]


STORE = Store(put, get)


@pytest.fixture(autouse=True)
def empty_shelf():
    SHELF.clear()
    FETCHED.clear()


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


def renamed(data: DataProto) -> DataProto:
    return data.rename("ids", "tokens").rename("tokens", "ids")


def popped_and_joined(data: DataProto) -> DataProto:
    rest = data.select()
    return rest.pop(["ids", "length"], ["uid"]).union(rest)


def operations(rows: int, index: list[int], end: int) -> list[Callable[[DataProto], DataProto]]:
    """What leaves the columns where they are, for tables of so many rows."""
    mask, order = np.isin(np.arange(rows), index), torch.randperm(rows)
    return [
        lambda t: t[index],
        lambda t: t[mask],
        lambda t: t[:end],
        lambda t: t[::-1],
        lambda t: t.repeat(2),
        lambda t: t.repeat(2, interleave=False),
        lambda t: t.sample_level_repeat([2] * rows),
        lambda t: t.chunk(rows)[rows // 2],
        lambda t: t.split(2)[-1],
        lambda t: (t.reorder(order), t)[1],
        lambda t: (t.padding(3), t)[1],
        lambda t: pad_dataproto_to_divisor(t, 5)[0],
        lambda t: DataProto.concat([t, t[index]]),
        lambda t: t.select(["ids", "length"], ["uid"]).union(t.select(["image"], [])),
        lambda t: t.select().union(t[:]),
        popped_and_joined,
        renamed,
        copy.copy,
        copy.deepcopy,
        lambda t: pickle.loads(pickle.dumps(t)),
    ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_and_columns_behave_as_if_they_were_here(data):
    here = table(data.draw(st.integers(1, 12)))
    there = here.leave_in_store(STORE)
    for _ in range(data.draw(st.integers(0, 4))):
        rows = len(here)
        if rows == 0:  # a mask can leave none, and then there is no row to ask for
            break
        index = data.draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=12))
        operation = data.draw(st.sampled_from(operations(rows, index, end=data.draw(st.integers(1, rows)))))
        FETCHED.clear()
        here, there = operation(here), operation(there)
        assert FETCHED == []
        assert len(there) == len(here)
        assert sorted(there.batch_keys()) == sorted(here.batch_keys())
        there.check_consistency()
        assert there == here
        assert sorted(there.elsewhere) == ["ids", "image"]


def test_what_needs_the_numbers_fetches_them():
    here = table(4)
    there = here.leave_in_store(STORE)
    assert DataProto.from_bytes(there.to_bytes()) == here
    assert torch.equal(there[2].batch["ids"], here.batch["ids"][2])
    assert [item.batch["ids"].tolist() for item in there] == here.batch["ids"].tolist()
    assert there.to_tensordict()["ids"].tolist() == here.batch["ids"].tolist()
    assert unfold_batch_dim(fold_batch_dim(there, 2)) == here
    halves = there.select(["ids"]).fetch().put_columns(DataProto.from_dict({"ids": torch.arange(8).view(4, 2)}))
    assert halves.leave_in_store(STORE).unfold_column_chunks(2, ["ids"]) == halves.unfold_column_chunks(2, ["ids"])
    assert there.to("cpu") == here
    assert not there.elsewhere


def test_what_is_saved_to_disk_is_the_table_and_not_its_handles(tmp_path):
    here = table(4)
    here.leave_in_store(STORE).save_to_disk(tmp_path / "rows")
    SHELF.clear()
    assert DataProto.load_from_disk(tmp_path / "rows") == here


def test_small_columns_are_at_hand_and_wide_ones_are_not():
    there = table(4).leave_in_store(STORE)
    assert there.batch["length"].tolist() == [0, 1, 2, 3]
    assert set(there.batch.keys()) == {"length"}
    assert {name: there.row_shape(name) for name in there.batch_keys()} == {"length": (), "ids": (5,), "image": (2, 3)}
    assert there.elsewhere["ids"].row_bytes == 5 * 8
    assert "ids: elsewhere (4, 5) torch.int64" in there.get_data_info()


def test_a_ragged_column_stays_here_unless_it_is_named():
    ragged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    data = DataProto.from_dict({"ragged": ragged, "wide": torch.ones(2, 2)})
    there = data.leave_in_store(STORE)
    assert list(there.elsewhere) == ["wide"]
    assert there == data
    with pytest.raises(AssertionError, match=r"'ragged'.*not a dense tensor"):
        data.leave_in_store(STORE, ["ragged"])


def test_some_columns_can_be_fetched_and_others_left():
    there = table(4).leave_in_store(STORE)
    some = there.fetch(["ids", "length"])
    assert list(some.elsewhere) == ["image"]
    assert list(there.elsewhere) == ["ids", "image"]
    assert some.fetch(["ids"]) is some
    with pytest.raises(AssertionError, match="nothing"):
        there.fetch(["nothing"])


def test_union_wants_the_same_values_wherever_they_are():
    here = table(4)
    there = here.leave_in_store(STORE)
    again = here.leave_in_store(STORE)
    assert there.select().union(again) == here
    assert there.select().union(here) == here
    assert here.select().union(there) == here
    other = DataProto.from_dict({"ids": torch.ones(4, 5, dtype=torch.int64)})
    for left in (here, there):
        for right in (other, other.leave_in_store(STORE)):
            with pytest.raises(AssertionError, match=r"`ids`.*values differ"):
                left.union(right)
    with pytest.raises(AssertionError):
        there.union(table(3).leave_in_store(STORE).select(["ids"], []))
    assert list(there.elsewhere) == ["ids", "image"]


def test_new_columns_replace_old_ones_only_by_name():
    for data in (table(4), table(4).leave_in_store(STORE)):
        data.put_columns(DataProto.from_dict({"ids": torch.ones(4, 2), "score": torch.zeros(4)}, {"uid": [1, 2, 3, 4]}))
        assert sorted(data.batch_keys()) == ["ids", "image", "length", "score"]
        assert torch.equal(data.fetch().batch["ids"], torch.ones(4, 2))
        assert data.non_tensor_batch["uid"].tolist() == [1, 2, 3, 4]
        assert data.put_columns(DataProto()) is data
        with pytest.raises(AssertionError):
            data.put_columns(DataProto.from_dict({"ids": torch.ones(3, 2)}))
        assert data.row_shape("ids") == (2,)


def test_parts_that_differ_in_where_columns_are_can_be_stacked():
    here, more = table(4), table(3, start=9)
    there = DataProto.concat([here.leave_in_store(STORE, ["ids"]), more.leave_in_store(STORE, ["image"]), here])
    assert sorted(there.elsewhere) == ["ids", "image"]
    assert there == DataProto.concat([here, more, here])
    with pytest.raises(AssertionError, match="Pad them to one length first"):
        DataProto.concat([here.leave_in_store(STORE), table(2, width=6).leave_in_store(STORE)])
    with pytest.raises(AssertionError, match="differ in"):
        DataProto.concat([here.leave_in_store(STORE), here.select(["length"])])


def test_one_name_cannot_be_here_and_elsewhere():
    there = table(4).leave_in_store(STORE)
    there.batch["ids"] = torch.zeros(4)
    with pytest.raises(AssertionError, match=r"'ids'.* is here and elsewhere"):
        there.check_consistency()
    with pytest.raises(AssertionError, match="two columns one name"):
        table(4).leave_in_store(STORE).rename("ids", "length")


def test_a_rank_is_given_the_pieces_that_hold_its_rows_and_no_others():
    wide = DataProto.from_dict({"x": torch.randn(8, 1 << 18)}).leave_in_store(STORE)  # a megabyte a row
    assert len(wide.elsewhere["x"].pieces) == 8
    first, second = wide[[7, 0, 3, 3, 1, 2]].chunk(2)
    assert (len(first.elsewhere["x"].pieces), len(second.elsewhere["x"].pieces)) == (3, 3)


def test_parts_are_small_and_make_the_whole():
    whole = table(10)
    parts = list(whole.leave_in_store(STORE).fetch_in_parts(["ids"], part_bytes=3 * 40))
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert DataProto.concat(parts) == whole.select(["ids"], None)
    assert len(list(whole.fetch_in_parts(["ids"], part_bytes=1))) == 1
