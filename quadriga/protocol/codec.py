"""The bytes of a DataProto: in memory, on disk, and in a pickle. Bytes and files are read without running code.

Layout, little-endian; the head and every buffer are padded with zeros to a multiple of 64 bytes:

    prefix        mark (8 bytes) · crc32 of table and description (u32) · number of buffers (u32) ·
                  length of description (u64)
    table         the length of each buffer (u64 each)
    description   JSON, UTF-8 (see protocol_values)
    buffers       in the order of the table

Offsets are not stored, they follow from the table, and its lengths must add up to the size of the whole before
anything is allocated. Every buffer is read into memory of its own, so a loaded column is writable and gives its memory
back when it is dropped. Tensors arrive on the CPU and without autograd history.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.errors import DataError
from quadriga.protocol.columns import check_columns
from quadriga.protocol.values import Fields, copy_into, describe, fresh_copy, restore

MARK = b"QUADRIG1"
_PREFIX = struct.Struct("<8sIIQ")
_ALIGNMENT = 64


def to_bytes(fields: Fields) -> memoryview:
    """The whole container as one read-only bytes-like object; the columns are copied once, into it."""
    description, buffers = describe(fields)
    head = _head(description, buffers)
    out = np.empty(len(head) + sum(_padded(buffer.size) for buffer in buffers), dtype=np.uint8)
    out[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    end = len(head)
    for buffer in buffers:
        start, end = end, end + _padded(buffer.size)
        copy_into(out[start : start + buffer.size], buffer)
        out[start + buffer.size : end] = 0
    return out.data.toreadonly()


def from_bytes(data: Any, source: str = "the given bytes") -> Fields:
    """Inverse of `to_bytes`, for any bytes-like object. DataError, naming `source`, if it holds anything else."""
    view = np.frombuffer(data, dtype=np.uint8)
    return _load(view.size, lambda start, size: fresh_copy(view[start : start + size]), source)


def save(path: str | os.PathLike, fields: Fields) -> None:
    """Write the container to `path`, all or nothing: a crash leaves the old file or the new one, never a part."""
    description, buffers = describe(fields)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(_head(description, buffers))
            for buffer in buffers:
                file.write(buffer.data)
                file.write(bytes(_padded(buffer.size) - buffer.size))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename itself durable
    finally:
        os.close(folder)


def load(path: str | os.PathLike) -> Fields:
    """Inverse of `save`. DataError, naming the file, if it is damaged or `save` did not write it."""
    with open(path, "rb") as file:

        def read(start: int, size: int) -> np.ndarray:
            block = np.empty(size, dtype=np.uint8)
            file.seek(start)
            if file.readinto(block.data) != size:
                raise ValueError("it became shorter while it was read")
            return block

        return _load(os.fstat(file.fileno()).st_size, read, str(path))


def to_pickle_state(fields: Fields) -> tuple:
    """What pickle is given. Raw columns are uint8 arrays, which protocol 5 moves without copying them into the pickle;
    object columns and meta_info are left to pickle, so inside a cluster they may hold anything that it can carry."""
    batch, non_tensor_batch, meta_info = fields
    objects = {key: column for key, column in non_tensor_batch.items() if column.dtype.hasobject}
    arrays = {key: column for key, column in non_tensor_batch.items() if key not in objects}
    try:
        description, buffers = describe((batch, arrays, {}))
    except TypeError:  # a sparse tensor, a record array: rare, and pickle knows them
        return None, batch, non_tensor_batch, meta_info
    return description, buffers, objects, list(non_tensor_batch), meta_info


def from_pickle_state(state: tuple) -> Fields:
    """Inverse of `to_pickle_state`. Buffers in read-only memory (Ray's object store) are copied, see protocol.py."""
    if state[0] is None:
        return state[1:]
    description, buffers, objects, keys, meta_info = state
    batch, arrays, _ = restore(description, buffers)
    columns = {**arrays, **objects}
    return batch, {key: columns[key] for key in keys}, meta_info


def _head(description: bytes, buffers: list[np.ndarray]) -> bytes:
    body = struct.pack(f"<{len(buffers)}Q", *(buffer.size for buffer in buffers)) + description
    head = _PREFIX.pack(MARK, zlib.crc32(body), len(buffers), len(description)) + body
    return head + bytes(_padded(len(head)) - len(head))


def _load(total: int, read: Callable[[int, int], np.ndarray], source: str) -> Fields:
    """`read(start, size)` gives that part as a writable array of its own; it is only asked for parts that exist."""
    try:
        return _parse(total, read)
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        AssertionError,
    ) as damage:
        raise DataError(
            f"{source} is not a DataProto that Quadriga wrote, or it is damaged: {damage}",
            "write it again with DataProto.save_to_disk; pickle and torch.save files can run code and are not read",
        ) from damage


def _parse(total: int, read: Callable[[int, int], np.ndarray]) -> Fields:
    if total < _PREFIX.size:
        raise ValueError(f"{total} bytes are too few")
    mark, checksum, count, length = _PREFIX.unpack(read(0, _PREFIX.size).data)
    if mark != MARK:
        raise ValueError("it does not begin with Quadriga's mark")
    table = 8 * count
    head = _PREFIX.size + table + length
    if head > total:
        raise ValueError(f"its head needs {head} bytes, it has {total}")
    body = read(_PREFIX.size, table + length).tobytes()
    if zlib.crc32(body) != checksum:
        raise ValueError("the checksum of its head is wrong")
    sizes = struct.unpack(f"<{count}Q", body[:table])
    start = _padded(head)
    needed = start + sum(map(_padded, sizes))
    if needed != total:
        raise ValueError(f"its columns need {needed} bytes, it has {total}")
    buffers = []
    for size in sizes:
        buffers.append(read(start, size))
        start += _padded(size)
    batch, non_tensor_batch, meta_info = restore(body[table:], buffers)
    check_columns(batch, non_tensor_batch)
    return batch, non_tensor_batch, meta_info


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
