"""Where processes that run user code come from and end: the keeper and the zygote. Scoring has a nursery, and agents have one.

    driver ── keeper ── zygote ── workers ── whatever user code starts

The **keeper** never runs user code, so it cannot hang. It adopts orphans, kills process trees when the driver asks or when
one outgrows its memory, and ends everything as soon as the driver or the zygote is gone, however it ended. The **zygote**
imports the user's code once and forks workers from there: a replacement costs milliseconds, not an import. If
importing started threads, forking would be unsafe; the zygote then starts fresh interpreters instead. Should the keeper
be killed (Ray kills the children of an actor that ends), the zygote ends the workers with all below them.

If either dies while the driver lives, the driver opens another nursery.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import selectors
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

from quadriga.errors import ConfigError, QuadrigaError, RewardError
from quadriga.rewards import functions
from quadriga.rewards.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_children,
    kill_trees,
    outlive_parent,
    parents,
    python_command,
    resident_bytes,
)
from quadriga.rewards.worker import MAX_TRACEBACK, Worker, settle_in

_TICK_S = 0.1
_SWEEP_S = 0.5
_LOG_BYTES = 4 << 20
_LOG_TAIL_BYTES = 2048
_MESSAGE_BYTES = 1 << 16
# One thread per scoring process: they are many already, and only a process without threads can be forked safely.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Job(Protocol):
    """What a nursery's processes are for. It is pickled on its way to them."""

    @property
    def memory_limit_mb(self) -> int | None:
        """Of one worker, children included."""

    @property
    def what(self) -> str:
        """The user's code that it runs, for messages."""

    def problem(self, what: str, fix: str) -> QuadrigaError: ...

    def load(self) -> Any:
        """Import that code; in the zygote, or in a fresh interpreter."""

    def needed_columns(self, loaded: Any) -> list[str]: ...

    def serve(self, channel: socket.socket, loaded: Any) -> None:
        """A worker's whole life."""


@dataclass(frozen=True)
class ScoringJob:
    """Calls of a reward function."""

    function: functions.RewardFunction
    memory_limit_mb: int | None
    timeout_s: float

    @property
    def what(self) -> str:
        return f"the reward function {self.function.target}"

    def problem(self, what: str, fix: str) -> QuadrigaError:
        return RewardError(what, fix)

    def load(self) -> Any:
        return functions.load(self.function)

    def needed_columns(self, loaded: Any) -> list[str]:
        return getattr(loaded, "needed_columns", [])

    def serve(self, channel: socket.socket, loaded: Any) -> None:
        Worker(channel, loaded, self.function.batched, self.timeout_s).serve()


class Nursery:
    """Keeper and zygote as the driver sees them. The constructor returns when the user's code is imported.

    Args:
        start_timeout_s: how long importing it may take.
        log: where output of user code goes; kept to a few MB.
    """

    def __init__(self, job: Job, start_timeout_s: float, log: IO[bytes]) -> None:
        self._job, self._log = job, log
        self.keeper, keeper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.zygote, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _as_file(job) as setup_file, keeper_end, zygote_end:
            fds = [keeper_end.fileno(), zygote_end.fileno(), setup_file.fileno()]
            self._process = subprocess.Popen(
                python_command(f"{__name__}:keeper_main", *fds, os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
        try:
            self._wait_until_ready(start_timeout_s)
        except QuadrigaError:
            self.close()
            raise
        self.keeper.setblocking(False)

    def _wait_until_ready(self, timeout_s: float) -> None:
        if not select.select([self.zygote], [], [], timeout_s)[0]:
            raise self._job.problem(
                f"importing {self._job.what} took longer than {timeout_s:g} s\n{self.log_tail()}",
                "do less at import, or raise start_timeout_s",
            )
        first = self.zygote.recv(_MESSAGE_BYTES)
        message = json.loads(first) if first else {}
        if "misfit" in message:
            raise self._job.problem(*message["misfit"])
        if not message.get("ready"):
            text = message.get("import_failed") or f"the importing process died\n{self.log_tail()}"
            raise self._job.problem(
                f"{self._job.what} cannot be imported:\n{text}", "mend the module, or check its path and name"
            )
        self.needed_columns: list[str] = message["needed_columns"]

    def spawn(self, worker: int, fd: int, preload: list[str]) -> None:
        with contextlib.suppress(OSError):  # a zygote that is gone is seen at its socket
            socket.send_fds(self.zygote, [json.dumps({"spawn": worker, "preload": preload}).encode()], [fd])

    def kill(self, pids: list[int]) -> bool:
        """Have the keeper kill these workers with all below them; False when it cannot take the order just now."""
        try:
            self.keeper.send(json.dumps(pids).encode())
        except BlockingIOError:
            return False
        except OSError:  # it is gone, which is seen at its socket
            return True
        return True

    @staticmethod
    def messages(control: socket.socket) -> Iterator[dict[str, Any]]:
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

    def lost(self, why: str) -> QuadrigaError:
        return self._job.problem(
            f"the processes that run {self._job.what} ended by themselves ({why}); "
            f"the end of their log:\n{self.log_tail()}",
            "look for a crash in that module, or for the kernel's out-of-memory killer",
        )

    def log_tail(self) -> str:
        """The last lines that user code printed."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        return tail.decode(errors="replace").strip()

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        self.keeper.close()
        self.zygote.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _as_file(job: Job) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the caller)
    file.write(pickle.dumps(job))
    file.seek(0)
    return file


def _from_file(fd: int) -> Job:
    with os.fdopen(fd, "rb") as file:
        return pickle.load(file)


def _send(control: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # the driver is gone: that is acted upon elsewhere
        control.send(json.dumps(message).encode())


def keeper_main(*words: str) -> None:
    """Words: descriptors of the keeper's socket, the zygote's socket and the job; the driver's pid."""
    control_fd, zygote_fd, job_fd, driver = map(int, words)
    job = _from_file(job_fd)
    adopt_orphans()
    keeper, control = os.getpid(), socket.socket(fileno=control_fd)
    zygote = os.fork()
    if zygote == 0:
        control.close()
        Zygote(socket.socket(fileno=zygote_fd), keeper, job).run()
        os._exit(0)
    os.close(zygote_fd)
    with contextlib.suppress(ProcessLookupError):  # a driver that is gone already
        Keeper(control, zygote, os.pidfd_open(driver), job.memory_limit_mb).run()
    end_children(patience_s=2.0)


class Keeper:
    """See the module. `driver_fd` is readable when the driver has ended, whoever else holds its sockets."""

    def __init__(self, control: socket.socket, zygote: int, driver_fd: int, memory_limit_mb: int | None) -> None:
        self._control, self._zygote, self._driver_fd = control, zygote, driver_fd
        self._memory_bytes = None if memory_limit_mb is None else memory_limit_mb << 20

    def run(self) -> None:
        workers: list[int] = []
        sweep_at = 0.0
        while True:
            ready = select.select([self._control.fileno(), self._driver_fd], [], [], _TICK_S)[0]
            if self._driver_fd in ready:
                return
            if ready:
                if not (message := self._control.recv(_MESSAGE_BYTES)):
                    return
                self._kill(json.loads(message))
                sweep_at = 0.0
            ended, status = os.waitpid(self._zygote, os.WNOHANG)
            if ended:
                _send(self._control, zygote_ended=os.waitstatus_to_exitcode(status))
                return
            now = time.monotonic()
            if now >= sweep_at:
                end_children(keep=frozenset([self._zygote]))  # left behind by workers that have ended
                table = parents()
                workers = [pid for pid, parent in table.items() if parent == self._zygote]
                self._check_memory({pid: [pid, *descendants([pid], table)] for pid in workers})
                # Looking at every process takes long where there are thousands: spend at most a twentieth of the time.
                sweep_at = now + max(_SWEEP_S, 20 * (time.monotonic() - now))
            else:
                self._check_memory({pid: [pid] for pid in workers})
            if os.fstat(1).st_size > _LOG_BYTES:
                os.ftruncate(1, 0)
                os.write(1, b"[the log had reached its limit; what stood here was dropped]\n")

    def _kill(self, pids: list[int]) -> None:
        table = parents()
        kill_trees([pid for pid in pids if table.get(pid) == self._zygote])

    def _check_memory(self, trees: dict[int, list[int]]) -> None:
        for pid, members in trees.items() if self._memory_bytes is not None else ():
            used = sum(resident_bytes(member) for member in members)
            if used > (self._memory_bytes or 0):
                _send(self._control, over_memory=pid, used_mb=used >> 20)
                self._kill([pid])


class Zygote:
    """See the module. Orders come from the driver; every worker's end is told to it with the exit code."""

    def __init__(self, control: socket.socket, keeper: int, job: Job) -> None:
        self._control, self._keeper, self._job = control, keeper, job
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, subprocess.Popen[bytes] | None] = {}  # by pid; a Popen reaps its process itself

    def run(self) -> None:
        die_with_parent(self._keeper)  # an import may hang
        try:
            loaded = self._job.load()
        except ConfigError as problem:
            _send(self._control, misfit=[problem.what, problem.fix])
            os._exit(1)
        except BaseException:  # user code: SystemExit and the like are failures to import too
            _send(self._control, import_failed=traceback.format_exc()[-MAX_TRACEBACK:])
            os._exit(1)
        outlive_parent()
        _send(self._control, ready=True, needed_columns=self._job.needed_columns(loaded))
        _freeze()
        self._selector.register(self._control, selectors.EVENT_READ, lambda _: self._obey(loaded))
        self._selector.register(os.pidfd_open(self._keeper), selectors.EVENT_READ, lambda _: self._end())
        while True:
            for key, _ in self._selector.select():
                key.data(key.fd)

    def _end(self) -> None:
        kill_trees(self._workers)
        os._exit(0)

    def _obey(self, loaded: Any) -> None:
        message, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        if not message:
            self._end()
        order = json.loads(message)
        for module in order["preload"]:
            with contextlib.suppress(Exception):  # a worker meets the same failure and reports it with the sample
                getattr(importlib.import_module(module), "warm_up", lambda: None)()
        if order["preload"]:
            _freeze()
        self._spawn(order["spawn"], fds[0], loaded)

    def _spawn(self, worker: int, fd: int, loaded: Any) -> None:
        pid = self._fork(fd, loaded) if len(os.listdir("/proc/self/task")) == 1 else self._exec(fd)
        os.close(fd)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, lambda pidfd: self._bury(pidfd, worker, pid))
        _send(self._control, spawned=worker, pid=pid)

    def _fork(self, fd: int, loaded: Any) -> int:
        zygote = os.getpid()
        if (pid := os.fork()) != 0:
            self._workers[pid] = None
            return pid
        try:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            settle_in(zygote, self._job.memory_limit_mb)
            self._job.serve(socket.socket(fileno=fd), loaded)
        except BaseException:
            traceback.print_exc()
        finally:  # the child must never return into the zygote's loop
            os._exit(1)

    def _exec(self, fd: int) -> int:
        with _as_file(self._job) as file:
            process = subprocess.Popen(
                python_command(f"{__name__}:worker_main", fd, file.fileno(), os.getpid()), pass_fds=(fd, file.fileno())
            )
        self._workers[process.pid] = process
        return process.pid

    def _bury(self, pidfd: int, worker: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        process = self._workers.pop(pid)
        code = process.wait() if process else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _send(self._control, exited=worker, code=code)


def worker_main(*words: str) -> None:
    """A worker in a fresh interpreter, for code whose import starts threads."""
    fd, job_fd, zygote = map(int, words)
    job = _from_file(job_fd)
    settle_in(zygote, job.memory_limit_mb)
    job.serve(socket.socket(fileno=fd), job.load())


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # collections in the workers then leave these pages shared
