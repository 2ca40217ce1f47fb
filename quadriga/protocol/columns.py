"""Rules for the columns of a DataProto: how they are made, compared and merged. Nothing here knows DataProto itself."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase


def require(condition: bool, message: str) -> None:
    """Raise AssertionError, the error type of a broken DataProto contract, also under `python -O`.

    The message is built even if it is not needed: it must be cheap.
    """
    if not condition:
        raise AssertionError(message)


def require_present(keys: Sequence[str], present: Any, where: str) -> None:
    """Raise AssertionError, listing what there is, unless all `keys` are in `present`."""
    require(not isinstance(keys, str), f"keys must be a list, got the string {keys!r}")
    missing = [key for key in keys if key not in present]
    require(not missing, f"no {missing} in {where}, which has {list(present)}")


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A 1-D object array with one entry per value.

    `np.array(values, dtype=object)` would turn rows of equal length into a 2-D array; a column must not change its
    rank because its rows happen to agree.
    """
    rows = list(values)
    return np.fromiter(rows, dtype=object, count=len(rows))


def make_batch(tensors: Mapping[str, Any]) -> TensorDict:
    """Tensor columns, at least one, as a TensorDict of their common number of rows."""
    rows = {}
    for key, tensor in tensors.items():
        require(
            isinstance(tensor, torch.Tensor | TensorDictBase) and tensor.ndim > 0,
            f"tensors['{key}'] must be a tensor with one entry a row, got {type(tensor)}",
        )
        rows[key] = tensor.size(0)
    require(len(set(rows.values())) == 1, f"all tensors must have the same number of rows, got {rows}")
    return TensorDict(dict(tensors), batch_size=[next(iter(rows.values()))])


def as_column(key: str, values: Any) -> np.ndarray:
    """`values` as a non-tensor column: arrays stay as they are, lists and tuples become 1-D object arrays."""
    if isinstance(values, np.ndarray):
        return values
    require(
        isinstance(values, list | tuple),
        f"non_tensor_batch['{key}'] must be a list, a tuple or a np.ndarray, one entry a row; got {type(values)}",
    )
    return object_array(values)


def check_columns(batch: TensorDict | None, non_tensor_batch: dict[str, np.ndarray]) -> int:
    """The number of rows. AssertionError unless all columns agree on it."""
    if batch is not None:
        require(isinstance(batch, TensorDictBase), f"batch must be a TensorDict or None, got {type(batch)}")
        require(len(batch.batch_size) == 1, f"only support num_batch_dims=1, batch has batch_size {batch.batch_size}")
    rows = None if batch is None else batch.batch_size[0]
    for key, column in non_tensor_batch.items():
        require(
            isinstance(column, np.ndarray) and column.ndim > 0,
            f"non_tensor_batch['{key}'] must be a np.ndarray with one entry a row, got {type(column)}",
        )
        rows = len(column) if rows is None else rows
        require(len(column) == rows, f"non_tensor_batch['{key}'] has {len(column)} rows, the other columns have {rows}")
    return rows or 0


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor of any dtype as a 1-D uint8 tensor: a view, or a copy if it is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A tensor of one element or none counts as contiguous whatever its stride, but only stride 1 can be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def column_bytes(column: Any) -> int:
    """Memory of a tensor column, dense, ragged, or a table of its own."""
    if not isinstance(column, torch.Tensor):
        return sum(column_bytes(column.get(key)) for key in column.keys())  # noqa: SIM118
    return sum(column_bytes(row) for row in column.unbind()) if column.is_nested else column.nbytes


def column_info(column: Any) -> str:
    """Type, shape, dtype and device of a column, in a few words."""
    name = type(column).__name__
    if isinstance(column, np.ndarray):
        return f"{name} {column.shape} {column.dtype}"
    if isinstance(column, torch.Tensor):
        shape = f"{column.size(0)} ragged rows" if column.is_nested else tuple(column.shape)
        return f"{name} {shape} {column.dtype} {column.device}"
    return f"{name} {tuple(column.batch_size)} {list(column.keys())}"


def values_equal(a: Any, b: Any) -> bool:
    """Deep equality where NaN equals NaN, tensors and arrays are compared whole, and circular data terminates."""
    return _equal(a, b, ())


def _equal(a: Any, b: Any, comparing: tuple[tuple[int, int], ...]) -> bool:
    """`comparing` holds the (id, id) pairs above this one: meeting one again means the cycles agree so far."""
    if a is b:
        return True
    if isinstance(a, TensorDictBase) and isinstance(b, TensorDictBase):
        a, b = dict(a.items()), dict(b.items())
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors_equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape:
            return False
        if a.dtype != object and b.dtype != object:
            numbers = "biufc"
            comparable = a.dtype.kind == b.dtype.kind or (a.dtype.kind in numbers and b.dtype.kind in numbers)
            return comparable and bool(((a == b) | ((a != a) & (b != b))).all())
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return False
    elif not (isinstance(a, list | tuple) and isinstance(b, list | tuple)):
        return _scalars_equal(a, b)
    elif type(a) is not type(b) or len(a) != len(b):
        return False

    if (id(a), id(b)) in comparing:
        return True
    deeper = (*comparing, (id(a), id(b)))
    if isinstance(a, Mapping):
        return all(_equal(a[key], b[key], deeper) for key in a)
    if isinstance(a, np.ndarray):
        a, b = a.ravel(), b.ravel()
    return all(_equal(x, y, deeper) for x, y in zip(a, b, strict=True))


def _tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        if not (a.is_nested and b.is_nested and a.layout == b.layout and a.dtype == b.dtype and a.size(0) == b.size(0)):
            return False
        return all(_tensors_equal(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach().to(a.device)
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    # Equal bits are equal values in every dtype, also those torch has no comparison for (float8, bits8, ...).
    if torch.equal(tensor_bytes(a), tensor_bytes(b)):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _scalars_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | torch.Tensor) or isinstance(b, np.ndarray | torch.Tensor):
        return False
    try:
        equal = bool(a == b)
        return equal or bool(a != a and b != b)
    except (TypeError, ValueError, RuntimeError):  # a foreign `==` that gives no truth value: not equal
        return False


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the columns of `tensor_dict2` to `tensor_dict1`, in place. A column both have must be equal."""
    require(
        tensor_dict1.batch_size == tensor_dict2.batch_size,
        f"Two tensor dict must have identical batch size. Got {tensor_dict1.batch_size} and {tensor_dict2.batch_size}",
    )
    return _add_missing(tensor_dict1, tensor_dict2, "tensor_dict")


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the columns of `tensor_dict2` to `tensor_dict1`, in place. A column both have must be equal."""
    for columns in (tensor_dict1, tensor_dict2):
        for key, value in columns.items():
            require(isinstance(value, np.ndarray), f"`{key}` must be a np.ndarray, got {type(value)}")
    return _add_missing(tensor_dict1, tensor_dict2, "tensor_dict")


def union_two_dict(dict1: dict, dict2: dict) -> dict:
    """Add the entries of `dict2` to `dict1`, in place. An entry both have must be equal."""
    return _add_missing(dict1, dict2, "meta_dict")


def _add_missing(first: Any, second: Any, name: str) -> Any:
    present = set(first.keys())
    missing = {}
    for key, value in second.items():
        if key not in present:
            missing[key] = value
        else:
            require(
                values_equal(first[key], value),
                f"`{key}` in {name}1 and {name}2 are not the same object: their values differ. "
                f"Rename or drop one of them before the union",
            )
    for key, value in missing.items():
        first[key] = value
    return first


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """`[{k: v}, ...]` -> `{k: [v, ...]}`. All dicts must have the same keys (AssertionError)."""
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for row in list_of_dict:
        require(
            row.keys() == keys, f"all dicts must have the same keys: {sorted(keys)} and {sorted(row.keys())} differ"
        )
    return {key: [row[key] for row in list_of_dict] for key in keys}


def merge_meta_info(infos: Sequence[dict]) -> dict:
    """One meta_info out of several: `metrics` are gathered, every other key must agree wherever it occurs."""
    merged: dict = {}
    metrics: dict[str, list] = {}
    for info in infos:
        for key, value in info.items():
            if key == "metrics":
                _gather_metrics(metrics, value)
            elif key not in merged:
                merged[key] = value
            elif not values_equal(merged[key], value):
                values = f"{reprlib.repr(merged[key])} and {reprlib.repr(value)}"
                raise AssertionError(f"Conflicting values for meta_info key '{key}': {values}")
    if any("metrics" in info for info in infos):
        merged["metrics"] = metrics
    return merged


def _gather_metrics(gathered: dict[str, list], metrics: Any) -> None:
    """Append a worker's metrics, `{name: value or list of values}` or a list of such dicts, to `gathered`.

    Workers may report different names (a rank without a micro-batch reports none), and values that an earlier concat
    has made into lists stay flat.
    """
    if metrics is None:
        return
    for entry in [metrics] if isinstance(metrics, Mapping) else metrics:
        require(
            isinstance(entry, Mapping), f"meta_info['metrics'] must be a dict or a list of dicts, got {type(entry)}"
        )
        for name, value in entry.items():
            gathered.setdefault(name, []).extend(value if isinstance(value, list) else [value])


def take_rows(column: Any, rows: slice | torch.Tensor) -> Any:
    """Rows of one tensor column: a slice gives a view, an int64 index a copy. Works for ragged (nested) columns too."""
    if isinstance(column, torch.Tensor) and column.is_nested:
        parts = column.unbind()
        return _nested(parts[rows] if isinstance(rows, slice) else [parts[i] for i in rows.tolist()], like=column)
    return column[rows] if isinstance(rows, slice) else column[rows.to(column.device)]


def cut_rows(key: str, column: Any, parts: int) -> Any:
    """`[rows, length, ...]` -> `[rows * parts, length / parts, ...]`. Rows of lists of one length count as 2-D."""
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype == object:
        column = np.array(column.tolist(), dtype=object)
    require(
        column.ndim > 1 and column.shape[1] % parts == 0,
        f"column '{key}' of shape {tuple(column.shape)} cannot be cut into {parts} along dimension 1",
    )
    return column.reshape(column.shape[0] * parts, column.shape[1] // parts, *column.shape[2:])


def concat_tensors(tensors: Sequence[TensorDict]) -> TensorDict:
    """Concatenate TensorDicts along the rows."""
    columns = {}
    for key in same_keys([t.keys() for t in tensors], "batch"):
        columns[key] = _concat_column(key, [t.get(key) for t in tensors])
    return TensorDict(columns, batch_size=[sum(t.batch_size[0] for t in tensors)], device=tensors[0].device)


def _concat_column(key: str, parts: list) -> Any:
    if isinstance(parts[0], torch.Tensor):
        if parts[0].is_nested:
            return _nested([row for part in parts for row in part.unbind()], like=parts[0])
        shapes = {tuple(part.shape[1:]) for part in parts}
        require(
            len(shapes) == 1,
            f"batch['{key}'] cannot be concatenated: after the row dimension the parts have shapes {sorted(shapes)}. "
            f"Pad them to one length first",
        )
    return torch.cat(parts, dim=0)


def _nested(rows: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if not rows and like.layout == torch.jagged:  # torch cannot make a jagged tensor out of no rows
        return torch.nested.nested_tensor_from_jagged(like.values()[:0], torch.zeros(1, dtype=torch.int64))
    return torch.nested.as_nested_tensor(list(rows), layout=like.layout)


def concat_arrays(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate non-tensor columns along the rows."""
    columns = {}
    for key in same_keys([part.keys() for part in parts], "non_tensor_batch"):
        arrays = [part[key] for part in parts]
        shapes = {array.shape[1:] for array in arrays}
        require(
            len(shapes) == 1,
            f"non_tensor_batch['{key}'] cannot be concatenated: rows have shapes {sorted(shapes, key=str)}",
        )
        columns[key] = np.concatenate(arrays, axis=0)
    return columns


def same_keys(keys: Sequence[Iterable[Any]], where: str) -> list[str]:
    """The keys of every part. AssertionError, naming the odd ones, unless all parts have the same."""
    first = list(keys[0])
    for index, other in enumerate(keys):
        odd = set(first) ^ set(other)
        require(
            not odd,
            f"concat needs the same {where} keys in every part; part 0 and part {index} differ in {sorted(odd)}",
        )
    return first


def split_tensordict(tensor_dict: TensorDict) -> tuple[TensorDict | None, dict[str, np.ndarray], dict]:
    """The (batch, non_tensor_batch, meta_info) of a TensorDict that also holds non-tensors."""
    tensors: dict[Any, Any] = {}
    columns: dict[Any, np.ndarray] = {}
    meta_info: dict[Any, Any] = {}
    for key in tensor_dict.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
        value = tensor_dict.get(key)
        if isinstance(value, NonTensorStack):
            columns[key] = object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            meta_info[key] = value.data
        else:
            tensors[key] = value
    batch = TensorDict(tensors, batch_size=tensor_dict.batch_size) if tensors or not columns else None
    return batch, columns, meta_info


def join_tensordict(batch: TensorDict | None, non_tensor_batch: dict[str, np.ndarray], meta_info: dict) -> TensorDict:
    """Inverse of `split_tensordict`. AssertionError if a key is used in more than one of the three."""
    columns: dict[str, Any] = {} if batch is None else dict(batch.items())
    keys = [*columns, *non_tensor_batch, *meta_info]
    require(
        len(keys) == len(set(keys)) and all(isinstance(key, str) for key in keys),
        f"the keys of a TensorDict must be strings, each used once; here are {keys}",
    )
    rows = check_columns(batch, non_tensor_batch)
    for key, column in non_tensor_batch.items():
        columns[key] = NonTensorStack(*(NonTensorData(value) for value in column))
    for key, value in meta_info.items():
        columns[key] = NonTensorData(value, batch_size=[rows])
    return TensorDict(columns, batch_size=[rows])
