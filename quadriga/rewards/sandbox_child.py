"""The inside of the sandbox: a script of its own, run by `sandbox.py` in a fresh interpreter. Standard library only.

It reads a job, shuts itself in (see `sandbox.py` for what that covers), runs the code and writes one line of JSON.
"""

from __future__ import annotations

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

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x20000, 0x10000000, 0x40000000, 0x10000
_MS_REC, _MS_PRIVATE, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _SYS_MOUNT_SETATTR = (
    0x4000,
    0x40000,
    -100,
    0x8000,
    1,
    442,
)

_libc = ctypes.CDLL(None, use_errno=True)

# Refused system calls by machine: starting processes, signalling or tracing others, sockets, mounting, namespaces.
_ARCHITECTURES = {
    "x86_64": {
        "audit": 0xC000003E,
        "clone": 56,
        "prlimit64": 302,
        "refused": (57, 58, 62, 200, 234, 129, 297, 101, 311, 41, 165, 166, 155, 272, 308),
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "clone": 220,
        "prlimit64": 261,
        "refused": (129, 130, 131, 138, 240, 117, 271, 198, 40, 39, 41, 97, 268),
    },
}
_REFUSED_EVERYWHERE = (424, 425, 428, 429, 430, 431, 432, 433, 442)  # pidfd_send_signal, io_uring_setup, the mount API
_CLONE3 = 435


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
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS) != 0:
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


def refuse_system_calls() -> bool:
    """No new process (threads are fine), no signal to others, no socket; False where the kernel does not filter."""
    machine = _ARCHITECTURES.get(platform.machine())
    if machine is None or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    program = _filter(machine)
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return _libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0


def _filter(machine: dict) -> list[tuple[int, int, int, int]]:
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
    for number in (*machine["refused"], *_REFUSED_EVERYWHERE):
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    program += [
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
            exec(compile(test, "<test>", "exec"), space)
            passed += 1
        except BaseException as problem:
            first_error = first_error or _short(problem)
    return {"passed": passed, "error": first_error}


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
    filtered = refuse_system_calls()
    sys.argv[1:] = []
    result = run_tests(job) if job["tests"] is not None else run_program(job)
    result |= {"token": token, "namespaces": namespaces, "filtered": filtered}
    os.write(result_fd, json.dumps(result).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
