"""One run at a time in a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from quadriga.errors import ConfigError


class RunLock:
    """A lock on a file, held until it was released as often as taken, or the end of the process, however that comes.

    It is a POSIX record lock: children do not inherit it, so a stray one cannot keep the directory locked. The same
    process may take it twice. On a file system without locks there is no protection, and no error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._holders = 0

    def acquire(self, wait_s: float = 10.0) -> None:
        """Take the lock; wait a little, because the process of a run that was just stopped may still be ending.

        Raises:
            ConfigError: another process holds it; says which.
        """
        self._holders += 1
        if self._descriptor is not None:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    break  # no locks on this file system
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                    os.close(descriptor)
                    self._holders -= 1
                    raise ConfigError(
                        f"The run directory {self.path.parent} is in use by {holder}.",
                        "stop that run, or give this one its own trainer.experiment_name or trainer.default_local_dir",
                    ) from None
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; the file stays."""
        self._holders = max(self._holders - 1, 0)
        if self._descriptor is not None and self._holders == 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
