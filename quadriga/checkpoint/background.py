"""A rank's part of a checkpoint: copied to host memory at once, written by a thread while training goes on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

from quadriga.errors import QuadrigaError


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
