"""Write a checkpoint in a process that dies on the way. Importable by child processes.

A point is the moment before or after a call into the operating system that the writing path makes: open, write, fsync,
rename, mkdir, unlink, close, lock, …, in whatever thread. Nothing in the package knows of this.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quadriga.checkpoint import CheckpointStore

_MODULES = {"posix", "io", "_io", "fcntl", "safetensors", "safetensors._safetensors_rust"}


def write_files(folder: Path, step: int, keep: int | None, size: int = 2000) -> None:
    """A checkpoint of plain files, with contents that depend on the step."""
    with CheckpointStore(folder, keep).writing(step, need_bytes=0) as draft:
        for role in ("actor", "critic"):
            for number in range(2):
                content = random.Random(f"{role} {number} {step}").randbytes(size)
                (draft.folder(role) / f"part_{number}").write_bytes(content)
        draft.write_state({"step": step})


def write_engine(folder: Path, step: int, keep: int | None) -> None:
    """A checkpoint of a real engine that has done `step` optimiser steps."""
    from tiny_engine import make_engine, train

    from quadriga.checkpoint.shards import save_engine

    engine = make_engine()
    train(engine, step)
    with CheckpointStore(folder, keep).writing(step, need_bytes=0) as draft:
        save_engine(engine, draft.folder("actor"))
        draft.write_state({"step": step})


def write_in_background(folder: Path, step: int, keep: int | None) -> None:
    """The same, as a run does it: copied, written by a thread of the worker, committed by one of the driver."""
    from tiny_engine import make_engine, train

    from quadriga.checkpoint.disk import BackgroundWrite
    from quadriga.checkpoint.shards import copy_engine
    from quadriga.trainer.ppo.saver import Saver

    engine = make_engine()
    train(engine, step)

    class Crew:
        def copy_state(self) -> int:
            self.part = copy_engine(engine)
            return 0

        def begin_writing(self, draft: Any) -> None:
            actor = draft.folder("actor")
            self.writer = BackgroundWrite(lambda: self.part.write(actor))

        def written(self) -> list[Any]:
            return [self.writer.state()]

    saver = Saver(CheckpointStore(folder, keep), Crew(), timeout_s=60)
    saver.start(step, {"step": step})
    saver.step_recorded()
    train(engine, 1, first_seed=step)  # the engine's weights move on under the writer's feet
    saver.finish()


def die_at(point: int, write: Callable[..., None], *arguments: Any) -> None:
    """Run `write`; SIGKILL at the given point. A point past the end lets it finish."""
    _count_points(point)
    write(*arguments)
    sys.setprofile(None)


def count_points(file: Path, write: Callable[..., None], *arguments: Any) -> None:
    """Run `write` to its end and put the number of its points into `file`."""
    counted = _count_points(None)
    write(*arguments)
    sys.setprofile(None)
    file.write_text(str(counted[0]))


def _count_points(fatal: int | None) -> list[int]:
    counted = [0]
    lock = threading.Lock()

    def watch(frame: Any, event: str, function: Any) -> None:
        if event not in ("c_call", "c_return", "c_exception"):
            return
        owner = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if owner in _MODULES:
            with lock:
                counted[0] += 1
                if counted[0] == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(watch)
    sys.setprofile(watch)
    return counted
