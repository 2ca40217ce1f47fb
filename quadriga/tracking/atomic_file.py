"""Files that are whole or absent, whenever the process or the machine dies."""

from __future__ import annotations

import os
import threading
from pathlib import Path


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
