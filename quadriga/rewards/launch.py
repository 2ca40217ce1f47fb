"""Starting the nursery (warden and zygote) from the driver, and talking to it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from quadriga.errors import RewardError
from quadriga.rewards.functions import RewardFunction
from quadriga.rewards.processes import python_command
from quadriga.rewards.wire import Board

_LOG_BYTES = 4 << 20
_TAIL_BYTES = 2048
_MESSAGE_BYTES = 1 << 16
# One thread per scoring process: they are many already, and only a process without threads can be forked safely.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Nursery:
    """The warden and the zygote as the driver sees them. The constructor returns when the reward function is imported.

    Args:
        slots: most workers that may exist at a time.
        start_timeout_s: how long importing the function may take.
        log_file: where output of user code goes (kept to a few MB); a temporary file when not given.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        slots: int,
        memory_limit_mb: int | None,
        start_timeout_s: float,
        log_file: str | None = None,
    ) -> None:
        self._function = function
        self._log: IO[bytes] = open(log_file, "ab+") if log_file else tempfile.TemporaryFile()  # noqa: SIM115
        self.board = Board(slots)
        self.warden, warden_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.zygote, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = {
            "function": function.as_dict(),
            "slots": slots,
            "memory_limit_mb": memory_limit_mb,
            "log_bytes": _LOG_BYTES,
        }
        with tempfile.TemporaryFile() as setup_file, warden_end, zygote_end:
            setup_file.write(pickle.dumps(setup))
            setup_file.seek(0)
            fds = [warden_end.fileno(), zygote_end.fileno(), self.board.fd, setup_file.fileno()]
            self._process = subprocess.Popen(
                python_command("quadriga.rewards.nursery:warden_main", *fds, os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=fds,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
        self._wait_until_ready(start_timeout_s)
        self.warden.setblocking(False)

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not select.select([self.zygote], [], [], max(0.0, deadline - time.monotonic()))[0]:
            tail = self.log_tail()
            self.close()
            raise RewardError(
                f"importing the reward function {self._function.target} took longer than {timeout_s:g} s\n{tail}",
                "do less at import, or raise start_timeout_s",
            )
        first = self.zygote.recv(_MESSAGE_BYTES)
        message = json.loads(first) if first else {}
        if not message.get("ready"):
            text = message.get("import_failed") or f"the importing process died\n{self.log_tail()}"
            self.close()
            raise RewardError(
                f"the reward function {self._function.target} cannot be imported:\n{text}",
                "mend the module, or check custom_reward_function.path and name",
            )

    def spawn(self, worker: int, slot: int, fd: int, preload: list[str]) -> None:
        order = {"spawn": worker, "slot": slot, "preload": preload}
        with contextlib.suppress(OSError):  # a zygote that is gone is reported by the warden
            socket.send_fds(self.zygote, [json.dumps(order).encode()], [fd])

    def kill(self, pids: list[int]) -> bool:
        """Have the warden kill these workers with all below them; False when it cannot take the order just now."""
        try:
            self.warden.send(json.dumps({"kill": pids}).encode())
        except BlockingIOError:
            return False
        except OSError:  # it is gone, which its end of the socket tells
            return True
        return True

    def messages(self, control: socket.socket) -> Iterator[dict[str, Any]]:
        """What has been said so far, without waiting; `gone` when the other end has closed."""
        while True:
            try:
                message = control.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                yield {"gone": True}
                return
            yield json.loads(message)

    def lost(self, message: dict[str, Any]) -> RewardError:
        return RewardError(
            f"the processes that score with {self._function.target} ended by themselves ({message}); "
            f"the end of their log:\n{self.log_tail()}",
            "look for a crash in the reward function's module, or for the kernel's out-of-memory killer",
        )

    def log_tail(self) -> str:
        """The last lines that user code printed."""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        self.warden.close()
        self.zygote.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.board.close()
        self._log.close()
