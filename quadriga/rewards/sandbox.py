"""Running model-written Python with limits.

Every run is a fresh interpreter in a session and folder of its own, with an empty environment.

Covered:
  - CPU time, address space, size of a written file, open files, core dumps (resource limits);
  - wall-clock time (the process is killed with all that is left of it);
  - new processes, sockets to others, signals to, tracing and reading of other processes, their priorities and affinities,
    System V IPC, message queues, keys, mounts and new namespaces (refused by a seccomp filter; x86-64 and arm64);
  - what root may do (capabilities are dropped);
  - opening any file but Python's and the system's libraries, and writing any but those of a small scratch folder: other
    people's FIFOs and /proc/<pid>/mem are out of reach (Landlock; Linux 5.13 and newer, where it is switched on);
  - the network and IPC once more, and files once more (namespaces, where an unprivileged user may make them).
`SandboxResult` says which of these worked on this machine; `isolated` is the filter together with Landlock.

Not covered:
  - reading the system's libraries and everything on Python's path; names, sizes and dates of files;
  - code that fools its own tests: it shares the interpreter with them and could find what they expect, or the token of
    the result line. What calls should return, and programs should print, is not in there;
  - bugs of the kernel and of the interpreter, side channels, and the load put on disk and memory bandwidth.
Run untrusted models in a container or virtual machine of their own besides.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from quadriga.rewards.processes import kill_trees

_CHILD = str(Path(__file__).with_name("sandbox_child.py"))


@dataclass(frozen=True)
class Limits:
    """What one run may use: wall-clock and CPU seconds, address space, and the size of a file or of its output."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 16


@dataclass(frozen=True)
class SandboxResult:
    """How a run ended.

    Args:
        status: `done`, `timeout` (wall or CPU), or `died` (a signal, out of memory, or it left without a result).
        passed: tests that passed; for a program, 1 when it ended without an error.
        error: the first exception, if any.
        stdout: of a program.
        outputs: of calls, as far as they were made: `[True, the value]`, or `[False, the exception]`.
        namespaces: files and network were closed off by namespaces.
        confined: files were closed off by Landlock.
        filtered: system calls were filtered.
    """

    status: str
    passed: int = 0
    error: str | None = None
    stdout: str = ""
    outputs: tuple[Any, ...] = ()
    namespaces: bool = False
    confined: bool = False
    filtered: bool = False

    @property
    def isolated(self) -> bool:
        return self.confined and self.filtered


def run(
    code: str,
    tests: list[str] | None = None,
    stdin: str = "",
    limits: Limits | None = None,
    calls: tuple[str, list[list[Any]]] | None = None,
) -> SandboxResult:
    """Run `code`, and then in its namespace each of `tests`, or a function by name with each of some lists of arguments.

    With neither, run it as a program fed with `stdin`. What the function should return, or the program print, is not
    told in there.
    """
    limits = limits or Limits()
    folder = tempfile.mkdtemp(prefix="quadriga-code-")
    token = secrets.token_hex(16)
    job = {
        "token": token,
        "code": code,
        "tests": tests,
        "calls": calls,
        "folder": folder,
        "cpu_s": limits.cpu_s,
        "memory_mb": limits.memory_mb,
        "file_mb": limits.file_mb,
    }
    try:
        with tempfile.TemporaryFile("w+") as job_file, tempfile.TemporaryFile("w+b") as output:
            json.dump(job, job_file)
            job_file.flush()
            job_file.seek(0)
            with tempfile.TemporaryFile("w+b") as given, tempfile.TemporaryFile("w+b") as result_file:
                given.write(stdin.encode())
                given.seek(0)
                code_ = _run(folder, job_file.fileno(), given, output, result_file.fileno(), limits.wall_s)
                line, printed = (_read(file.fileno(), limits.file_mb << 20) for file in (result_file, output))
                return _result(code_, line, printed, token)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@lru_cache(maxsize=1)
def can_isolate() -> bool:
    """Whether the sandbox can shut programs in on this machine; tries it with an empty one."""
    return run("pass", []).isolated


def _run(folder: str, job_fd: int, stdin: Any, stdout: Any, result_fd: int, wall_s: float) -> int | None:
    """Exit code, or None when time ran out."""
    process = subprocess.Popen(
        [sys.executable, "-I", _CHILD, str(job_fd), str(result_fd), str(os.getpid())],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
        pass_fds=(job_fd, result_fd),
        start_new_session=True,
    )
    try:
        return process.wait(wall_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            kill_trees([process.pid])
            process.wait()


def _read(descriptor: int, limit: int) -> bytes:
    return os.pread(descriptor, limit, 0)


def _result(code: int | None, line: bytes, stdout: bytes, token: str) -> SandboxResult:
    if code is None or code in (-signal.SIGXCPU, -signal.SIGKILL):
        return SandboxResult("timeout")
    try:
        found = json.loads(line)
        if found["token"] != token:
            raise ValueError("not our line")
    except (ValueError, KeyError, TypeError, RecursionError):
        return SandboxResult("died", error=f"the program ended with status {code} before its tests did")
    return SandboxResult(
        "done",
        found["passed"],
        found["error"],
        stdout.decode(errors="replace"),
        tuple(found["outputs"]),
        found["namespaces"],
        found["confined"],
        found["filtered"],
    )
