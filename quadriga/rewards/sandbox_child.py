"""The inside of the sandbox: a script of its own, run by `sandbox.py` in a fresh interpreter. Standard library only.

It reads a job, shuts itself in (see `sandbox.py` for what that covers), runs the code and writes one line of JSON.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

_CAPABILITIES_V3, _READ_ANY_FILE = 0x20080522, 0b110  # Landlock says which files
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x40000000
_CLONE_THREAD = 0x10000
_MS_REC, _MS_PRIVATE, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _SYS_MOUNT_SETATTR = (
    0x4000,
    0x40000,
    -100,
    0x8000,
    1,
    442,
)

_libc = ctypes.CDLL(None, use_errno=True)

# Refused system calls by machine. In this order: starting processes, signalling, tracing and reading others; sockets;
# mounting and namespaces; priorities and affinities; System V IPC, message queues and keys; truncating by path.
# A pair of sockets may be made and used, but not connected or addressed to anybody else's: connect, bind, listen, accept,
# messages with addresses; `sendto` with one.
# `of_files`: modes, owners, times and attributes of files, which Landlock leaves open.
_ARCHITECTURES: dict[str, dict] = {
    "x86_64": {
        "audit": 0xC000003E,
        "clone": 56,
        "prlimit64": 302,
        "refused": (
            *(57, 58, 62, 200, 234, 129, 297, 101, 310, 311, 312, 298, 321, 323),
            *(41, 165, 166, 155, 272, 308),
            *(141, 142, 144, 203, 251, 314),
            *(29, 30, 31, 64, 65, 66, 67, 68, 69, 70, 71, 220, 240, 241, 242, 243, 244, 245, 248, 249, 250),
            76,
            *(42, 43, 46, 49, 50, 288, 307),
        ),
        "sendto": 44,
        "fcntl": 72,
        "ioctl": 16,
        "of_files": (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280),
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "clone": 220,
        "prlimit64": 261,
        "refused": (
            *(129, 130, 131, 138, 240, 117, 270, 271, 272, 241, 280, 282),
            *(198, 40, 39, 41, 97, 268),
            *(140, 118, 119, 122, 30, 274),
            *(*range(180, 198), 217, 218, 219),
            45,
            *(200, 201, 202, 203, 211, 242, 269),
        ),
        "sendto": 206,
        "fcntl": 25,
        "ioctl": 29,
        "of_files": (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88),
    },
}
# pidfd_send_signal, io_uring_setup, the mount API, pidfd_open, pidfd_getfd, fchmodat2
_REFUSED_EVERYWHERE = (424, 425, 428, 429, 430, 431, 432, 433, 434, 438, 442, 452)
_CLONE3 = 435
_SIGNAL_ANOTHER = {  # by making it the owner of a file that signals when it is ready
    "fcntl": (8, 10, 15),  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    "ioctl": (0x8901, 0x8902),  # FIOSETOWN, SIOCSPGRP
}

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_READ, _WRITE, _OF_A_FILE = 0b1101, 0b10, 0b100000000000111  # execute, read a file or a folder; write; what a file has
_LIBRARIES = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/localtime",
    "/etc/ld.so.cache",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def limit_resources(job: dict) -> None:
    """CPU seconds, address space, file size and open files; no core dumps."""
    cpu = int(job["cpu_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_AS, (job["memory_mb"] << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_mb"] << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then raises OSError in the code


def own_namespaces(folder: str, file_mb: int) -> bool:
    """No network but an unconfigured loopback, and every file read-only but a small scratch folder; False if forbidden."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWIPC) != 0:
        return False
    with contextlib.suppress(OSError):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return _read_only(folder, file_mb)


def _read_only(folder: str, file_mb: int) -> bool:
    if _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    attributes = struct.pack("4Q", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    if _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes)) != 0:
        return False
    options = f"size={2 * file_mb}m,mode=700".encode()
    if _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options) != 0:
        return False
    os.chdir(folder)
    return True


def confine_files(folder: str) -> bool:
    """Landlock: reading only Python and the system's libraries, writing only the scratch folder; False without Landlock.

    Other files cannot be opened at all, FIFOs and /proc/<pid>/mem among them.
    """
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    if version < 1 or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    everything = (1 << (13 if version < 2 else 14 if version < 3 else 15)) - 1
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, struct.pack("Q", everything), 8, 0)
    if ruleset < 0:
        return False
    readable = {*sys.path, sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *_LIBRARIES}
    rules = [(path, _READ) for path in readable] + [(device, _READ | _WRITE) for device in _DEVICES]
    for path, rights in [*rules, (folder, everything)]:
        with contextlib.suppress(OSError):  # there is no such path here
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & _OF_A_FILE
            if _libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, fd), 0) != 0:
                return False
            os.close(fd)
    return _libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0


def drop_capabilities() -> None:
    """What root may do beyond other users (clocks, limits, modules, restarts) it may no longer do here."""
    header, now = struct.pack("Ii", _CAPABILITIES_V3, 0), ctypes.create_string_buffer(24)
    _libc.capget(header, now)
    effective, permitted, *_ = struct.unpack("6I", now.raw)
    kept = struct.pack("6I", effective & _READ_ANY_FILE, permitted & _READ_ANY_FILE, 0, 0, 0, 0)
    if _libc.capset(header, kept) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def refuse_system_calls(files_are_read_only: bool) -> bool:
    """No new process (threads are fine), no hand on others, no socket, no IPC; False where the kernel does not filter."""
    machine = _ARCHITECTURES.get(platform.machine())
    if machine is None or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    program = _filter(machine, () if files_are_read_only else machine["of_files"])
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return _libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0


def _filter(machine: dict, also: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """A BPF program over (number, architecture, arguments) of a system call."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, machine["audit"]),
        (answer, 0, 0, refuse),  # another calling convention would have other numbers
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (answer, 0, 0, refuse),
        (equal, 0, 1, _CLONE3),
        (answer, 0, 0, unknown),  # the C library then falls back to clone, whose flags can be seen here
    ]
    for number in (*machine["refused"], *_REFUSED_EVERYWHERE, *also):
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    for name, commands in _SIGNAL_ANOTHER.items():
        tests = [step for command in commands for step in ((equal, 0, 1, command), (answer, 0, 0, refuse))]
        program += [(equal, 0, len(tests) + 2, machine[name]), (load, 0, 0, 24), *tests, (answer, 0, 0, allow)]
    program += [
        (equal, 0, 6, machine["sendto"]),
        (load, 0, 0, 48),  # the address, in two halves
        (equal, 0, 2, 0),
        (load, 0, 0, 52),
        (equal, 1, 0, 0),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
        (equal, 0, 4, machine["clone"]),
        (load, 0, 0, 16),
        (any_bit, 1, 0, _CLONE_THREAD),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
        (equal, 0, 3, machine["prlimit64"]),
        (load, 0, 0, 16),
        (equal, 1, 0, 0),  # of this process only
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    ]
    return program


_USUAL_IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, random, re, string
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, floor, gcd, inf, sqrt
from typing import *
"""


_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class _HonestEquality(ast.NodeTransformer):
    """`a == b` in a test: an object of a class that the solution made does not equal plain data, whatever it says."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        call = ast.Call(ast.Name("__equal__", ast.Load()), [node.left, node.comparators[0]], [])
        return ast.copy_location(call, node)


def _equal(left: object, right: object) -> object:
    return _made_here(left) == _made_here(right) and left == right


def _made_here(value: object, depth: int = 0) -> bool:
    kind = type(value)
    own = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind or kind.__module__ == "__main__"
    if own and any("__eq__" in vars(base) for base in kind.__mro__ if base.__flags__ & _DEFINED_IN_PYTHON):
        return True
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return (
        depth < 50 and isinstance(parts, (list, tuple, set, frozenset)) and any(_made_here(v, depth + 1) for v in parts)
    )


def run_tests(job: dict) -> dict:
    """Run the code, then each test in its namespace; a test passes when it raises nothing."""
    space: dict = {"__name__": "__main__"}
    passed, first_error = 0, None
    try:
        exec(compile(job["code"], "<solution>", "exec"), space)
    except BaseException as problem:  # model-written code may raise anything
        return {"passed": 0, "error": _short(problem)}
    for test in job["tests"]:
        try:
            tree = ast.fix_missing_locations(_HonestEquality().visit(ast.parse(test)))
            space["__equal__"] = _equal
            exec(compile(tree, "<test>", "exec"), space)
            passed += 1
        except BaseException as problem:
            first_error = first_error or _short(problem)
    return {"passed": passed, "error": first_error}


def run_calls(job: dict) -> dict:
    """Run the code, then call its function (or a method of its class `Solution`) with each list of arguments."""
    name, arguments = job["calls"]
    space: dict = {"__name__": "__main__"}
    outputs: list = []
    try:
        exec(_USUAL_IMPORTS, space)
        exec(compile(job["code"], "<solution>", "exec"), space)
        function = space[name] if name in space else getattr(space["Solution"](), name)
    except BaseException as problem:
        return {"passed": 0, "error": _short(problem)}
    for given in arguments:
        try:
            outputs.append(
                (True, json.loads(json.dumps(function(*given))))
            )  # plain data: no object that equals everything
        except BaseException as problem:
            outputs.append((False, _short(problem)))
    return {"passed": 0, "error": next((text for worked, text in outputs if not worked), None), "outputs": outputs}


def run_program(job: dict) -> dict:
    """Run the code as a script that talks through stdin and stdout."""
    try:
        exec(compile(job["code"], "<solution>", "exec"), {"__name__": "__main__"})
    except SystemExit as leaving:
        return {"passed": int(not leaving.code), "error": None if not leaving.code else f"SystemExit: {leaving.code}"}
    except BaseException as problem:
        return {"passed": 0, "error": _short(problem)}
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
    return {"passed": 1, "error": None}


def _short(problem: BaseException) -> str:
    try:
        return f"{type(problem).__name__}: {problem}"[:500]
    except Exception:  # its __str__ is model-written too
        return type(problem).__name__


def main() -> None:
    job_fd, result_fd, parent = map(int, sys.argv[1:4])
    with os.fdopen(job_fd) as file:
        job = json.load(file)
    token = job.pop("token")
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    namespaces = own_namespaces(job["folder"], job["file_mb"])
    limit_resources(job)
    confined = confine_files(job["folder"])
    drop_capabilities()
    filtered = refuse_system_calls(files_are_read_only=namespaces)
    sys.argv[1:] = []
    run = run_tests if job["tests"] is not None else run_calls if job["calls"] is not None else run_program
    result = {
        "outputs": [],
        **run(job),
        "token": token,
        "namespaces": namespaces,
        "confined": confined,
        "filtered": filtered,
    }
    os.write(result_fd, json.dumps(result).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
