"""Reading files of a run directory that somebody else is writing, has damaged, or has made up."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from quadriga.errors import QuadrigaError

MAX_LINE_BYTES = 8 << 20
"""A line that is longer is passed over: no sample and no step is so large."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe that nobody writes to must not hold the reader up."""


class Unreadable(QuadrigaError):
    """A file of a run cannot be read: it is gone, is no plain file, or lies elsewhere."""


def open_inside(folder: Path, *parts: str) -> BinaryIO:
    """Open a plain file below `folder` for reading. A link that leads out of it, a pipe or a device is refused."""
    shown = "/".join(parts)
    try:
        descriptor = _open_inside(folder, parts)
    except (OSError, ValueError, RuntimeError) as error:
        raise Unreadable(f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(f"{shown} is no plain file")
    return os.fdopen(descriptor, "rb")


def _open_inside(folder: Path, parts: tuple[str, ...]) -> int:
    if len(parts) == 1 and "/" not in parts[0] and parts[0] != "..":
        try:  # what is no link lies where it seems to lie: this spares the walk through every folder above it
            return os.open(f"{folder}/{parts[0]}", _FLAGS | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Unreadable(f"{'/'.join(parts)} leads out of the run directory")
    return os.open(path, _FLAGS)


def read_json(folder: Path, name: str, most_bytes: int = 4 << 20) -> dict[str, Any] | None:
    """A JSON object in a small file; None where there is none."""
    try:
        with open_inside(folder, name) as file:
            found = json.loads(file.read(most_bytes))
    except (Unreadable, ValueError, OSError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """One line of a .jsonl file; None for one that is unfinished or no JSON object."""
    if not raw.endswith(b"\n"):
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(file: BinaryIO, until: int | None = None) -> Iterator[tuple[int, bytes]]:
    """`(offset, line)` of every whole line from where `file` stands, up to byte `until`; `file.tell()` is then where it ends.

    An unfinished last line is left for later. One that is longer than `MAX_LINE_BYTES` comes empty, and in pieces of that
    length, so that whoever reads can stop in the middle of a file that is one line of gigabytes.
    """
    offset, inside = file.tell(), False
    while until is None or offset < until:
        raw = file.readline(MAX_LINE_BYTES)
        is_whole = raw.endswith(b"\n")
        if not is_whole and len(raw) < MAX_LINE_BYTES:
            return
        yield offset, raw if is_whole and not inside else b""
        offset += len(raw)
        inside = not is_whole


def last_line(file: BinaryIO, size: int) -> dict[str, Any] | None:
    """The newest whole line of a .jsonl file that parses, without reading what is before it."""
    reach = 16 << 10
    while True:
        start = max(size - reach, 0)
        file.seek(start)
        lines = file.read(size - start).splitlines(keepends=True)
        for raw in reversed(lines if start == 0 else lines[1:]):
            if (found := parse_line(raw)) is not None:
                return found
        if start == 0 or reach >= MAX_LINE_BYTES:
            return None
        reach *= 8


def newest_lines(file: BinaryIO, most: int) -> int:
    """Where the newest so many lines begin; found from the end of the file, `MAX_LINE_BYTES` at most."""
    end = place = file.seek(0, os.SEEK_END)
    found = 0
    while place > 0 and end - place < MAX_LINE_BYTES:
        size = min(64 << 10, place)
        place -= size
        file.seek(place)
        piece = file.read(size)
        if found + piece.count(b"\n") > most:
            for _ in range(found + piece.count(b"\n") - most):
                at = piece.index(b"\n")
                piece, place = piece[at + 1 :], place + at + 1
            return place
        found += piece.count(b"\n")
    return place


def finite(value: Any) -> float | None:
    """The value as a number that JSON can carry; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def encodable(text: str) -> str:
    """The text as any encoder takes it: half a surrogate pair, of a file name that is no UTF-8 or of odd JSON, becomes "?"."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode()


def plain(value: Any, depth: int = 12) -> Any:
    """Foreign JSON as any encoder takes it: no number that is not finite, no half surrogates, not nested without end."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {encodable(str(k)): plain(v, depth - 1) for k, v in value.items()} if depth else None
    if isinstance(value, list):
        return [plain(v, depth - 1) for v in value] if depth else None
    return value
