"""The engine process as its slot sees it: started, asked with a deadline, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

from quadriga import errors
from quadriga.errors import ConfigError, QuadrigaError, ResourceError, WorkerError
from quadriga.rollout.vllm.messages import Failed

OF_THE_SLOT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the trainer's collectives, which are none of the engine's business."""
TAIL = 2000
"""So many characters of what a process has said last go into the message about its end."""


class EngineGone(Exception):
    """The process has ended or does not answer. The text says which, and what it said last."""


class EngineProcess:
    """A process in a session of its own, on a private socket. Nothing of it listens.

    Args:
        shared: file descriptor of the memory with the weights.
        threads: that it may compute with.
    """

    def __init__(self, shared: int, threads: int) -> None:
        ours, theirs = socket.socketpair()
        life_theirs, self._life = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection = Connection(ours.detach())
        handed = (theirs.fileno(), shared, life_theirs)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quadriga.rollout.vllm.core", *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(threads),
            )
        finally:
            theirs.close()
            os.close(life_theirs)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: Any, deadline_s: float) -> Any:
        """The answer to `order`. EngineGone if there is none in time; what it could not do is raised as an error of ours."""
        try:
            self._connection.send(order)
            if not self._connection.poll(deadline_s):
                raise EngineGone(f"did not answer {type(order).__name__.lower()} within {deadline_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise EngineGone(f"ended{self._how()}") from None
        if isinstance(answer, Failed):
            raise as_error(answer)
        return answer

    def close(self) -> None:
        """End it and everything that it started, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._life >= 0:
            self._connection.close()
            os.close(self._life)
            self._life = -1
            self._said.close()

    def last_words(self) -> str:
        if self._said.closed:
            return ""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()

    def _how(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return f" by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f" with exit code {code}"
        return ""


def environment(threads: int) -> dict[str, str]:
    """What the process finds in its environment; a variable of vLLM's that the user has set stays."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_THE_SLOT}
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": str(threads),
    }
    usual = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "",
    }
    return usual | kept | fixed


def as_error(failed: Failed) -> QuadrigaError:
    """What the engine process could not do, as an error that says what to do about it."""
    own = getattr(errors, failed.kind, None)
    if isinstance(own, type) and issubclass(own, QuadrigaError):
        return own(failed.what, failed.fix)
    text = failed.what.strip()
    if "are not supported" in text or "no vLLM implementation" in text:
        return ConfigError(
            f"vLLM cannot run this model: {text}",
            "set actor_rollout_ref.rollout.name=native, which generates with the model's own code",
        )
    if "unexpected keyword argument" in text:
        return ConfigError(
            f"vLLM's engine does not know an argument: {text.split(') ')[-1]}",
            "look at actor_rollout_ref.rollout.engine_kwargs.vllm",
        )
    if failed.kind in ("OutOfMemoryError", "MemoryError") or "memory" in text.lower():
        return ResourceError(
            f"vLLM does not get the memory that it wants: {text}",
            "lower actor_rollout_ref.rollout.gpu_memory_utilization or max_num_seqs, or shorten data.max_response_length",
        )
    return WorkerError(
        f"vLLM's engine failed: {failed.kind}: {text}",
        "see docs/engines.md, or set actor_rollout_ref.rollout.name=native",
    )
