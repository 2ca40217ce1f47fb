"""What the reward pool needs from the operating system (Linux): process trees, their memory, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def python_command(target: str, *words: object) -> list[str]:
    """Command line of a fresh interpreter that sees this one's modules and calls `package.module:function(*words)`."""
    module, _, function = target.partition(":")
    boot = (
        "import sys, json, importlib; sys.path[:] = json.loads(sys.argv[1]); "
        f"importlib.import_module({module!r}).{function}(*sys.argv[2:])"
    )
    path = [os.path.abspath(entry) for entry in sys.path]  # "" stands for the current folder
    return [sys.executable, "-c", boot, json.dumps(path), *map(str, words)]


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as its parent ends; exit now when that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """The contrary of `die_with_parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can leave this process's tree."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def parents() -> dict[int, int]:
    """pid -> parent pid of every process on the machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The command name is in parentheses and may hold anything; the parent is the second field after it.
                found[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    return found


def descendants(roots: Iterable[int], table: dict[int, int] | None = None) -> list[int]:
    """All processes below `roots`, without these; `table` is what `parents` returned a moment ago."""
    children: dict[int, list[int]] = {}
    for child, parent in (parents() if table is None else table).items():
        children.setdefault(parent, []).append(child)
    below, todo = [], list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            below.append(child)
            todo.append(child)
    return below


def has_children() -> bool:
    """Whether this process has children, running or not; one system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def cpu_and_state(pid: int) -> tuple[float, str]:
    """CPU seconds used so far, and the state letter of proc(5): R is running or ready to, S waits for something."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0, "X"
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, fields[0].decode()


def lower_priority(leader: int, nice: int = 10) -> bool:
    """Have the session of `leader` yield to others; False when that must be tried again.

    Many machines schedule by session first ("autogroup"), and niceness only counts inside one; there the session's own
    niceness is set as well, which the kernel accepts a few times a second.
    """
    try:
        os.setpriority(os.PRIO_PGRP, leader, nice)
        if os.path.exists(f"/proc/{leader}/autogroup"):
            with open(f"/proc/{leader}/autogroup", "w") as group:
                group.write(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # it has ended, or this is not allowed here
        return True
    return True


def kill_trees(roots: Iterable[int]) -> None:
    """SIGKILL processes and everything below them.

    All are stopped first, again and again until no new one shows up: a stopped process cannot fork, so nothing
    slips away between looking and killing.
    """
    seen = set(roots)
    for pid in seen:
        _send(pid, signal.SIGSTOP)
    while new := set(descendants(seen)) - seen:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        seen |= new
    for pid in seen:
        _send(pid, signal.SIGKILL)


def end_children(keep: frozenset[int] = frozenset(), patience_s: float = 1.0) -> None:
    """Kill and reap the children of this process, and all below them, except those in `keep`.

    Returns when none is left that has not been killed, and waits at most `patience_s` for those that have: one in
    uninterruptible sleep ends when the kernel lets it.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience_s
    while True:
        mine = {child for child, parent in parents().items() if parent == os.getpid()} - keep
        new = mine - killed
        if not new and (not mine or time.monotonic() > deadline):
            return
        kill_trees(new)
        killed |= new
        for child in mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
