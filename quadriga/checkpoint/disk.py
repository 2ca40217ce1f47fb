"""What the file system is asked for: durable files and folders, exclusive folders, room, and writing while training goes on."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quadriga.checkpoint.manifest import in_threads
from quadriga.errors import CheckpointError, QuadrigaError

_ROOM_FOR_SMALL_FILES = 1 << 20
_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR}
)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's list of names, will survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; their servers keep the order of renames themselves.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` of every file in `folder`, then of every folder from the inside out, then of `folder` itself."""
    inside = list(folder.rglob("*"))
    in_threads(sync, [path for path in inside if path.is_file()])
    for path in sorted((path for path in inside if path.is_dir()), key=lambda p: -len(p.parts)):
        sync(path)
    sync(folder)


def require_room(folder: Path, need: int) -> None:
    """CheckpointError where the file system of `folder` has fewer than `need` bytes left."""
    need += _ROOM_FOR_SMALL_FILES
    have = shutil.disk_usage(folder).free
    if have < need:
        raise CheckpointError(
            f"{folder} has {readable_size(have)} left, a checkpoint needs {readable_size(need)}",
            "free some space, lower trainer.max_actor_ckpt_to_keep, or set trainer.default_local_dir to a larger disk",
        )


@contextmanager
def readable_disk_errors(what: str, folder: Path) -> Iterator[None]:
    """A full, read-only, foreign or failing disk becomes a CheckpointError that says what was being done."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise CheckpointError(
            f"Cannot {what} {folder}: {error.strerror or error}",
            "free some space there, check its owner and permissions, or set trainer.default_local_dir to another disk",
        ) from error


def lock_folder(folder: Path) -> int:
    """Mark `folder` as this process's own until the returned descriptor is closed, or the process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise
        # No locks on this file system: the run's own lock keeps other writers away.
    return descriptor


def is_abandoned(folder: Path) -> bool:
    """Whether no living process has locked `folder`."""
    try:
        os.close(lock_folder(folder))
    except OSError:
        return False
    return True


def readable_size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass(frozen=True)
class WriteState:
    """How far a part is. `problem` says why it will never be written."""

    done: bool
    problem: str = ""


class BackgroundWrite:
    """Runs `write` in a thread. It ends with the process: a draft that nobody commits is no checkpoint."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def state(self) -> WriteState:
        """Where it stands; safe to ask from any thread."""
        done = not self._thread.is_alive()
        return WriteState(done, self._problem)

    def _run(self) -> None:
        try:
            self._write()
        except QuadrigaError as error:
            self._problem = str(error)
        except Exception as error:  # whatever it is, it must reach the driver instead of dying with this thread
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            give_back_free_memory()


def give_back_free_memory() -> None:
    """Let the C library return to the machine what is free.

    It keeps the room of the copies otherwise, in pieces between what lives, and finds no use for all of them: a process that
    writes many checkpoints would grow by some megabytes. Takes milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)
