"""Tool processes as an event loop sees them: forked in milliseconds, asked with a deadline, killed when it passes.

They come from a nursery of their own (`rewards.nursery`): whatever ends this process ends them too, with all that they have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import pickle
import signal
import socket
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import IO, Any

from quadriga.agents.tool_host import ToolJob
from quadriga.errors import WorkerError
from quadriga.rewards.nursery import Nursery
from quadriga.rewards.worker import READ_BYTES, Frames, Garbled, frame

_SPAWN_S = 30.0
_LAST_WORDS_S = 1.0
_MAX_LOSSES = 3


class ProcessGone(Exception):
    """A tool process did not answer. `kind`: timeout or crash."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


@dataclass(eq=False)
class ToolProcess:
    """One forked process. `ended` is done, with its exit code or None, when it is known to be gone."""

    number: int
    channel: socket.socket
    pid: asyncio.Future[int]
    ended: asyncio.Future[int | None]
    frames: Frames = field(default_factory=Frames)
    asked: int = 0
    usable: bool = True
    why: str = ""


class ToolProcesses:
    """All tool processes of one event loop.

    Args:
        job: the tools.
        start_timeout_s: how long importing them may take.
    """

    def __init__(self, job: ToolJob, start_timeout_s: float = 60.0) -> None:
        self._job, self._start_timeout_s = job, start_timeout_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the nursery)
        self._nursery: Nursery | None = None
        self._opening = asyncio.Lock()
        self._processes: dict[int, ToolProcess] = {}
        self._numbers = 0
        self._losses = 0
        self._killing: set[asyncio.Task[None]] = set()
        self.started = 0

    async def open(self) -> None:
        """Import the tools; ConfigError carries the traceback if that fails."""
        async with self._opening:
            if self._nursery is None:
                if self._losses > _MAX_LOSSES:
                    raise WorkerError(
                        f"the processes of {self._job.what} end by themselves again and again; the end of their log:\n"
                        f"{_tail(self._log)}",
                        "look for a crash in these modules, or for the kernel's out-of-memory killer",
                    )
                nursery = await asyncio.to_thread(Nursery, self._job, self._start_timeout_s, self._log)
                loop = asyncio.get_running_loop()
                for control in (nursery.zygote, nursery.keeper):
                    loop.add_reader(control, self._hear, nursery, control)
                self._nursery = nursery

    async def spawn(self) -> ToolProcess:
        await self.open()
        nursery, loop = self._nursery, asyncio.get_running_loop()
        assert nursery is not None  # opened just now
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._numbers += 1
        process = ToolProcess(self._numbers, ours, loop.create_future(), loop.create_future())
        self._processes[process.number] = process
        with theirs:
            nursery.spawn(process.number, theirs.fileno(), [])
        self.started += 1
        try:
            async with asyncio.timeout(_SPAWN_S):
                await asyncio.shield(process.pid)
        except TimeoutError:
            self.end(process)
            raise ProcessGone("crash", f"no tool process was started in {_SPAWN_S:g} s") from None
        except asyncio.CancelledError:
            self.end(process)
            raise
        return process

    async def ask(self, process: ToolProcess, timeout_s: float, *order: Any) -> dict[str, Any]:
        """The answer to an order; the process is killed where there is none in time, or nobody waits for it any more.

        Raises:
            ProcessGone: it ended, or was killed.
        """
        loop = asyncio.get_running_loop()
        process.asked += 1
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(process.channel, frame(process.asked, pickle.dumps(order)))
                while data := await loop.sock_recv(process.channel, READ_BYTES):
                    for number, payload in process.frames.feed(data):
                        if number != process.asked:
                            raise Garbled(f"an answer to call {number}")
                        answer = json.loads(payload)
                        if not isinstance(answer, dict) or not isinstance(answer.get("text", ""), str):
                            raise Garbled("an answer that is none")
                        self._losses = 0
                        return answer
        except TimeoutError:
            self.end(process)
            raise ProcessGone("timeout", f"it took longer than {timeout_s:g} s and was stopped") from None
        except (Garbled, ValueError) as problem:
            self.end(process)
            raise ProcessGone("crash", f"its process wrote something else than answers: {problem}") from None
        except OSError:
            pass
        except BaseException:
            self.end(process)
            raise
        with contextlib.suppress(TimeoutError):  # why it ended is told in a moment
            async with asyncio.timeout(_LAST_WORDS_S):
                await asyncio.shield(process.ended)
        code = process.ended.result() if process.ended.done() else None
        self.end(process)
        raise ProcessGone("crash", process.why or _cause(code))

    def end(self, process: ToolProcess) -> None:
        """Kill it, if it is not gone; returns at once."""
        process.usable = False
        if process.ended.done() or process.number not in self._processes:
            self._forget(process)
            return
        task = own_task(self._kill(process))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    async def _kill(self, process: ToolProcess) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SPAWN_S):
                pid = await asyncio.shield(process.pid)
                while self._nursery is not None and not self._nursery.kill([pid]):
                    await asyncio.sleep(0.01)
                await asyncio.shield(process.ended)
        self._forget(process)

    async def close(self) -> None:
        """End all processes and wait for it."""
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            await self._close(nursery)
        for process in list(self._processes.values()):
            self._gone(process, None)
        for task in list(self._killing):
            task.cancel()
        self._log.close()

    async def _close(self, nursery: Nursery) -> None:
        loop = asyncio.get_running_loop()
        for control in (nursery.zygote, nursery.keeper):
            loop.remove_reader(control)
        await asyncio.shield(asyncio.to_thread(nursery.close))

    def _hear(self, nursery: Nursery, control: socket.socket) -> None:
        for message in nursery.messages(control):
            process = self._processes.get(message.get("spawned") or message.get("exited") or 0)
            if "spawned" in message and process and not process.pid.done():
                process.pid.set_result(message["pid"])
            elif "exited" in message and process:
                self._gone(process, message["code"])
            elif "over_memory" in message:
                for process in self._processes.values():
                    if process.pid.done() and process.pid.result() == message["over_memory"]:
                        process.why = f"it used {message['used_mb']} MB, more than it may, and was stopped"
            elif ("gone" in message or "zygote_ended" in message) and self._nursery is nursery:
                self._nursery = None  # all processes went with it; the next call opens another
                self._losses += 1
                task = own_task(self._close(nursery))
                self._killing.add(task)
                task.add_done_callback(self._killing.discard)
                for process in list(self._processes.values()):
                    self._gone(process, -signal.SIGKILL)
            if "gone" in message:
                return

    def _gone(self, process: ToolProcess, code: int | None) -> None:
        process.usable = False
        for future, value in ((process.ended, code), (process.pid, 0)):
            if not future.done():
                future.set_result(value)  # type: ignore[arg-type]
        self._processes.pop(process.number, None)

    def _forget(self, process: ToolProcess) -> None:
        self._processes.pop(process.number, None)
        process.channel.close()


def own_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that belongs to no episode, though one may have been the first to need it: it outlives that one's end."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def _cause(code: int | None) -> str:
    if code is None:
        return "its process ended"
    if code >= 0:
        return f"its process exited with status {code}"
    return f"its process was ended by {next((s.name for s in signal.Signals if s == -code), f'signal {-code}')}"


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), 2048, max(0, size - 2048)).decode(errors="replace").strip()
