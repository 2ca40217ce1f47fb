"""A scoring process: takes calls from its socket, runs the reward function, answers each call as soon as it is done.

Driver and process send each other frames: a number, and a payload. To the process: (n, the pickled arguments of call n),
or (0, nothing) to say that the calls it has not begun are given to others. From it: (n, nothing) when call n begins,
(n, JSON) with its answer, and (0, JSON) with a notice. It imports neither torch nor anything else that the reward function
does not need.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.abc
import inspect
import json
import os
import pickle
import resource
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn

from quadriga.errors import ConfigError
from quadriga.rewards.processes import adopt_orphans, die_with_parent, end_children, has_children, parents
from quadriga.rewards.result import clean

READ_BYTES = 1 << 18
MAX_TRACEBACK = 16_384
_HEADER = struct.Struct("<II")
_MAX_FRAME_BYTES = 1 << 28
_MANY_MODULES = 10  # a call that imported more than so many is worth telling: later processes can be born with them
_TELL_IMPORTS_S = 0.02


def frame(number: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload), number) + payload


class Garbled(Exception):
    """Bytes from a scoring process that are no answer: user code has written to its channel."""


class Frames:
    """Cuts a byte stream back into its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add received bytes; yields (number, payload) of every complete frame."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, number = _HEADER.unpack_from(self._buffer, start)
                if length > _MAX_FRAME_BYTES:
                    raise Garbled(f"a frame of {length} bytes")
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield number, payload
        finally:
            del self._buffer[:start]


def settle_in(parent_pid: int, memory_limit_mb: int | None) -> None:
    """What a new process does before user code runs: its own session, its limits, and its end tied to its parent's."""
    os.setsid()
    die_with_parent(parent_pid)
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_mb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_mb << 20,) * 2)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjust:
        adjust.write("1000")  # if the machine runs out of memory, this process is the one to go
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class Worker:
    """Calls are made one after the other, until the function returns an awaitable: then many are in flight at once."""

    def __init__(self, channel: socket.socket, call: Callable[..., Any], batched: bool, timeout_s: float) -> None:
        self._channel, self._call, self._batched, self._timeout_s = channel, call, batched, timeout_s
        self._pid = os.getpid()
        mine = parents().items() if has_children() else ()
        self._helpers = frozenset(child for child, parent in mine if parent == self._pid)
        self._frames = Frames()
        self._waiting: deque[tuple[int, bytes]] = deque()

    def serve(self) -> NoReturn:
        """Answer calls until the driver closes the channel."""
        imports = _ImportsAreProgress(self._channel)
        sys.meta_path.insert(0, imports)
        unsent = b""
        while True:
            while not self._waiting:
                self._channel.sendall(unsent)
                unsent = b""
                if not self._receive():
                    leave()
            number, payload = self._waiting.popleft()
            self._channel.sendall(unsent + frame(number))  # the answer before, and that this one begins
            modules, began = len(sys.modules), time.monotonic()
            returned = self._made(payload)
            if inspect.isawaitable(returned):
                sys.meta_path.remove(imports)
                self._serve_together(number, returned, began)
            reply = self._reply(returned, began)
            if len(sys.modules) > modules + _MANY_MODULES:
                reply["imported"] = _newest_packages(modules)
            if has_children():  # what a call starts ends with the call
                end_children(keep=self._helpers)
            unsent = frame(number, json.dumps(reply).encode())
            if time.monotonic() - began > _TELL_IMPORTS_S:  # by now the driver may have changed its mind
                with contextlib.suppress(BlockingIOError):
                    self._receive(socket.MSG_DONTWAIT)

    def _receive(self, flags: int = 0) -> bool:
        data = self._channel.recv(READ_BYTES, flags)
        for number, payload in self._frames.feed(data):
            if number:
                self._waiting.append((number, payload))
            else:
                self._waiting.clear()
        return bool(data)

    def _serve_together(self, number: int, awaitable: Awaitable[Any], began: float) -> NoReturn:
        """All calls of an asynchronous function side by side in one event loop, each with its own deadline."""
        import asyncio  # only here: other functions need no event loop

        in_flight: set[asyncio.Task[None]] = set()

        async def answer(writer: asyncio.StreamWriter, number: int, awaitable: Awaitable[Any], began: float) -> None:
            task = asyncio.ensure_future(_caught(awaitable))
            await asyncio.wait({task}, timeout=self._timeout_s - (time.monotonic() - began))
            in_time = task.done()
            task.cancel()  # too late; the others go on, whether or not it heeds this
            reply = self._reply(task.result(), began) if in_time else {"timeout": True, "seconds": self._timeout_s}
            if len(in_flight) == 1 and has_children():
                end_children(keep=self._helpers)
            writer.write(frame(number, json.dumps(reply).encode()))

        def begin(writer: asyncio.StreamWriter, number: int, awaitable: Awaitable[Any], began: float) -> None:
            writer.write(frame(number))
            task = asyncio.ensure_future(answer(writer, number, awaitable, began))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)

        async def main() -> None:
            self._channel.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=self._channel)
            writer.write(frame(0, b'{"together": true}'))
            begin(writer, number, awaitable, began)
            data = b""
            while True:
                self._waiting.extend(arrived for arrived in self._frames.feed(data) if arrived[0])
                while self._waiting:
                    other, payload = self._waiting.popleft()
                    begin(writer, other, _as_awaitable(self._made(payload)), time.monotonic())
                if not (data := await reader.read(READ_BYTES)):
                    leave()  # at once: asyncio would wait for whatever does not heed its cancellation

        asyncio.run(main())
        leave()

    def _made(self, payload: bytes) -> Any:
        """What the function returns, or what it raised as `_Raised`."""
        try:
            return self._call(*pickle.loads(payload))
        except BaseException as problem:  # user code may raise anything, SystemExit and KeyboardInterrupt included
            return _Raised(problem)

    def _reply(self, returned: Any, began: float) -> dict[str, Any]:
        if os.getpid() != self._pid:  # user code forked and the child came back here: only the parent answers
            os._exit(0)
        reply: dict[str, Any] = {}
        try:
            if not isinstance(returned, _Raised):
                reply = {"results": _clean_all(returned) if self._batched else [clean(returned)]}
        except BaseException as problem:  # methods of what user code returned are user code too
            returned = _Raised(problem)
        if isinstance(returned, _Raised):
            reply = {"error": returned.text, "fatal": returned.fatal}
        reply["seconds"] = time.monotonic() - began
        return reply


class _Raised:
    def __init__(self, problem: BaseException) -> None:
        self.text = "".join(traceback.format_exception(problem))[-MAX_TRACEBACK:]
        # A configuration error is the same for every sample: the driver stops instead of counting it.
        self.fatal = isinstance(problem, ConfigError)


async def _caught(awaitable: Awaitable[Any]) -> Any:
    import asyncio

    try:
        return await awaitable
    except asyncio.CancelledError as problem:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # by us; otherwise user code did it
            raise
        return _Raised(problem)
    except BaseException as problem:
        return _Raised(problem)


async def _as_value(value: Any) -> Any:
    return value


def _as_awaitable(value: Any) -> Awaitable[Any]:
    return value if inspect.isawaitable(value) else _as_value(value)


def _clean_all(returned: Any) -> list[dict[str, Any]]:
    if isinstance(returned, (str, bytes, dict)) or not hasattr(returned, "__len__"):
        raise TypeError(f"the reward function returned a {type(returned).__name__} for a batch; it must return a list")
    results = []
    for value in returned:
        try:
            results.append(clean(value))
        except (TypeError, ValueError) as problem:
            results.append({"error": str(problem)})
    return results


class _ImportsAreProgress(importlib.abc.MetaPathFinder):
    """Finds nothing, but tells the driver that a module is being imported: such a call is slow, not stuck."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._told_at, self._me = channel, 0.0, (os.getpid(), threading.get_ident())

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        now = time.monotonic()
        if now - self._told_at > _TELL_IMPORTS_S and (os.getpid(), threading.get_ident()) == self._me:
            self._told_at = now
            with contextlib.suppress(OSError):
                self._channel.sendall(frame(0, b'{"importing": true}'))


def _newest_packages(known: int) -> list[str]:
    """What user code imported in the middle of a call; nothing if that started threads, which forbid forking."""
    if len(os.listdir("/proc/self/task")) > 1:
        return []
    names = list(sys.modules)[known:]
    return [name for name in names if "." not in name or name.startswith("quadriga.rewards.scorers.")][:200]


def leave() -> NoReturn:
    """End this process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)  # atexit handlers of user code could hang
