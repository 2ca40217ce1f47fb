"""Where scoring processes come from and end: the warden and the zygote.

    driver ── keeper ── warden ── zygote ── workers ── whatever user code starts

The **warden** never runs user code, so it cannot hang. It adopts orphans, kills process trees when the driver asks or
when one outgrows its memory, and ends everything as soon as the driver is gone, however the driver ended. The
**zygote** imports the reward function once and forks workers from there: a replacement costs milliseconds, not an
import. If importing started threads, forking would be unsafe; the zygote then starts fresh interpreters instead.
The **keeper** does nothing but end what is left should the warden be killed; should the keeper be killed (Ray kills the
children of an actor that ends), the warden does the same.
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
import time
import traceback
from collections.abc import Callable
from typing import Any

from quadriga.rewards import functions
from quadriga.rewards.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_children,
    kill_trees,
    parents,
    python_command,
    resident_bytes,
)
from quadriga.rewards.wire import Board
from quadriga.rewards.worker import serve, settle_in

_TICK_S = 0.1
_SWEEP_S = 0.5
_MESSAGE_BYTES = 1 << 16
_MAX_TRACEBACK = 16_384


def _send(control: socket.socket, **message: Any) -> None:
    control.send(json.dumps(message).encode())


def warden_main(*words: str) -> None:
    """The keeper, which starts the warden and the zygote.

    Words: descriptors of the warden's socket, the zygote's socket, the board and the setup; the driver's pid.
    """
    control_fd, zygote_fd, board_fd, setup_fd, driver = map(int, words)
    with os.fdopen(setup_fd, "rb") as file:
        setup = pickle.load(file)
    adopt_orphans()
    if (warden := os.fork()) != 0:
        os.close(control_fd)
        os.close(zygote_fd)
        os.waitpid(warden, 0)
        end_children()
        return
    adopt_orphans()
    control = socket.socket(fileno=control_fd)
    warden, keeper = os.getpid(), os.getppid()
    zygote = os.fork()
    if zygote == 0:
        control.close()
        die_with_parent(warden)
        Zygote(socket.socket(fileno=zygote_fd), Board(setup["slots"], board_fd), setup).run()
        os._exit(0)
    os.close(zygote_fd)
    Warden(control, zygote, keeper, driver, Board(setup["slots"], board_fd), setup).run()


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # collections in the workers then leave these pages shared


class Warden:
    def __init__(
        self, control: socket.socket, zygote: int, keeper: int, driver: int, board: Board, setup: dict[str, Any]
    ) -> None:
        self._control, self._zygote, self._keeper, self._board = control, zygote, keeper, board
        self._driver_fd = _pidfd(driver)  # readable when the driver has ended, whoever else holds its sockets
        limit = setup["memory_limit_mb"]
        self._memory_bytes = limit * 1024 * 1024 if limit is not None else None
        self._log_bytes = setup["log_bytes"]

    def run(self) -> None:
        pids: list[int] = []
        sweep_at = 0.0
        while self._driver_fd is not None and os.getppid() == self._keeper:
            control = self._control.fileno()
            ready = select.select([control, self._driver_fd], [], [], _TICK_S)[0]
            if self._driver_fd in ready:
                break
            if control in ready:
                message = self._control.recv(_MESSAGE_BYTES)
                if not message:
                    break
                self._kill(json.loads(message)["kill"])
                sweep_at = 0.0
            exited, status = os.waitpid(self._zygote, os.WNOHANG)
            if exited:
                with contextlib.suppress(OSError):
                    _send(self._control, zygote_ended=os.waitstatus_to_exitcode(status))
                break
            now, before, pids = time.monotonic(), pids, self._board.pids()
            if now >= sweep_at or before != pids:
                end_children(keep=frozenset([self._zygote]))  # left behind by workers that have ended
                self._check_trees(pids)
                # Looking at every process takes long where there are thousands: spend at most a twentieth of the time.
                sweep_at = now + max(_SWEEP_S, 20 * (time.monotonic() - now))
            else:
                self._check_memory({pid: [pid] for pid in pids})
            self._cap_log()
        end_children(patience_s=2.0)

    def _kill(self, pids: list[int]) -> None:
        table = parents()
        kill_trees([pid for pid in pids if table.get(pid) == self._zygote])

    def _check_trees(self, pids: list[int]) -> None:
        if self._memory_bytes is not None and pids:
            table = parents()
            self._check_memory({pid: [pid, *descendants([pid], table)] for pid in pids})

    def _check_memory(self, trees: dict[int, list[int]]) -> None:
        if self._memory_bytes is None:
            return
        for pid, members in trees.items():
            used = sum(resident_bytes(member) for member in members)
            if used > self._memory_bytes:
                with contextlib.suppress(OSError):
                    _send(self._control, over_memory=pid, used_mb=used >> 20)
                self._kill([pid])

    def _cap_log(self) -> None:
        if os.fstat(1).st_size > self._log_bytes:
            os.ftruncate(1, 0)
            os.write(1, b"[the log had reached its limit; what stood here was dropped]\n")


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


class Zygote:
    def __init__(self, control: socket.socket, board: Board, setup: dict[str, Any]) -> None:
        self._control, self._board, self._setup = control, board, setup
        self._function = functions.RewardFunction(**setup["function"])
        self._selector = selectors.DefaultSelector()
        self._started: dict[int, subprocess.Popen[bytes]] = {}  # kept so that subprocess does not reap them

    def run(self) -> None:
        try:
            call = functions.load(self._function)
        except BaseException:  # user code: SystemExit and the like are failures to import too
            _send(self._control, import_failed=traceback.format_exc()[-_MAX_TRACEBACK:])
            os._exit(1)
        _send(self._control, ready=True)
        _freeze()
        self._selector.register(self._control, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._bury(key.fd, *key.data)
                elif not self._obey(call):
                    return

    def _obey(self, call: Callable[..., Any]) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        if not message:
            return False
        order = json.loads(message)
        for module in order.get("preload", ()):
            with contextlib.suppress(Exception):  # a worker meets the same failure and reports it with the sample
                getattr(importlib.import_module(module), "warm_up", lambda: None)()
        if order.get("preload"):
            _freeze()
        if "spawn" in order:
            self._spawn(order["spawn"], order["slot"], fds[0], call)
        return True

    def _spawn(self, worker: int, slot: int, fd: int, call: Callable[..., Any]) -> None:
        pid = self._fork(slot, fd, call) if len(os.listdir("/proc/self/task")) == 1 else self._exec(slot, fd)
        os.close(fd)
        self._board.set_pid(slot, pid)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (worker, slot, pid))
        _send(self._control, spawned=worker, pid=pid)

    def _fork(self, slot: int, fd: int, call: Callable[..., Any]) -> int:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                for key in list(self._selector.get_map().values()):
                    os.close(key.fd)
                self._selector.close()
                settle_in(zygote, self._setup["memory_limit_mb"])
                serve(socket.socket(fileno=fd), self._board, slot, call, self._function.batched)
            except BaseException:
                traceback.print_exc()
            finally:  # the child must never return into the zygote's loop
                os._exit(1)
        return pid

    def _exec(self, slot: int, fd: int) -> int:
        setup_fd = os.memfd_create("quadriga-reward-setup", 0)
        os.write(setup_fd, pickle.dumps(self._setup))
        os.lseek(setup_fd, 0, os.SEEK_SET)
        process = subprocess.Popen(
            python_command("quadriga.rewards.nursery:worker_main", fd, slot, self._board.fd, setup_fd, os.getpid()),
            pass_fds=(fd, self._board.fd, setup_fd),
        )
        os.close(setup_fd)
        self._started[process.pid] = process
        return process.pid

    def _bury(self, pidfd: int, worker: int, slot: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        process = self._started.pop(pid, None)
        code = process.wait() if process else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._board.forget_pid(slot, pid)
        _send(self._control, exited=worker, code=code)


def worker_main(*words: str) -> None:
    """A worker in a fresh interpreter, for reward functions whose import starts threads."""
    fd, slot, board_fd, setup_fd, parent = map(int, words)
    with os.fdopen(setup_fd, "rb") as file:
        setup = pickle.load(file)
    settle_in(parent, setup["memory_limit_mb"])
    function = functions.RewardFunction(**setup["function"])
    call = functions.load(function)
    serve(socket.socket(fileno=fd), Board(setup["slots"], board_fd), slot, call, function.batched)
