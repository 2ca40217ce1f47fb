"""How driver and scoring processes talk: length-prefixed frames on a socket, and a shared board of clocks."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<II")
_FIELDS = 8  # of 8 bytes per worker, six of them used


def frame(number: int, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), number) + payload


class Frames:
    """Cuts a byte stream back into its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add received bytes; yields (number, payload) of every frame that is complete."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, number = _HEADER.unpack_from(self._buffer, start)
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield number, payload
        finally:
            del self._buffer[:start]


class Board:
    """Memory shared by driver, warden, zygote and workers: for every worker what it is doing, without a message.

    Every field is eight aligned bytes with one writer, so reading it needs no lock:
      started  when the current call began (CLOCK_MONOTONIC, the same in all processes), 0.0 once it is answered
      current  number of the last call the worker took up
      revoked  set by the driver: calls up to this number belong to others now, skip them
      pid      set by the zygote while the process exists
      marked   when the current call began or last imported a module, and how much CPU time the worker had used by then
    """

    def __init__(self, slots: int, fd: int | None = None) -> None:
        self.slots = slots
        self.fd = os.memfd_create("quadriga-reward-board", 0) if fd is None else fd
        size = slots * _FIELDS * 8
        if fd is None:
            os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        view = memoryview(self._map)
        self._times = view.cast("d")
        self._numbers = view.cast("Q")

    def clear(self, slot: int) -> None:
        self._times[slot * _FIELDS] = 0.0
        for field in range(1, _FIELDS):
            self._numbers[slot * _FIELDS + field] = 0

    def started(self, slot: int) -> float:
        return self._times[slot * _FIELDS]

    def set_started(self, slot: int, when: float) -> None:
        self._times[slot * _FIELDS] = when

    def current(self, slot: int) -> int:
        return self._numbers[slot * _FIELDS + 1]

    def set_current(self, slot: int, number: int) -> None:
        self._numbers[slot * _FIELDS + 1] = number

    def revoked(self, slot: int) -> int:
        return self._numbers[slot * _FIELDS + 2]

    def revoke(self, slot: int, number: int) -> None:
        self._numbers[slot * _FIELDS + 2] = number

    def set_pid(self, slot: int, pid: int) -> None:
        self._numbers[slot * _FIELDS + 3] = pid

    def forget_pid(self, slot: int, pid: int) -> None:
        if self._numbers[slot * _FIELDS + 3] == pid:  # else the slot belongs to another worker by now
            self._numbers[slot * _FIELDS + 3] = 0

    def mark(self, slot: int, when: float, cpu_s: float) -> None:
        self._times[slot * _FIELDS + 5] = cpu_s
        self._times[slot * _FIELDS + 4] = when

    def marked(self, slot: int) -> tuple[float, float]:
        return self._times[slot * _FIELDS + 4], self._times[slot * _FIELDS + 5]

    def pids(self) -> list[int]:
        return [pid for pid in self._numbers[3::_FIELDS].tolist() if pid]

    def close(self) -> None:
        self._times.release()
        self._numbers.release()
        self._map.close()
        os.close(self.fd)
