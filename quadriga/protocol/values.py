"""Values as a JSON description beside raw buffers, and back. Reading a description never runs code from it.

In the description plain data stands for itself; everything JSON has no word for is an object whose key "$" names its
kind. `_Writer` and `_Reader` are mirror images, kind by kind. The memory of tensors, arrays and bytes is kept out of
the JSON: each owns exactly one buffer, a 1-D uint8 array, and refers to it by number.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from quadriga.protocol.columns import object_array, tensor_bytes

# (batch, non_tensor_batch, meta_info): the three fields of a DataProto
Fields: TypeAlias = tuple[TensorDict | None, dict[str, np.ndarray], dict]

_STANDS_FOR_ITSELF = {str, float, bool, type(None)}
_PLAIN_INTS = range(-(2**63), 2**63)
_TORCH_DTYPES = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not (name := str(dtype).removeprefix("torch.")).startswith("q")  # quantised
}
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUMm]\d+(\[\w+\])?")


def describe(fields: Fields) -> tuple[bytes, list[np.ndarray]]:
    """The description of `fields` (JSON, UTF-8) and its buffers, which share memory with the columns.

    Raises:
        TypeError: a value is neither tensor, array nor plain data; the message names its key and type.
    """
    batch, non_tensor_batch, meta_info = fields
    writer = _Writer()
    description = {
        "batch": None if batch is None else writer.tensordict(batch, where="batch"),
        "non_tensor_batch": writer.entries(non_tensor_batch, where="non_tensor_batch"),
        "meta_info": writer.entries(meta_info, where="meta_info"),
    }
    text = json.dumps(description, ensure_ascii=False, check_circular=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass"), writer.buffers


def restore(description: bytes, buffers: Sequence[np.ndarray]) -> Fields:
    """Inverse of `describe`. Writable buffers become the memory of the columns, read-only ones are copied.

    A description that `describe` did not write raises some ValueError, TypeError, LookupError or RuntimeError.
    """
    reader = _Reader([buffer if buffer.flags.writeable else fresh_copy(buffer) for buffer in buffers])
    fields = json.loads(str(description, "utf-8", "surrogatepass"), object_hook=reader.decode)
    batch, non_tensor_batch, meta_info = fields["batch"], dict(fields["non_tensor_batch"]), dict(fields["meta_info"])
    if not isinstance(batch, TensorDict | None):
        raise TypeError(f"batch is a {type(batch).__name__}")
    for key, column in non_tensor_batch.items():
        if not isinstance(key, str) or not isinstance(column, np.ndarray):
            raise TypeError(f"non_tensor_batch[{key!r}] is not an array")
    return batch, non_tensor_batch, meta_info


def fresh_copy(buffer: np.ndarray) -> np.ndarray:
    """A writable copy. numpy asks the kernel for huge pages, without which new memory is the slow part of a copy."""
    mine = np.empty(buffer.size, dtype=np.uint8)
    copy_into(mine, buffer)
    return mine


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """memcpy between uint8 arrays of one size; large ones with torch's threads."""
    if source.size < 1 << 20:
        target[:] = source
        return
    if not source.flags.writeable:  # torch would warn that it cannot protect the source, which is only read here
        source = np.ctypeslib.as_array((ctypes.c_uint8 * source.size).from_address(source.ctypes.data))
    torch.from_numpy(target).copy_(torch.from_numpy(source))


def raw_tensor(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a dense tensor of any dtype as a 1-D uint8 array (a copy only off the CPU or if not contiguous)."""
    return tensor_bytes(tensor.cpu()).numpy()


def tensor_from_raw(raw: np.ndarray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Inverse of `raw_tensor`; the tensor goes on using the memory of `raw`, which must be writable."""
    torch_dtype = _TORCH_DTYPES[dtype]
    _check_size(raw, torch_dtype.itemsize, shape)
    if raw.size == 0:
        return torch.empty(tuple(shape), dtype=torch_dtype)
    return torch.from_numpy(raw).view(torch_dtype).view(tuple(shape))


def serialize_single_tensor(obj: torch.Tensor) -> tuple[str, tuple[int, ...], np.ndarray]:
    """(dtype name, shape, memory as uint8) of a dense tensor; the memory is shared with it where possible."""
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), raw_tensor(obj)


def deserialize_single_tensor(arr: tuple[str, Sequence[int], Any]) -> torch.Tensor:
    """Inverse of `serialize_single_tensor` from any bytes-like memory; the tensor has memory of its own."""
    dtype, shape, data = arr
    return tensor_from_raw(fresh_copy(np.frombuffer(data, dtype=np.uint8)), dtype, shape)


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]:
    """(batch size, device, {key: (layout, tensor or list of rows)}); a nested tensor is stored row by row."""
    items: dict[str, tuple[str, Any]] = {}
    value: Any
    for key, value in batch.items():
        if value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            items[key] = (f"nested-{layout}", [serialize_single_tensor(row) for row in value.unbind()])
        else:
            items[key] = ("dense", serialize_single_tensor(value))
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), items


def deserialize_tensordict(arr: tuple[Sequence[int], str | None, dict[str, tuple[str, Any]]]) -> TensorDict:
    """Inverse of `serialize_tensordict`, on the same device."""
    batch_size, device, items = arr
    tensors = {}
    for key, (layout, data) in items.items():
        if layout == "dense":
            tensors[key] = deserialize_single_tensor(data)
        else:
            rows = [deserialize_single_tensor(row) for row in data]
            tensors[key] = nested_tensor(rows, jagged=layout == "nested-jagged")
    return TensorDict(tensors, batch_size=batch_size, device=device)


def nested_tensor(rows: list[torch.Tensor], jagged: bool) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged if jagged else torch.strided)


def _check_size(raw: np.ndarray, itemsize: int, shape: Sequence[int]) -> None:
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * itemsize != raw.size:
        raise ValueError(f"{raw.size} bytes cannot have shape {list(shape)} with {itemsize} bytes an element")


class _Unsupported(Exception):
    """A value that is not plain data; becomes a TypeError as soon as its column is known."""


class _Writer:
    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []
        self._encoders: dict[type, Callable[[Any], Any]] = {
            int: self._int,
            list: self._list,
            dict: self._dict,
            np.ndarray: self._array,
            torch.Tensor: self._tensor,
            tuple: lambda value: {"$": "tuple", "items": self._list(list(value))},
            set: lambda value: {"$": "set", "items": self._list(list(value))},
            frozenset: lambda value: {"$": "frozenset", "items": self._list(list(value))},
            complex: lambda value: {"$": "complex", "real": value.real, "imag": value.imag},
            bytes: lambda value: {"$": "bytes", "buffer": self._add(np.frombuffer(value, dtype=np.uint8))},
        }

    def entries(self, columns: Any, where: str) -> list:
        """Pairs of key and value, not a JSON object, because keys need not be strings. `where` is for messages."""
        return [[self._named(key, where, key), self._named(value, where, key)] for key, value in columns.items()]

    def tensordict(self, value: TensorDictBase, where: str) -> dict:
        return {"$": "tensordict", "batch_size": list(value.batch_size), "columns": self.entries(value, where)}

    def _named(self, value: Any, where: str, key: Any) -> Any:
        try:
            return self.encode(value)
        except _Unsupported as unsupported:
            raise TypeError(
                f"{where}[{key!r}] holds a {unsupported}, which is neither a dense tensor, an array nor plain data and "
                f"cannot be stored as bytes. Turn it into plain data, or drop it first (pop, select)"
            ) from None
        except RecursionError:
            raise TypeError(f"{where}[{key!r}] is nested too deeply, or holds a list or dict inside itself") from None

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _STANDS_FOR_ITSELF:
            return value
        if encoder := self._encoders.get(kind):
            return encoder(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            return self.tensordict(value, where="TensorDict")
        if isinstance(value, np.generic) and _NUMPY_DTYPE.fullmatch(value.dtype.str):
            return {"$": "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        raise _Unsupported(f"{kind.__module__}.{kind.__qualname__}")

    def _add(self, raw: np.ndarray) -> int:
        self.buffers.append(raw)
        return len(self.buffers) - 1

    def _int(self, value: int) -> Any:
        # Python will not print or parse integers of thousands of digits in base 10; base 16 has no such limit.
        return value if value in _PLAIN_INTS else {"$": "int", "hex": hex(value)}

    def _list(self, value: list) -> list:
        kinds = set(map(type, value))
        if kinds <= _STANDS_FOR_ITSELF or (kinds == {int} and min(value) in _PLAIN_INTS and max(value) in _PLAIN_INTS):
            return value
        return [self.encode(item) for item in value]

    def _dict(self, value: dict) -> dict:
        if set(map(type, value)) <= {str} and "$" not in value:
            if set(map(type, value.values())) <= _STANDS_FOR_ITSELF:
                return value
            return {key: self.encode(item) for key, item in value.items()}
        return {"$": "dict", "items": [[self.encode(key), self.encode(item)] for key, item in value.items()]}

    def _array(self, value: np.ndarray) -> dict:
        if value.dtype == object:
            return self._objects(value.reshape(-1).tolist(), list(value.shape))
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise _Unsupported(f"numpy array of dtype {value.dtype}")
        flat = np.ascontiguousarray(value).reshape(-1)
        raw = flat.view(np.uint8) if flat.nbytes else np.empty(0, dtype=np.uint8)
        return {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape), "buffer": self._add(raw)}

    def _objects(self, items: list, shape: list[int]) -> dict:
        if set(map(type, items)) == {list}:  # ragged token ids and log-probs: too many numbers to write as text
            kinds = set(map(type, chain.from_iterable(items)))
            if kinds in ({int}, {float}):
                dtype = "<i8" if kinds == {int} else "<f8"
                with suppress(OverflowError):  # an int beyond 64 bits: written as text after all
                    numbers = self._array(np.fromiter(chain.from_iterable(items), dtype=dtype))
                    lengths = self._array(np.fromiter(map(len, items), dtype="<i8"))
                    return {"$": "lists", "shape": shape, "numbers": numbers, "lengths": lengths}
        return {"$": "objects", "shape": shape, "items": self._list(items)}

    def _tensor(self, value: Any) -> dict:
        if value.is_nested:
            ragged_second = value.layout == torch.jagged and value._ragged_idx == 1 and value.lengths() is None
            if ragged_second:
                return {"$": "jagged", "values": self._tensor(value.values()), "offsets": self._tensor(value.offsets())}
            rows = [self._tensor(row) for row in value.unbind()]
            return {"$": "nested", "rows": rows, "jagged": value.layout == torch.jagged}
        dtype = str(value.dtype).removeprefix("torch.")
        ordinary = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not ordinary or value.is_meta or dtype not in _TORCH_DTYPES:
            raise _Unsupported(f"{type(value).__name__} of dtype {dtype} and layout {value.layout} on {value.device}")
        return {"$": "tensor", "dtype": dtype, "shape": list(value.shape), "buffer": self._add(raw_tensor(value))}


class _Reader:
    def __init__(self, buffers: list[np.ndarray]) -> None:
        self._buffers: list[np.ndarray | None] = list(buffers)
        self._decoders: dict[str, Callable[..., Any]] = {
            "int": lambda hex: int(hex, 16),
            "dict": lambda items: dict(items),
            "tuple": lambda items: tuple(items),
            "set": lambda items: set(items),
            "frozenset": lambda items: frozenset(items),
            "complex": lambda real, imag: complex(real, imag),
            "bytes": lambda buffer: self._take(buffer).tobytes(),
            "array": self._array,
            "objects": lambda shape, items: object_array(items).reshape(shape),
            "lists": _lists,
            "scalar": lambda dtype, hex: np.frombuffer(bytes.fromhex(hex), dtype=_numpy_dtype(dtype), count=1)[0],
            "tensor": lambda dtype, shape, buffer: tensor_from_raw(self._take(buffer), dtype, shape),
            "jagged": _jagged,
            "nested": nested_tensor,
            "tensordict": _tensordict,
        }

    def decode(self, value: dict) -> Any:
        """The value behind one JSON object; json calls it for the innermost objects first."""
        if "$" not in value:
            return value
        return self._decoders[value.pop("$")](**value)

    def _take(self, index: int) -> np.ndarray:
        buffer, self._buffers[index] = self._buffers[index], None
        if buffer is None:
            raise ValueError(f"buffer {index} is used twice")
        return buffer

    def _array(self, dtype: str, shape: list[int], buffer: int) -> np.ndarray:
        raw, numpy_dtype = self._take(buffer), _numpy_dtype(dtype)
        _check_size(raw, numpy_dtype.itemsize, shape)
        return np.ndarray(tuple(shape), dtype=numpy_dtype, buffer=raw)


def _numpy_dtype(name: str) -> np.dtype:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"unknown array dtype {name!r}")
    return np.dtype(name)


def _lists(shape: list[int], numbers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    if (lengths < 0).any() or lengths.sum() != len(numbers):
        raise ValueError("the lengths of a column of lists do not add up")
    ends = [0, *lengths.cumsum().tolist()]
    flat = numbers.tolist()
    return object_array(flat[start:end] for start, end in pairwise(ends)).reshape(shape)


def _jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """torch trusts the offsets of a jagged tensor and reads memory by them, so they are checked here."""
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.ndim != 1 or not len(offsets) or not values.ndim:
        raise ValueError(
            f"the offsets of a jagged tensor are no list of whole numbers: {offsets.dtype} {list(offsets.shape)}"
        )
    steps = offsets.diff()
    if offsets[0] != 0 or (steps < 0).any() or offsets[-1] > len(values):
        raise ValueError("the offsets of a jagged tensor point outside its values")
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _tensordict(batch_size: list[int], columns: list) -> TensorDict:
    named = dict(columns)
    if not all(isinstance(column, torch.Tensor | TensorDict) for column in named.values()):
        raise TypeError("a TensorDict holds something that is not a tensor")
    return TensorDict(named, batch_size=batch_size)
