"""A scoring process: takes calls from its socket, runs the reward function, answers each call at once.

It imports neither torch nor anything else that the reward function does not need.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.abc
import json
import os
import pickle
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from quadriga.errors import ConfigError
from quadriga.rewards.processes import adopt_orphans, die_with_parent, end_children, has_children, parents
from quadriga.rewards.result import clean
from quadriga.rewards.wire import Board, Frames, frame

_MAX_TRACEBACK = 16_384
_READ_BYTES = 1 << 18
_MANY_MODULES = 10  # a call that imported more than so many is worth telling: later workers can be born with them


def settle_in(parent_pid: int, memory_limit_mb: int | None) -> None:
    """What a new worker does before user code runs: its own session, its limits, and its end tied to its parent's."""
    os.setsid()
    die_with_parent(parent_pid)
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_mb is not None:
        limit = memory_limit_mb * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjust:
        adjust.write("1000")  # if the machine runs out of memory, this process is the one to go
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def serve(channel: socket.socket, board: Board, slot: int, call: Callable[..., Any], batched: bool) -> NoReturn:
    """Answer calls until the driver closes the channel."""
    me = os.getpid()
    helpers = frozenset(child for child, parent in parents().items() if parent == me) if has_children() else frozenset()
    sys.meta_path.insert(0, _ImportsAreProgress(board, slot))
    frames = Frames()
    while data := channel.recv(_READ_BYTES):
        for number, payload in frames.feed(data):
            board.set_current(slot, number)
            if number <= board.revoked(slot):
                channel.sendall(frame(number, b'{"skipped": true}'))
                continue
            modules = len(sys.modules)
            reply = _run(board, slot, call, batched, payload)
            if len(sys.modules) > modules + _MANY_MODULES:
                reply["imported"] = _newest_packages(modules)
            if os.getpid() != me:  # user code forked and the child came back here: only the parent answers
                os._exit(0)
            if has_children():  # what a call starts ends with the call
                end_children(keep=helpers)
            channel.sendall(frame(number, json.dumps(reply).encode()))
            board.set_started(slot, 0.0)  # only now: a call that breaks the channel is to blame for it
    _leave()


class _ImportsAreProgress(importlib.abc.MetaPathFinder):
    """Finds nothing, but notes on the board that a module is being imported: such a call is slow, not stuck."""

    def __init__(self, board: Board, slot: int) -> None:
        self._board, self._slot = board, slot

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        self._board.mark(self._slot, time.monotonic(), time.process_time())


def _run(board: Board, slot: int, call: Callable[..., Any], batched: bool, payload: bytes) -> dict[str, Any]:
    reply: dict[str, Any]
    began = time.monotonic()
    board.mark(slot, began, time.process_time())
    board.set_started(slot, began)
    try:
        values = pickle.loads(payload)
        returned = call(*values)
        reply = {"results": _clean_all(returned, len(values[0])) if batched else [clean(returned)]}
    except BaseException as problem:  # user code may raise anything, SystemExit and KeyboardInterrupt included
        text = traceback.format_exc()
        # A configuration error is the same for every sample: the driver stops instead of counting it.
        reply = {"error": text[-_MAX_TRACEBACK:], "fatal": isinstance(problem, ConfigError)}
    reply["seconds"] = time.monotonic() - began
    return reply


def _clean_all(returned: Any, expected: int) -> list[dict[str, Any]]:
    if isinstance(returned, (str, bytes, dict)) or not hasattr(returned, "__len__"):
        raise TypeError(f"the reward function returned a {type(returned).__name__} for a batch; it must return a list")
    if len(returned) != expected:
        raise ValueError(f"the reward function returned {len(returned)} scores for {expected} samples")
    results = []
    for value in returned:
        try:
            results.append(clean(value))
        except (TypeError, ValueError) as problem:
            results.append({"error": str(problem)})
    return results


def _newest_packages(known: int) -> list[str]:
    """What user code imported in the middle of a call; nothing if that started threads, which forbid forking."""
    if len(os.listdir("/proc/self/task")) > 1:
        return []
    names = list(sys.modules)[known:]
    return [name for name in names if "." not in name or name.startswith("quadriga.rewards.scorers.")][:200]


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)  # atexit handlers of user code could hang
