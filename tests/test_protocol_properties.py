"""Laws of DataProto that hold for every table."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from protocol_strategies import NUMPY_DTYPES, TORCH_DTYPES, data_protos, random_array, random_tensor

from quadriga.protocol import DataProto, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto

laws = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def same_dtypes(a: DataProto, b: DataProto) -> bool:
    tensors = [{} if d.batch is None else {k: v.dtype for k, v in d.batch.items()} for d in (a, b)]
    arrays = [{k: v.dtype for k, v in d.non_tensor_batch.items()} for d in (a, b)]
    return tensors[0] == tensors[1] and arrays[0] == arrays[1] and list(arrays[0]) == list(arrays[1])


@laws
@given(data_protos(), st.integers(1, 4))
def test_concat_undoes_chunk_and_split(data: DataProto, size: int) -> None:
    data.meta_info.pop("metrics", None)
    assert DataProto.concat(data.repeat(size, interleave=False).chunk(size)) == data.repeat(size, interleave=False)
    if len(data):
        assert DataProto.concat(data.split(size)) == data


@laws
@given(data_protos(), st.integers(1, 9))
def test_unpad_undoes_pad(data: DataProto, divisor: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert pad_size < divisor
    assert unpad_dataproto(padded, pad_size) == data


@laws
@given(data_protos(), st.integers(1, 3))
def test_selecting_every_nth_row_undoes_repeat(data: DataProto, times: int) -> None:
    assert data.repeat(times, interleave=True)[::times] == data
    assert data.repeat(times, interleave=False)[: len(data)] == data
    assert data.sample_level_repeat([times] * len(data)) == data.repeat(times)


@laws
@given(data_protos(), st.randoms())
def test_inverse_permutation_undoes_reorder(data: DataProto, random: object) -> None:
    order = np.random.default_rng(random.randint(0, 99)).permutation(len(data))
    shuffled = copy.deepcopy(data)
    shuffled.reorder(torch.from_numpy(order))
    assert shuffled[np.argsort(order)] == data


@laws
@given(data_protos(min_rows=1, objects=False))
def test_unfold_undoes_fold(data: DataProto) -> None:
    pairs = data.repeat(2)
    assume(len(data) > 0)
    folded = fold_batch_dim(pairs, len(data))
    assert len(folded) == len(data)
    assert unfold_batch_dim(folded, batch_dims=2) == pairs


@laws
@given(data_protos())
def test_union_with_itself_changes_nothing(data: DataProto) -> None:
    assert copy.copy(data).union(copy.deepcopy(data)) == data


@laws
@given(data_protos())
def test_select_and_its_complement_unite_to_the_whole(data: DataProto) -> None:
    rest = copy.copy(data)
    keys = list(data.non_tensor_batch)[:1]
    assert rest.pop(non_tensor_batch_keys=keys).union(rest) == data


@settings(laws, max_examples=120)
@given(data_protos(dtypes=tuple(TORCH_DTYPES)))
def test_bytes_round_trip_keeps_values_and_dtypes(data: DataProto) -> None:
    loaded = DataProto.from_bytes(data.to_bytes())
    assert loaded == data
    assert same_dtypes(loaded, data)


@laws
@given(data_protos(dtypes=tuple(TORCH_DTYPES)), st.integers(2, 5))
def test_pickle_round_trip_keeps_values_and_dtypes(data: DataProto, protocol: int) -> None:
    loaded = pickle.loads(pickle.dumps(data, protocol=protocol))
    assert loaded == data
    assert same_dtypes(loaded, data)


@pytest.mark.parametrize("shape", [(0,), (4,), (4, 0), (4, 3)], ids=str)
def test_every_dtype_survives_the_disk(shape: tuple[int, ...], tmp_path: Path) -> None:
    data = DataProto.from_dict(
        {str(dtype): random_tensor(dtype, shape, seed=1) for dtype in TORCH_DTYPES},
        {str(dtype): random_array(dtype, shape, seed=2) for dtype in NUMPY_DTYPES},
    )
    data.save_to_disk(tmp_path / "every.dp")
    loaded = DataProto.load_from_disk(tmp_path / "every.dp")
    assert loaded == data
    assert same_dtypes(loaded, data)
    for key, tensor in loaded.batch.items():
        assert tensor.shape == data.batch[key].shape
