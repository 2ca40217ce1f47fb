"""What each operation of DataProto does, and how it refuses."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import quadriga
from quadriga.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    collate_fn,
    deserialize_single_tensor,
    deserialize_tensordict,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    serialize_single_tensor,
    serialize_tensordict,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


@pytest.fixture
def data() -> DataProto:
    return DataProto.from_dict(
        tensors={"obs": torch.arange(6).view(3, 2)}, non_tensors={"label": ["a", "b", "c"]}, meta_info={"name": "x"}
    )


def labels(data: DataProto) -> str:
    return "".join(data.non_tensor_batch["label"].tolist())


def test_import_is_lazy_and_light() -> None:
    code = "import sys, quadriga.protocol; print([m for m in ('ray', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert quadriga.DataProto is DataProto


# ---- construction ---------------------------------------------------------------------------------------------------


def test_lists_of_equal_length_stay_one_object_a_row() -> None:
    data = DataProto.from_dict(non_tensors={"ids": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["ids"].shape == (2,)
    assert data.non_tensor_batch["ids"].dtype == object
    assert data.non_tensor_batch["ids"][1] == [3, 4]
    assert data.batch is None
    assert len(data) == 2


@pytest.mark.parametrize(
    "build",
    [
        lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}),
        lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": ["x"]}),
        lambda: DataProto.from_dict(non_tensors={"a": ["x"], "b": ["x", "y"]}),
        lambda: DataProto.from_dict({"a": torch.tensor(1.0)}),
        lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, num_batch_dims=2),
        lambda: DataProto.from_dict(non_tensors={"a": "xy"}),
        lambda: DataProto(batch=TensorDict({"a": torch.zeros(2, 2)}, batch_size=[2, 2])),
        lambda: DataProto(batch={"a": torch.zeros(2)}),
        lambda: DataProto(non_tensor_batch={"a": ["x"]}),
        lambda: DataProto(non_tensor_batch={"a": np.array(1)}),
    ],
)
def test_columns_that_do_not_form_a_table_are_refused(build) -> None:
    with pytest.raises(AssertionError):
        build()


def test_length_of_every_kind_of_table(data: DataProto) -> None:
    assert len(data) == 3
    assert len(data[0:0]) == 0
    assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 3
    assert len(DataProto(non_tensor_batch={"a": np.arange(4)})) == 4
    assert len(DataProto(non_tensor_batch=None, meta_info=None)) == 0


def test_from_single_dict_sorts_tensors_from_arrays_and_refuses_the_rest() -> None:
    class Mine(DataProto):
        pass

    data = Mine.from_single_dict({"t": torch.zeros(2), "a": np.array(["x", "y"])}, meta_info={"k": 1})
    assert type(data) is Mine
    assert list(data.batch.keys()) == ["t"]
    assert list(data.non_tensor_batch) == ["a"]
    with pytest.raises(ValueError, match="Unsupported type in data"):
        DataProto.from_single_dict({"t": [1, 2]})


def test_tensordict_round_trip() -> None:
    rows = [{"k": [1]}, None, [1, 2], np.arange(2)]
    data = DataProto.from_dict({"t": torch.arange(4)}, {"o": rows, "s": list("abcd")}, {"step": 3, "names": ["x"]})
    out = data.to_tensordict()
    assert isinstance(out.get("o"), NonTensorStack)
    assert isinstance(out.get("step"), NonTensorData)
    assert out["s"] == list("abcd")
    assert out["step"] == 3
    assert DataProto.from_tensordict(out) == data
    assert DataProto.from_tensordict(TensorDict(batch_size=[2])).meta_info == {}
    with pytest.raises(AssertionError, match="each used once"):
        DataProto.from_dict({"t": torch.arange(4)}, meta_info={"t": 1}).to_tensordict()


def test_tensordict_round_trip_without_tensors_and_without_rows() -> None:
    for rows in ([], ["a", "b"]):
        data = DataProto.from_dict(non_tensors={"o": rows}, meta_info={"step": 1})
        assert DataProto.from_tensordict(data.to_tensordict()) == data


def test_to_moves_in_place_and_returns_itself(data: DataProto) -> None:
    assert data.to("cpu") is data
    assert data.batch.device == torch.device("cpu")
    assert data[1:].batch.device == torch.device("cpu")
    assert DataProto().to("cpu").batch is None


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_integer_index_gives_one_item(data: DataProto) -> None:
    for item in (data[-1], data[np.int64(2)]):
        assert isinstance(item, DataProtoItem)
        assert item.batch["obs"].tolist() == [4, 5]
        assert item.non_tensor_batch["label"] == "c"
        assert item.meta_info is data.meta_info
    assert [item.non_tensor_batch["label"] for item in data] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, None), "bc"),
        (slice(None, None, 2), "ac"),
        (slice(None, None, -1), "cba"),
        ([2, 0, 2], "cac"),
        ([-1], "c"),
        ([], ""),
        ([True, False, True], "ac"),
        (np.array([1, 1]), "bb"),
        (np.array([False, True, False]), "b"),
        (torch.tensor([0, 1], dtype=torch.int32), "ab"),
        (torch.tensor([True, True, False]), "ab"),
    ],
    ids=str,
)
def test_index_gives_the_rows(data: DataProto, index, expected: str) -> None:
    assert labels(data[index]) == expected
    assert data[index].batch["obs"][:, 0].tolist() == ["abc".index(label) * 2 for label in expected]
    assert data[index].meta_info is data.meta_info


def test_wrong_indices_are_refused(data: DataProto) -> None:
    with pytest.raises(TypeError, match=r"Indexing with .* is not supported"):
        data["obs"]
    with pytest.raises(IndexError):
        data[3]
    with pytest.raises(IndexError):
        data[[0, -4]]
    with pytest.raises(AssertionError):
        data[[True, False]]
    with pytest.raises(AssertionError):
        data[[0.5]]


def test_slices_are_views_and_selections_are_copies(data: DataProto) -> None:
    data[1:].batch["obs"][0, 0] = 77
    assert data.batch["obs"][1, 0] == 77
    data[[1]].batch["obs"][0, 0] = 88
    assert data.batch["obs"][1, 0] == 77


def test_read_only_index_arrays_select_without_a_warning(data: DataProto, recwarn) -> None:
    index = np.array([2, 1])
    index.flags.writeable = False
    assert labels(data[index]) == "cb"
    assert not recwarn.list


def test_repeat_in_both_orders(data: DataProto) -> None:
    assert labels(data.repeat(2)) == "aabbcc"
    assert labels(data.repeat(2, interleave=False)) == "abcabc"
    assert labels(data.sample_level_repeat([2, 0, 1])) == "aac"
    assert labels(data.sample_level_repeat(torch.tensor([0, 1, 2]))) == "bcc"
    with pytest.raises(AssertionError):
        data.sample_level_repeat([1, 2])


def test_reorder_is_in_place(data: DataProto) -> None:
    data.reorder(torch.tensor([2, 0, 1]))
    assert labels(data) == "cab"
    assert data.batch["obs"][:, 0].tolist() == [4, 0, 2]


def test_unfold_column_chunks_cuts_some_columns_and_repeats_the_others() -> None:
    data = DataProto.from_dict(
        {"ids": torch.arange(8).view(2, 4), "x": torch.tensor([0, 1])},
        {"words": [["a", "b"], ["c", "d"]], "u": ["p", "q"]},
        {"k": 1},
    )
    out = data.unfold_column_chunks(2, split_keys=["ids", "words"])
    assert out.batch["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert out.batch["x"].tolist() == [0, 0, 1, 1]
    assert out.non_tensor_batch["words"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    assert out.non_tensor_batch["u"].tolist() == ["p", "p", "q", "q"]
    assert data.unfold_column_chunks(2).batch["ids"].tolist() == data.repeat(2).batch["ids"].tolist()
    with pytest.raises(AssertionError, match="cannot be cut into 3"):
        data.unfold_column_chunks(3, split_keys=["ids"])
    with pytest.raises(AssertionError, match="nope"):
        data.unfold_column_chunks(2, split_keys=["nope"])


def test_ragged_columns_take_part_in_everything() -> None:
    ragged = torch.nested.nested_tensor([torch.arange(n, dtype=torch.float32) for n in (2, 3, 1)], layout=torch.jagged)
    data = DataProto.from_dict({"r": ragged}, {"label": list("abc")})
    assert DataProto.concat(data.chunk(3)) == data
    assert [len(row) for row in data[[1, 1]].batch["r"].unbind()] == [3, 3]
    assert DataProto.concat([data[0:0], data]) == data
    assert DataProto.from_bytes(data.to_bytes()) == data
    assert "3 ragged rows" in data.get_data_info()


def test_fold_and_unfold(data: DataProto) -> None:
    folded = fold_batch_dim(data.repeat(2), new_batch_size=3)
    assert folded.batch["obs"].tolist() == [[[0, 1]] * 2, [[2, 3]] * 2, [[4, 5]] * 2]
    assert folded.non_tensor_batch["label"].tolist() == [["a", "a"], ["b", "b"], ["c", "c"]]
    folded.reorder(torch.tensor([1, 2, 0]))
    assert labels(unfold_batch_dim(folded)) == "bbccaa"
    with pytest.raises(AssertionError):
        fold_batch_dim(data, 2)


# ---- columns --------------------------------------------------------------------------------------------------------


def test_select_shares_memory_unless_deepcopied(data: DataProto) -> None:
    shared = data.select(batch_keys=["obs"], non_tensor_batch_keys=[])
    assert shared.batch["obs"].data_ptr() == data.batch["obs"].data_ptr()
    assert shared.non_tensor_batch == {}
    assert shared.meta_info is data.meta_info
    assert data.select(deepcopy=True).batch["obs"].data_ptr() != data.batch["obs"].data_ptr()
    with pytest.raises(AssertionError, match=r"no \['nope'\] in batch, which has \['obs'\]"):
        data.select(batch_keys=["nope"])
    with pytest.raises(AssertionError, match="must be a list"):
        data.select(batch_keys="obs")


def test_adding_to_a_selection_leaves_the_original_alone(data: DataProto) -> None:
    selection = data.select()
    selection.batch["new"] = torch.zeros(3)
    selection.non_tensor_batch["new"] = np.zeros(3)
    assert list(data.batch.keys()) == ["obs"]
    assert list(data.non_tensor_batch) == ["label"]


def test_pop_removes_what_it_returns_or_nothing(data: DataProto) -> None:
    with pytest.raises(AssertionError):
        data.pop(batch_keys=["obs"], non_tensor_batch_keys=["nope"])
    sibling = data[:1]
    popped = data.pop(batch_keys=["obs"], meta_info_keys=["name"])
    assert set(popped.batch.keys()) == {"obs"}
    assert popped.meta_info == {"name": "x"}
    assert list(data.batch.keys()) == []
    assert labels(data) == "abc"
    assert data.meta_info == {}
    assert sibling.meta_info == {"name": "x"}
    assert data.pop(non_tensor_batch_keys=["label"]).batch is None


def test_rename(data: DataProto) -> None:
    assert data.rename("obs", "seen") is data
    assert list(data.batch.keys()) == ["seen"]
    data.batch["other"] = torch.zeros(3)
    data.rename(["seen", "other"], ["other", "seen"])
    assert data.batch["other"].shape == (3, 2)
    with pytest.raises(ValueError, match="same length"):
        data.rename(["seen"], ["a", "b"])
    with pytest.raises(TypeError):
        data.rename({"seen"}, ["a"])
    with pytest.raises(AssertionError):
        data.rename("seen", "other")


def test_union_adds_columns_in_place(data: DataProto) -> None:
    other = DataProto.from_dict({"act": torch.zeros(3)}, {"score": np.ones(3)}, {"step": 1})
    assert data.union(other) is data
    assert set(data.batch.keys()) == {"obs", "act"}
    assert set(data.non_tensor_batch) == {"label", "score"}
    assert data.meta_info == {"name": "x", "step": 1}


def test_union_works_where_one_side_has_no_tensors(data: DataProto) -> None:
    objects = DataProto.from_dict(non_tensors={"o": [1, 2, 3]})
    assert set(copy.copy(data).union(objects).non_tensor_batch) == {"label", "o"}
    united = copy.copy(objects).union(data)
    assert set(united.batch.keys()) == {"obs"}
    united.batch["new"] = torch.zeros(3)
    assert set(data.batch.keys()) == {"obs"}
    assert DataProto(meta_info={"k": 1}).union(data).meta_info == {"k": 1, "name": "x"}


def test_union_accepts_equal_nan_and_refuses_different_values() -> None:
    nan = float("nan")
    a = DataProto.from_dict({"t": torch.tensor([nan, 1.0])}, {"o": [{"r": nan}, np.array([nan])]}, {"m": nan})
    b = copy.deepcopy(a)
    assert a.union(b) == b
    b.batch["t"][1] = 2
    with pytest.raises(AssertionError, match="`t` in tensor_dict1 and tensor_dict2 are not the same object"):
        a.union(b)
    with pytest.raises(AssertionError, match="`m`"):
        a.union(DataProto(meta_info={"m": 2}))
    with pytest.raises(AssertionError):
        a.union(DataProto.from_dict({"new": torch.zeros(3)}))
    with pytest.raises(AssertionError):
        a.union(DataProto.from_dict(non_tensors={"new": [1, 2, 3]}))


def test_refused_union_changes_nothing(data: DataProto) -> None:
    before = copy.deepcopy(data)
    other = DataProto.from_dict({"new": torch.zeros(3)}, {"label": ["a", "b", "z"]})
    with pytest.raises(AssertionError):
        data.union(other)
    assert data == before


def test_union_of_dicts_compares_deeply() -> None:
    circular, twin, plain = (np.array([None], dtype=object) for _ in range(3))
    circular[0], twin[0] = circular, twin
    union_numpy_dict({"a": circular}, {"a": twin})
    with pytest.raises(AssertionError):
        union_numpy_dict({"a": circular}, {"a": plain})
    grid = np.arange(24).reshape(2, 3, 4)
    assert set(union_numpy_dict({"a": grid}, {"a": grid.copy(), "b": grid})) == {"a", "b"}
    with pytest.raises(AssertionError):
        union_numpy_dict({"a": grid}, {"a": grid + 1})
    with pytest.raises(AssertionError):
        union_numpy_dict({"a": np.array(["1"])}, {"a": np.array([1])})
    first = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    assert union_tensor_dict(first, TensorDict({"b": torch.ones(2)}, batch_size=[2])) is first
    with pytest.raises(AssertionError, match="identical batch size"):
        union_tensor_dict(first, TensorDict({"b": torch.ones(3)}, batch_size=[3]))


# ---- parts and wholes -----------------------------------------------------------------------------------------------


def test_unequal_chunks_need_padding_enabled(data: DataProto, monkeypatch) -> None:
    with pytest.raises(AssertionError, match="only support equal chunk"):
        data.chunk(2)
    padded = DataProto.from_dict(non_tensors={"label": list("abcde")}, auto_padding=True)
    assert [labels(part) for part in padded.chunk(4)] == ["ab", "c", "d", "e"]
    monkeypatch.setenv("QUADRIGA_AUTO_PADDING", "1")
    assert [labels(part) for part in data.chunk(2)] == ["ab", "c"]
    monkeypatch.delenv("QUADRIGA_AUTO_PADDING")
    try:
        DataProtoConfig.auto_padding = True
        assert data.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    assert not data.is_padding_enabled()


def test_no_rows_can_be_chunked_split_padded_repeated_and_iterated(data: DataProto) -> None:
    empty = data[0:0]
    assert [len(part) for part in empty.chunk(4)] == [0, 0, 0, 0]
    assert empty.split(2) == []
    assert pad_dataproto_to_divisor(empty, 4)[1] == 0
    assert len(empty.repeat(3)) == 0
    assert list(empty.make_iterator(2, epochs=1, dataloader_kwargs={"shuffle": True})) == []
    assert DataProto.concat([empty, data, empty]) == data


def test_padding_rows_repeat_the_last_or_the_first(data: DataProto) -> None:
    data.padding(2)
    assert labels(data) == "abccc"
    data.padding(1, "first")
    assert labels(data) == "abccca"
    with pytest.raises(AssertionError):
        data[0:0].padding(1)


def test_pad_to_divisor_repeats_from_the_first_row(data: DataProto) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, 7)
    assert (labels(padded), pad_size) == ("abcabca", 4)
    assert labels(unpad_dataproto(padded, pad_size)) == "abc"
    with pytest.raises(AssertionError):
        unpad_dataproto(data, 4)


def test_split_leaves_a_shorter_rest(data: DataProto) -> None:
    assert [labels(part) for part in data.split(2)] == ["ab", "c"]


def with_metrics(*metrics) -> DataProto:
    return DataProto.concat([DataProto.from_dict({"t": torch.zeros(1)}, meta_info={"metrics": m}) for m in metrics])


def test_concat_gathers_metrics_of_all_workers() -> None:
    assert with_metrics({"loss": 1}, [{"loss": 2}, {"loss": 3}], [], None).meta_info == {"metrics": {"loss": [1, 2, 3]}}


def test_concat_of_concats_keeps_metrics_flat_and_names_may_differ() -> None:
    twice = DataProto.concat([with_metrics({"loss": 1}, {"loss": 2, "kl": 9}), with_metrics({"loss": 3})])
    assert twice.meta_info["metrics"] == {"loss": [1, 2, 3], "kl": [9]}
    silent = DataProto.from_dict({"t": torch.zeros(1)})
    assert DataProto.concat([silent, with_metrics({"loss": 1})]).meta_info["metrics"] == {"loss": [1]}


def test_concat_refuses_what_does_not_fit_and_says_why(data: DataProto) -> None:
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'name'"):
        DataProto.concat([data, DataProto(data.batch, data.non_tensor_batch, {"name": "y"})])
    with pytest.raises(AssertionError, match=r"same batch keys.*\['act', 'obs'\]"):
        DataProto.concat([data, DataProto.from_dict({"act": torch.zeros(3)}, {"label": list("abc")})])
    with pytest.raises(AssertionError, match="same non_tensor_batch keys"):
        DataProto.concat([data, data.select(non_tensor_batch_keys=[])])
    with pytest.raises(AssertionError, match="tensors in every part or in none"):
        DataProto.concat([data, DataProto.from_dict(non_tensors={"label": ["z"]})])
    with pytest.raises(AssertionError, match=r"batch\['obs'\] cannot be concatenated"):
        DataProto.concat([data, DataProto.from_dict({"obs": torch.zeros(1, 5)}, {"label": ["z"]})])
    with pytest.raises(AssertionError, match="at least one"):
        DataProto.concat([])


def test_concat_joins_meta_info_that_only_some_parts_have(data: DataProto) -> None:
    other = DataProto(data.batch, data.non_tensor_batch, {"name": "x", "extra": torch.tensor([float("nan")])})
    assert set(DataProto.concat([data, other, copy.deepcopy(other)]).meta_info) == {"name", "extra"}


def test_iterator_visits_every_row_once_an_epoch_and_repeats_with_its_seed() -> None:
    data = DataProto.from_dict({"t": torch.arange(12)}, {"label": [str(i) for i in range(12)]}, {"k": 1})

    def visit(seed: int | None) -> list[list[int]]:
        batches = list(data.make_iterator(4, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True}))
        assert all(batch.meta_info is data.meta_info for batch in batches)
        assert all(
            batch.non_tensor_batch["label"].tolist() == list(map(str, batch.batch["t"].tolist())) for batch in batches
        )
        return [batch.batch["t"].tolist() for batch in batches]

    first = visit(seed=1)
    assert len(first) == 6
    assert sorted([*first[0], *first[1], *first[2]]) == sorted([*first[3], *first[4], *first[5]]) == list(range(12))
    assert first[:3] != first[3:]
    assert visit(seed=1) == first
    assert visit(seed=2) != first
    assert [b.batch["t"].tolist() for b in data.make_iterator(6, epochs=1)] == [[*range(6)], [*range(6, 12)]]
    with pytest.raises(AssertionError, match="cannot be divided"):
        data.make_iterator(5, epochs=1)


def test_collate_fn_puts_items_together_again(data: DataProto) -> None:
    assert collate_fn([data[i] for i in range(3)]) == data
    no_tensors = data.select(batch_keys=[])
    no_tensors.batch = None
    assert collate_fn(list(no_tensors)) == no_tensors


def test_list_of_dict_to_dict_of_list_refuses_uneven_keys() -> None:
    assert list_of_dict_to_dict_of_list([]) == {}
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    with pytest.raises(AssertionError):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


# ---- comparing, copying, looking ------------------------------------------------------------------------------------


def test_equality_is_by_value(data: DataProto) -> None:
    assert data == copy.deepcopy(data)
    assert data != data[:2]
    changed = copy.deepcopy(data)
    changed.non_tensor_batch["label"][0] = "z"
    assert data != changed
    assert data != "something else"
    assert DataProto.from_dict({"t": torch.zeros(2)}) != DataProto.from_dict({"t": torch.zeros(2).double()})


def test_copies_are_shallow_or_deep_as_asked(data: DataProto) -> None:
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    assert shallow.batch["obs"].data_ptr() == data.batch["obs"].data_ptr()
    assert deep.batch["obs"].data_ptr() != data.batch["obs"].data_ptr()
    shallow.meta_info["new"] = 1
    assert "new" not in data.meta_info


def test_print_size_and_data_info(data: DataProto, capsys) -> None:
    data.print_size("here")
    assert capsys.readouterr().out.startswith("here, Size of tensordict: 0.000000 GB")
    info = data.get_data_info()
    assert "obs: Tensor (3, 2) torch.int64 cpu" in info
    assert "label: ndarray (3,) object" in info
    assert "name: str" in info


def test_single_tensor_and_tensordict_serialisation() -> None:
    tensor = torch.randn(3, 4).bfloat16()
    dtype, shape, raw = serialize_single_tensor(tensor)
    assert (dtype, shape) == ("bfloat16", (3, 4))
    assert torch.equal(deserialize_single_tensor((dtype, shape, bytes(raw))), tensor)

    ragged = torch.nested.as_nested_tensor([torch.randn(2, 3), torch.randn(1, 5)])
    batch = TensorDict(
        {"d": torch.zeros(2, 3, 4), "b": torch.ones(2, 3) > 0, "r": ragged}, batch_size=[2], device="cpu"
    )
    loaded = deserialize_tensordict(serialize_tensordict(batch))
    assert loaded.batch_size == batch.batch_size
    assert loaded.device == batch.device
    assert loaded["b"].dtype == torch.bool
    assert loaded["r"].layout == ragged.layout
    assert all(torch.equal(a, b) for a, b in zip(loaded["r"].unbind(), ragged.unbind(), strict=True))
