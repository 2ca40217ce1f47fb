"""What a process of a run prints, kept in the run directory: what Python and native code say, and the last words of a crash.

Standard output and error become the file itself, so nothing is lost with the process. A thread copies what is added to where
the output went before; for Ray's workers that is the terminal that started the run.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.tracking.run_directory import RunDirectory
from quadriga.tracking.steady_output import SteadyStream

COPY_EVERY_S = 0.2
CHUNK = 1 << 16

_file: Path | None = None
"""Where this process's output goes already."""


def keep_output(run_directory: str | os.PathLike[str], role: str, rank: int) -> None:
    """From here on this process's output goes to `logs/<role>_<rank>.log` too, after what an earlier one wrote there.

    A process with several roles has one file; the other roles' names lead there. Where the file cannot be written, the output
    stays where it is.
    """
    global _file
    with suppress(OSError, ConfigError):
        file = RunDirectory(run_directory).log_file(role, rank)
        if _file is None:
            _redirect(file, f"{role} rank {rank}")
            _file = file
        elif file != _file:
            _link(file, _file)


def _redirect(file: Path, who: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        place = f"pid {os.getpid()} on {socket.gethostname()}"
        os.write(descriptor, f"---- {time.strftime('%Y-%m-%d %H:%M:%S')} {who}, {place}\n".encode())
        reader = os.open(file, os.O_RDONLY)
        os.lseek(reader, 0, os.SEEK_END)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        before = os.dup(1)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    finally:
        os.close(descriptor)
    sys.stdout, sys.stderr = SteadyStream(sys.stdout, "stdout"), SteadyStream(sys.stderr, "stderr")
    threading.Thread(target=_copy, args=(reader, before), name="process-log", daemon=True).start()


def _copy(reader: int, before: int) -> None:
    """Until the process ends, or nobody reads any more."""
    with suppress(OSError):
        while True:
            while chunk := os.read(reader, CHUNK):
                os.write(before, chunk)
            time.sleep(COPY_EVERY_S)


def _link(file: Path, target: Path) -> None:
    if file.is_symlink() or not file.exists():
        file.unlink(missing_ok=True)
        file.symlink_to(target.name)
