"""Hypothesis strategies for DataProtos of every shape: any dtype, no rows, no tensors, objects of every plain kind."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array

TORCH_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    },
    key=str,
)


def _has_operators(dtype: torch.dtype) -> bool:
    """Whether torch can move values of this dtype about; some (int1, bits8, ...) are mere names for bytes."""
    try:
        torch.zeros(2, dtype=torch.uint8).view(dtype)[torch.tensor([0])].clone()
    except (NotImplementedError, RuntimeError):
        return dtype.itemsize > 2
    return True


COMPUTABLE_DTYPES = [dtype for dtype in TORCH_DTYPES if _has_operators(dtype)]
# Inside an object column a pickle is torch's own, which fails for float8 and the larger unsigned integers.
NESTED_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
NUMPY_DTYPES = [np.dtype(code) for code in [*"?bBhHiIqQefdFDg", "S3", "U5", "M8[ns]", "M8[D]", "m8[us]", ">i4", ">f8"]]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, so floating-point columns hold NaNs, infinities and subnormals; booleans are 0 or 1."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype.kind in "SU":
        values = np.array(
            [f"é{n}"[: dtype.itemsize] if dtype.kind == "U" else f"{n}" for n in range(count)], dtype=dtype
        )
    elif dtype.kind == "b" or dtype.char == "g":
        values = generator.integers(0, 2, count).astype(dtype)
    else:
        values = np.frombuffer(generator.bytes(count * dtype.itemsize), dtype=dtype)
    return values.reshape(shape)


# A NaN is found again as a key only by identity, which no copy keeps.
keyable = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=8)
hashable = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8)
leaves = (
    hashable
    | st.complex_numbers()
    | st.integers(min_value=2**62, max_value=2**70)
    | st.just("\udc80 \ud83d\ude00")
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.int64, st.integers(-(2**63), 2**63 - 1))
    | st.builds(np.datetime64, st.integers(0, 10**9), st.just("s"))
    | st.builds(random_array, st.sampled_from(NUMPY_DTYPES), st.sampled_from([(), (0,), (2, 3)]), st.integers(0, 99))
    | st.builds(
        random_tensor, st.sampled_from(NESTED_DTYPES), st.sampled_from([(), (0, 2), (2, 3)]), st.integers(0, 99)
    )
)
plain_data = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner, max_size=3)
        | st.dictionaries(keyable | st.tuples(keyable), inner, max_size=3)
        | st.frozensets(keyable, max_size=3)
        | st.lists(inner, max_size=3).map(object_array)
    ),
    max_leaves=8,
)
number_lists = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4) | st.lists(st.floats(), max_size=4)


@st.composite
def data_protos(
    draw: st.DrawFn, min_rows: int = 0, objects: bool = True, dtypes: tuple[torch.dtype, ...] = tuple(COMPUTABLE_DTYPES)
) -> DataProto:
    rows = draw(st.integers(min_rows, 6))
    shapes = st.sampled_from([(), (3,), (0,), (2, 2)])
    keys = st.sampled_from(["a", "b", "$", "log_probs", "ключ"])
    tensors = {
        key: random_tensor(dtype, (rows, *shape), draw(st.integers(0, 99)))
        for key, (dtype, shape) in draw(
            st.dictionaries(keys, st.tuples(st.sampled_from(dtypes), shapes), max_size=3)
        ).items()
    }
    columns = {
        key: random_array(dtype, (rows, *shape), draw(st.integers(0, 99)))
        for key, (dtype, shape) in draw(
            st.dictionaries(keys, st.tuples(st.sampled_from(NUMPY_DTYPES), shapes), max_size=2)
        ).items()
    }
    if objects:
        cells = draw(st.sampled_from([plain_data, st.text(), number_lists, st.lists(st.integers(), max_size=3)]))
        columns["objects"] = object_array(draw(st.lists(cells, min_size=rows, max_size=rows)))
    meta_info = draw(st.dictionaries(st.sampled_from(["step", "$", 3, (1, "x")]), plain_data, max_size=2))
    return DataProto.from_dict(tensors, columns, meta_info)
