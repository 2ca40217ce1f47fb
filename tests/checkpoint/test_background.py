"""The thread that writes a rank's part of a checkpoint leaves nothing of it in memory."""

from __future__ import annotations

import ctypes
import time

import pytest

from quadriga.checkpoint.disk import BackgroundWrite
from quadriga.errors import CheckpointError

PIECES, SIZE = 2000, 60_000
"""120 MB in pieces that the C library takes from its heap, not from the machine one by one."""


def resident_mb() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS:"))


def wait_for(write: BackgroundWrite):
    deadline = time.monotonic() + 20
    while not (state := write.state()).done:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return state


def test_what_was_freed_goes_back_to_the_machine():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("needs glibc")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    kept, most = [], []

    def write():
        pieces = []
        for _ in range(PIECES):
            pieces.append(libc.malloc(SIZE))
            ctypes.memset(pieces[-1], 1, SIZE)
            kept.append(libc.malloc(2000))  # something that lives on, between all of them
        most.append(resident_mb())
        for piece in pieces:
            libc.free(piece)

    before = resident_mb()
    assert wait_for(BackgroundWrite(write)).problem == ""
    after = resident_mb()
    assert most[0] > before + 100
    assert after < before + 20, f"{before:.0f} MB, {most[0]:.0f} MB while it was written, {after:.0f} MB afterwards"
    for piece in kept:
        libc.free(piece)


def test_whatever_goes_wrong_is_said():
    def refuse():
        raise CheckpointError("no room", "make some")

    assert "no room" in wait_for(BackgroundWrite(refuse)).problem
    assert wait_for(BackgroundWrite(lambda: 1 / 0)).problem == "ZeroDivisionError: division by zero"
