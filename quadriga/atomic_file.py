"""Files that are whole or absent, whenever the process or the machine dies."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quadriga.errors import QuadrigaError


@contextmanager
def named_disk_errors(path: Path) -> Iterator[None]:
    """A disk that is full, or fails, becomes a QuadrigaError that says which file could not be written."""
    try:
        yield
    except OSError as error:
        raise QuadrigaError(f"Cannot write to {path}: {error.strerror}.", "free some space and resume") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: a reader sees the old file or the new one, never a part, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
