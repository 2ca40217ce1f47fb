"""The bytes of a DataProto: what they keep, what they refuse to hold, and what they refuse to be read from."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from quadriga.errors import DataError
from quadriga.protocol import DataProto, codec


def sample() -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(12).view(4, 3), "mask": torch.ones(4, 3, dtype=torch.bool)},
        {"uid": list("abcd"), "score": np.arange(4.0), "words": [[1], [2, 3], [], [4]]},
        {"step": 3},
    )


def forge(description: object, buffers: list[bytes] = (), **lies: int) -> bytes:
    """A container with a correct checksum around any description; `lies` replace fields of the prefix."""
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    sizes = lies.get("sizes") or [len(buffer) for buffer in buffers]
    body = struct.pack(f"<{len(sizes)}Q", *sizes) + text
    count, length = lies.get("count", len(sizes)), lies.get("length", len(text))
    out = struct.pack("<8sIIQ", b"QUADRIG1", zlib.crc32(body), count, length) + body
    for part in buffers:
        out += bytes(-len(out) % 64) + part
    return out + bytes(-len(out) % 64)


def tensor(buffer: int = 0, shape: list | None = None, dtype: str = "uint8") -> dict:
    return {"$": "tensor", "dtype": dtype, "shape": [4] if shape is None else shape, "buffer": buffer}


def table(**columns: object) -> dict:
    rows = {"$": "tensordict", "batch_size": [4], "columns": [[key, value] for key, value in columns.items()]}
    return {"batch": rows if columns else None, "non_tensor_batch": [], "meta_info": []}


# ---- what they keep -------------------------------------------------------------------------------------------------


def test_loaded_columns_are_writable_and_have_memory_of_their_own(tmp_path: Path, recwarn) -> None:
    data = sample()
    packed = data.to_bytes()
    before = bytes(packed)
    data.save_to_disk(tmp_path / "x.dp")
    for loaded in (DataProto.from_bytes(packed), DataProto.load_from_disk(tmp_path / "x.dp")):
        loaded.batch["ids"] += 1
        loaded.non_tensor_batch["score"] *= 2
    assert data == sample()
    assert packed == before
    assert not recwarn.list


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, dtype=np.uint8)])
def test_any_bytes_like_object_can_be_read(kind) -> None:
    assert DataProto.from_bytes(kind(sample().to_bytes())) == sample()


def test_only_the_rows_of_a_slice_are_written() -> None:
    big = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    assert len(big[:1].to_bytes()) < 5000
    assert len(pickle.dumps(big[:1])) < 6000


def test_views_transposes_conjugates_and_parameters_are_written_by_value() -> None:
    tensors = {
        "transposed": torch.arange(6).view(2, 3).T,
        "conjugate": torch.tensor([1 + 2j, 3j, 4]).conj(),
        "imaginary": torch.tensor([1 + 2j, 3j, 4]).conj().imag,
        "spread": torch.arange(9)[::3],
        "expanded": torch.tensor([[1.0]]).expand(3, 4),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "table": TensorDict({"inner": torch.arange(3)}, batch_size=[3]),
    }
    data = DataProto.from_dict(tensors, {"strided": np.arange(6)[::2], "fortran": np.asfortranarray(np.eye(3))})
    loaded = DataProto.from_bytes(data.to_bytes())
    assert loaded == data
    assert DataProto.from_bytes(data[::3].to_bytes()) == data[::3]  # one row with a stride of its own
    assert not loaded.batch["parameter"].requires_grad
    assert loaded.batch["table"]["inner"].tolist() == [0, 1, 2]


def test_integers_of_any_size_survive() -> None:
    numbers = [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000]
    loaded = DataProto.from_bytes(
        DataProto.from_dict(non_tensors={"n": [*numbers], "l": [[n] for n in numbers]}).to_bytes()
    )
    assert loaded.non_tensor_batch["n"].tolist() == numbers
    assert [row[0] for row in loaded.non_tensor_batch["l"]] == numbers


def test_types_of_plain_data_are_kept() -> None:
    values = [True, 1, 1.0, "1", b"1", (1,), [1], {1}, frozenset([1]), {"1": 1}, {1: 1}, np.float64(1), np.bool_(True)]
    info = DataProto.from_bytes(DataProto(meta_info={"v": values}).to_bytes()).meta_info
    assert info["v"] == values
    assert [type(value) for value in info["v"]] == [type(value) for value in values]
    assert type(next(iter(info["v"][9]))) is str


# ---- what they refuse to hold ---------------------------------------------------------------------------------------


class Custom:
    pass


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (
            lambda: DataProto.from_dict(non_tensors={"col": [{"deep": [Custom()]}]}),
            ["non_tensor_batch['col']", "Custom"],
        ),
        (lambda: DataProto(meta_info={"fn": len}), ["meta_info['fn']", "builtin_function_or_method"]),
        (lambda: DataProto.from_dict({"s": torch.eye(2).to_sparse()}), ["batch['s']", "sparse"]),
        (lambda: DataProto.from_dict(non_tensors={"r": np.zeros(2, dtype="i4,f4")}), ["non_tensor_batch['r']", "i4"]),
    ],
)
def test_what_is_not_plain_data_is_refused_by_name(data, names: list[str], tmp_path: Path) -> None:
    with pytest.raises(TypeError) as refusal:
        data().save_to_disk(tmp_path / "x.dp")
    assert all(name in str(refusal.value) for name in names)
    assert list(tmp_path.iterdir()) == []
    assert pickle.loads(pickle.dumps(data())).get_data_info() == data().get_data_info()  # a trusted pickle carries it


def test_circular_data_is_refused() -> None:
    circle: list = []
    circle.append(circle)
    with pytest.raises(TypeError, match=r"meta_info\['c'\] is nested too deeply"):
        DataProto(meta_info={"c": circle}).to_bytes()


# ---- files ----------------------------------------------------------------------------------------------------------


def test_interrupted_save_keeps_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.dp"
    sample().save_to_disk(path)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        sample().repeat(2).save_to_disk(path)
    monkeypatch.undo()
    assert DataProto.load_from_disk(path) == sample()
    assert list(tmp_path.iterdir()) == [path]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.dp"
    sample().save_to_disk(path)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            sample().repeat(2).save_to_disk(path)
            sample().save_to_disk(path)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        lengths = {len(DataProto.load_from_disk(path)) for _ in range(100)}
    finally:
        stop.set()
        writer.join()
    assert lengths <= {4, 8}


def test_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "nothing.dp")


# ---- what they refuse to be read from -------------------------------------------------------------------------------


class Exploit:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return Path.touch, (self.trace,)


def torch_saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "code_ran"
    for content in (pickle.dumps(Exploit(trace)), torch_saved(Exploit(trace)), pickle.dumps(sample())):
        (tmp_path / "evil.dp").write_bytes(content)
        with pytest.raises(DataError, match=r"evil\.dp"):
            DataProto.load_from_disk(tmp_path / "evil.dp")
    assert not trace.exists()


def test_every_truncation_and_every_extension_is_refused() -> None:
    packed = bytes(sample().to_bytes())
    for length in range(0, len(packed), 7):
        with pytest.raises(DataError):
            DataProto.from_bytes(packed[:length])
    with pytest.raises(DataError):
        DataProto.from_bytes(packed + b"\0")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bits_are_refused_or_harmless(data: st.DataObject) -> None:
    packed = bytearray(sample().to_bytes())
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        loaded = DataProto.from_bytes(packed)
    except DataError:
        return
    assert loaded.get_data_info() == sample().get_data_info()  # only a value inside a column can have changed


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    for content in (garbage, codec.MARK + garbage, forge(garbage)):
        with pytest.raises(DataError):
            DataProto.from_bytes(content)


four = [b"abcd"]


@pytest.mark.parametrize(
    "content",
    [
        forge(table(x=tensor()), four, count=2**32 - 1),
        forge(table(x=tensor()), four, length=2**63),
        forge(table(x=tensor()), four, sizes=[2**62]),
        forge(table(x=tensor()), four, sizes=[2**64 - 1]),
        forge(table(x=tensor()), four, sizes=[0]),
        forge(table(x=tensor(buffer=1)), four),
        forge(table(x=tensor(buffer="0")), four),
        forge(table(x=tensor(shape=[5])), four),
        forge(table(x=tensor(shape=[-4])), four),
        forge(table(x=tensor(shape=[4, 2**64, 0])), four),
        forge(table(x=tensor(shape=[2.0, 2])), four),
        forge(table(x=tensor(dtype="int64")), four),
        forge(table(x=tensor(dtype="qint8")), four),
        forge(table(x=tensor(dtype="Tensor")), four),
        forge(table(x=tensor(), y=tensor()), four),
        forge(table(x=tensor(shape=[2, 2])), four),
        forge(table(x="text")),
        forge(table(x={"$": "os.system", "command": "true"})),
        forge(table(x={"$": "__class__"})),
        forge(table(x={"$": ["list"]})),
        forge(table(x={"$": "tensor", "self": 1})),
        forge({**table(), "non_tensor_batch": [["x", tensor()]]}, four),
        forge({**table(), "non_tensor_batch": [["x", "text"]]}),
        forge({**table(), "non_tensor_batch": [[1, {"$": "objects", "shape": [1], "items": [1]}]]}),
        forge(
            {**table(), "non_tensor_batch": [["x", {"$": "array", "dtype": "|O8", "shape": [1], "buffer": 0}]]},
            [b"8" * 8],
        ),
        forge(
            {
                **table(),
                "non_tensor_batch": [["x", {"$": "array", "dtype": "<U2147483647", "shape": [1], "buffer": 0}]],
            },
            four,
        ),
        forge(
            {**table(), "non_tensor_batch": [["x", {"$": "array", "dtype": "i4,i4", "shape": [1], "buffer": 0}]]}, four
        ),
        forge({**table(), "non_tensor_batch": [["x", {"$": "objects", "shape": [2**60], "items": []}]]}),
        forge({"batch": [], "non_tensor_batch": [], "meta_info": []}),
        forge({"batch": None, "meta_info": []}),
        forge([1, 2]),
        forge(b"[" * 100_000),
        forge(b'{"batch": ' + b"9" * 5000 + b"}"),
        forge(b"\xff\xfe"),
    ],
    ids=range(34),
)
def test_lying_descriptions_are_refused(content: bytes) -> None:
    with pytest.raises(DataError):
        DataProto.from_bytes(content)


def test_rows_that_disagree_are_refused() -> None:
    lists = {"$": "objects", "shape": [3], "items": [1, 2, 3]}
    with pytest.raises(DataError, match="3 rows"):
        DataProto.from_bytes(forge({**table(x=tensor()), "non_tensor_batch": [["y", lists]]}, four))


@pytest.mark.parametrize("offsets", [[0, 9], [1, 2], [0, 3, 2], [0, -1, 2]], ids=str)
def test_jagged_offsets_outside_the_values_are_refused(offsets: list[int]) -> None:
    raw = np.array(offsets).tobytes()
    column = {"$": "jagged", "values": tensor(0), "offsets": tensor(1, shape=[len(offsets)], dtype="int64")}
    with pytest.raises(DataError):
        DataProto.from_bytes(forge(table(x=column), [b"abcd", raw]))


@pytest.mark.parametrize("kind", ["float32", "float64", "bool", "uint8", "int8", "int16"])
def test_jagged_offsets_of_another_kind_are_refused(kind: str) -> None:
    """torch would take them as they are, and read memory by them."""
    raw = np.array([0, 1], dtype=kind).tobytes()
    column = {"$": "jagged", "values": tensor(0), "offsets": tensor(1, shape=[2], dtype=kind)}
    with pytest.raises(DataError, match="offsets"):
        DataProto.from_bytes(forge(table(x=column), [b"abcd", raw]))


def test_jagged_offsets_are_one_list() -> None:
    raw = np.array([[0, 1], [1, 2]]).tobytes()
    column = {"$": "jagged", "values": tensor(0), "offsets": tensor(1, shape=[2, 2], dtype="int64")}
    with pytest.raises(DataError, match="offsets"):
        DataProto.from_bytes(forge(table(x=column), [b"abcd", raw]))


def test_forged_containers_are_read_when_they_tell_the_truth() -> None:
    """The lies above are refused for what they say, not because `forge` cannot make a container."""
    data = DataProto.from_bytes(forge(table(x=tensor()), four))
    assert data.batch["x"].tolist() == list(b"abcd")
