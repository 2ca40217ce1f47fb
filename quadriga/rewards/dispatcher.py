"""The driver's side of the reward pool: hands calls to scoring processes, reads their answers, keeps their deadlines.

One thread does all of it and never waits for user code. The clock of a call starts when a worker says that it begins, not
while it waits behind others.

Hangs run out side by side, not one after the other: a worker that spends far longer on a call than calls usually take is
set aside (*lingering*). It keeps that one call until it answers or its deadline passes; the calls behind it go to other
workers, and another process takes its place. If it answers, it is back, and the least experienced worker goes.

A process that ends takes no innocent sample with it. Where it is plain which call was the cause, that call fails. Where it
is not (someone else killed the process, or many calls were in flight in it), those it had begun are *suspects*: they are
scored again, apart from all others, in ever smaller lots, and only a call that ends a process alone is to blame. When
keeper or zygote end, the nursery is replaced; the suspects are then scored while the rest of the pool waits.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quadriga.config.schema import RewardConfig
from quadriga.errors import QuadrigaError, RewardError
from quadriga.rewards.nursery import Nursery
from quadriga.rewards.processes import cpu_and_state, lower_priority
from quadriga.rewards.result import ERROR, TIMEOUT, RewardResult, from_reply
from quadriga.rewards.worker import READ_BYTES, Frames, Garbled, frame

_CHECK_S = 0.02  # how often clocks are looked at while there is work
_CHUNK_SECONDS = 0.1  # a hand-over should last about so long
_WAITING_S = 0.04  # a call that waits for something so long may be stuck …
_COMPUTING_S = 0.08  # … and so may one that has used so much CPU time …
_HEAVY_S = 0.2  # … and one that has used so much is made to yield to the others, if there is a crowd of them
_BLOCKED_S = 1.0  # an event loop that has not begun, or not cancelled, a call after so long is blocked by another
_SPARE_WORKERS = 128  # so many hanging calls can run out side by side
_MAX_SPAWNING = 4  # spawn orders under way at once
_LOTS = 16  # suspects are scored in so many lots, side by side
_RECENT_S = 1.0  # a call that has run for longer is not suspected of having ended keeper or zygote …
_MAX_DEATHS = 3  # … unless it has seen more of their deaths than this
_MAX_FALSE_STARTS = 3
_UNKILLABLE_S = 2.0  # a process in uninterruptible sleep is given up after so long


@dataclass(eq=False, slots=True)
class Call:
    """One call of the reward function; `handles` are those of its samples (one, unless the function is batched)."""

    payload: bytes
    handles: Sequence[Future[RewardResult]]
    attempts: int = 1
    deaths: int = 0
    began_at: float = 0.0


@dataclass(eq=False, slots=True)
class Suspects:
    """Calls one of which may have ended a process; `whole_pool`: the keeper or the zygote, so that no other may run beside."""

    calls: list[Call]
    whole_pool: bool


@dataclass(eq=False, slots=True)
class WorkerRecord:
    """What the dispatcher knows of one scoring process."""

    number: int
    channel: socket.socket
    suspects: Suspects | None = None
    pid: int | None = None
    outgoing: bytearray = field(default_factory=bytearray)
    frames: Frames = field(default_factory=Frames)
    calls: dict[int, Call] = field(default_factory=dict)
    last_number: int = 0
    answered: int = 0
    progress_at: float = 0.0  # it said something, or was given something to do
    looked_at: tuple[float, float] | None = None  # since when, and from which CPU time on, its call is being looked at
    together: bool = False  # many calls in flight at once
    lingering: bool = False
    slowed: bool = False
    dismissed: bool = False
    condemned_at: float = 0.0
    condemned_call: Call | None = None
    why: str = ""  # it was condemned

    @property
    def active(self) -> bool:
        return not (self.lingering or self.condemned_at or self.dismissed or self.suspects)

    @property
    def begun(self) -> list[Call]:
        return [call for call in self.calls.values() if call.began_at]


class Dispatcher:
    """See the module.

    Args:
        open_nursery: starts keeper and zygote; called again when they have died.
        on_done: `(call, what came of each sample: a result, or the text of an error)`, in the dispatcher's thread.
        on_failed: `(call, outcome, message)`, likewise.
        on_end: the thread has ended; with the error, if any, that unfinished calls get.
    """

    def __init__(
        self,
        open_nursery: Callable[[], Nursery],
        options: RewardConfig,
        *,
        chunk_size: int,
        start_timeout_s: float,
        on_done: Callable[[Call, list[RewardResult | str]], None],
        on_failed: Callable[[Call, str, str], None],
        on_end: Callable[[QuadrigaError | None], None],
    ) -> None:
        self._open_nursery, self._nursery = open_nursery, open_nursery()
        self._num_workers, self._timeout_s = options.num_workers, options.timeout_s
        self._max_retries, self._max_concurrent = options.max_retries, options.max_concurrent
        self._together = False
        self._chunk_size, self._start_timeout_s = chunk_size, start_timeout_s
        self._on_done, self._on_failed, self._on_end = on_done, on_failed, on_end
        self._submitted: deque[Call] = deque()
        self._preload: deque[str] = deque()
        self._preloaded: dict[str, None] = {}
        self._queue: deque[Call] = deque()
        self._suspects: deque[Suspects] = deque()
        self._workers: dict[int, WorkerRecord] = {}
        self._next_worker = 1
        self._spawning = 0
        self._false_starts = 0
        self._to_kill: list[int] = []
        self._next_check = 0.0
        self._answers = 0
        self._mean_s = min(0.05, self._timeout_s / 200)  # running mean of how long a call takes
        self._closing = False
        self._error: QuadrigaError | None = None
        self.counters = {"workers_started": 0, "workers_lost": 0, "retries": 0, "nurseries_lost": 0}
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, lambda _: self._drain_wake())
        self._listen_to_nursery()
        self._thread = threading.Thread(target=self._main, name="quadriga-reward-dispatcher", daemon=True)
        self._thread.start()

    @property
    def needed_columns(self) -> list[str]:
        return self._nursery.needed_columns

    # -- called from other threads

    def put(self, calls: Iterable[Call], preload: Iterable[str] = ()) -> None:
        self._preload.extend(preload)
        self._submitted.extend(calls)
        self._wake()

    def stop(self, error: QuadrigaError | None = None) -> None:
        """End the thread and all processes; `error`, if any, is what unfinished calls get."""
        self._error = self._error or error
        self._closing = True
        self._wake()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"!")

    # -- the thread

    def _main(self) -> None:
        try:
            while not self._closing:
                for key, mask in self._selector.select(self._pause()):
                    key.data(mask)
                while self._submitted:
                    self._queue.append(self._submitted.popleft())
                if self._suspects_are_out():
                    self._hand_out()
                now = time.monotonic()
                if now >= self._next_check:
                    self._check_clocks(now)
                    self._next_check = now + _CHECK_S
        except RewardError as problem:  # the function cannot be imported any more
            self._error = self._error or problem
        except Exception as problem:  # nobody else watches this thread: whoever waits must hear of it
            self._error = self._error or RewardError(f"the reward pool's dispatcher failed: {problem!r}")
            self._error.__cause__ = problem
        finally:
            self._nursery.close()
            for worker in self._workers.values():
                worker.channel.close()
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()
            self._on_end(self._error)

    def _pause(self) -> float | None:
        busy = self._queue or self._suspects or any(w.calls or not w.active for w in self._workers.values())
        return max(0.0, self._next_check - time.monotonic()) if busy else None

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    # -- handing out

    def _hand_out(self) -> None:
        if not self._queue and len(self._workers) <= self._num_workers:
            return
        active = sorted((w for w in self._workers.values() if w.active), key=lambda w: -w.answered)
        workers, surplus = active[: self._num_workers], active[self._num_workers :]
        if self._together:
            in_flight = sum(len(worker.calls) for worker in workers)
            size = min(self._max_concurrent, -(-(len(self._queue) + in_flight) // self._num_workers))
        else:
            chunk = max(1, min(self._chunk_size, int(_CHUNK_SECONDS / max(self._mean_s, 1e-9))))
            size = min(chunk, -(-len(self._queue) // self._num_workers))
        for worker in workers:
            if len(worker.calls) <= (size - 1 if self._together else size // 2):
                self._give_from_queue(worker, size)
        for worker in surplus:
            if not worker.calls:
                self._dismiss(worker)
        missing = self._num_workers - len(active)
        while self._queue and missing > 0 and self._may_spawn():
            self._give_from_queue(self._spawn(), size)
            missing -= 1

    def _suspects_are_out(self) -> bool:
        """Give suspects processes of their own; False while all other calls must wait for some of them."""
        while self._suspects:
            busy = [worker for worker in self._workers.values() if worker.calls]
            if self._suspects[0].whole_pool:
                if busy or not self._may_spawn():
                    return False
            elif sum(worker.suspects is not None for worker in busy) >= _LOTS or not self._may_spawn():
                break
            worker = self._spawn()
            worker.suspects = self._suspects.popleft()
            self._give(worker, worker.suspects.calls)
        return not any(w.calls and w.suspects and w.suspects.whole_pool for w in self._workers.values())

    def _may_spawn(self) -> bool:
        return self._spawning < _MAX_SPAWNING and len(self._workers) < self._num_workers + _SPARE_WORKERS

    def _give_from_queue(self, worker: WorkerRecord, size: int) -> None:
        self._give(worker, [self._queue.popleft() for _ in range(min(len(self._queue), size - len(worker.calls)))])

    def _give(self, worker: WorkerRecord, calls: Sequence[Call]) -> None:
        if not worker.calls:
            worker.progress_at = time.monotonic()
        for call in calls:
            call.began_at = 0.0
            worker.last_number += 1
            worker.calls[worker.last_number] = call
            worker.outgoing += frame(worker.last_number, call.payload)
        self._send(worker)

    def _spawn(self) -> WorkerRecord:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        worker = WorkerRecord(self._next_worker, ours, progress_at=time.monotonic())
        self._next_worker += 1
        with theirs:
            preload = [self._preload.popleft() for _ in range(len(self._preload))]
            self._preloaded.update(dict.fromkeys(preload))
            self._nursery.spawn(worker.number, theirs.fileno(), preload)
        self._spawning += 1
        self._workers[worker.number] = worker
        self._selector.register(ours, selectors.EVENT_READ, lambda mask: self._on_channel(worker, mask))
        self.counters["workers_started"] += 1
        return worker

    def _dismiss(self, worker: WorkerRecord) -> None:
        worker.dismissed = True
        with contextlib.suppress(OSError):
            worker.channel.shutdown(socket.SHUT_WR)  # it exits when it has read to the end

    def _send(self, worker: WorkerRecord) -> None:
        with contextlib.suppress(BlockingIOError):
            while worker.outgoing:
                try:
                    sent = worker.channel.send(worker.outgoing)
                except (BrokenPipeError, ConnectionResetError):  # it has died; its exit is reported by the zygote
                    worker.outgoing.clear()
                    return
                del worker.outgoing[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        key = self._selector.get_map().get(worker.channel.fileno())
        if key is not None and key.events != wanted:
            self._selector.modify(worker.channel, wanted, key.data)

    # -- hearing workers

    def _on_channel(self, worker: WorkerRecord, mask: int) -> None:
        if worker.number not in self._workers:
            return  # its end was reported in the same moment
        if mask & selectors.EVENT_WRITE:
            self._send(worker)
        if mask & selectors.EVENT_READ and not self._read(worker):
            self._selector.unregister(worker.channel)
            # Normally it has exited, which the zygote reports; user code may also have closed or garbled the channel.
            if worker.calls and not worker.condemned_at:
                self._condemn(worker, None, worker.why)

    def _read(self, worker: WorkerRecord) -> bool:
        """Take in what the worker has said; False at the end of its channel, or where what comes makes no sense."""
        try:
            data = worker.channel.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            for number, payload in worker.frames.feed(data):
                self._hear(worker, number, payload)
        except Garbled as problem:
            worker.why = f"the scoring process wrote something else than answers to its channel: {problem}"
            return False
        if worker.lingering and not worker.calls and not worker.condemned_at:
            worker.lingering = False
            if worker.slowed:  # only the superuser could give it back its priority
                self._dismiss(worker)
        if worker.suspects and not worker.calls and not worker.dismissed:
            self._dismiss(worker)
        return bool(data)

    def _hear(self, worker: WorkerRecord, number: int, payload: bytes) -> None:
        now = worker.progress_at = time.monotonic()
        call = worker.calls.get(number)
        if number and not payload:
            if call is not None:  # None: it was taken back
                call.began_at, worker.looked_at = now, None
            return
        try:
            if number > worker.last_number or (call is not None and not call.began_at):
                raise ValueError(f"an answer to call {number}")
            said = json.loads(payload)
            outcomes = [from_reply(entry, said["seconds"]) for entry in said.get("results", ())]
        except Exception as problem:  # whatever user code has written there
            raise Garbled(repr(problem)[:200]) from problem
        if number == 0:
            worker.looked_at = None  # it imports: slow, not stuck
            worker.together = self._together = worker.together or "together" in said
        elif call is not None:
            del worker.calls[number]
            self._answer(worker, call, said, outcomes)

    def _answer(
        self, worker: WorkerRecord, call: Call, said: dict[str, Any], outcomes: list[RewardResult | str]
    ) -> None:
        worker.answered += 1
        self._false_starts = 0
        self._answers += 1
        self._mean_s += max(0.02, 1 / (self._answers + 1)) * (said["seconds"] - self._mean_s)
        self._preload.extend(name for name in said.get("imported", ()) if name not in self._preloaded)
        if said.get("fatal"):
            self.stop(RewardError(f"the reward function cannot be used:\n{said['error']}"))
        if "error" in said:
            self._failed(call, ERROR, said["error"])
        elif "timeout" in said:
            self._failed(call, TIMEOUT, f"scoring took longer than {self._timeout_s:g} s and was cancelled")
        elif len(outcomes) != len(call.handles):
            text = f"the reward function returned {len(outcomes)} scores for {len(call.handles)} samples"
            self._failed(call, ERROR, text)
        else:
            self._on_done(call, outcomes)

    def _failed(self, call: Call, outcome: str, message: str) -> None:
        self._false_starts = 0
        if call.attempts <= self._max_retries:
            call.attempts += 1
            self.counters["retries"] += 1
            self._queue.append(call)
        else:
            self._on_failed(call, outcome, message)

    # -- hearing the nursery

    def _listen_to_nursery(self) -> None:
        nursery = self._nursery
        self._selector.register(nursery.keeper, selectors.EVENT_READ, lambda _: self._hear_keeper(nursery))
        self._selector.register(nursery.zygote, selectors.EVENT_READ, lambda _: self._hear_zygote(nursery))

    def _hear_zygote(self, nursery: Nursery) -> None:
        for message in nursery.messages(nursery.zygote):
            if nursery is not self._nursery:
                return  # it has been replaced
            if "spawned" in message:
                self._spawning -= 1
                if message["spawned"] in self._workers:
                    self._workers[message["spawned"]].pid = message["pid"]
            elif "exited" in message:
                self._hear_keeper(nursery)  # why it was killed, if it was
                if message["exited"] in self._workers:
                    self._bury(self._workers[message["exited"]], message["code"])
            else:
                self._replace_nursery("the zygote has ended")

    def _hear_keeper(self, nursery: Nursery) -> None:
        for message in nursery.messages(nursery.keeper):
            if nursery is not self._nursery:
                return
            if "over_memory" in message:
                for worker in self._workers.values():
                    if worker.pid == message["over_memory"]:
                        used = f"scoring used {message['used_mb']} MB, more than memory_limit_mb allows"
                        worker.why = f"{used}, and was killed"
            else:
                self._replace_nursery(f"keeper or zygote have ended: {message}")

    def _replace_nursery(self, why: str) -> None:
        """Keeper or zygote is gone, and all scoring processes with it."""
        now, suspected, again_suspected = time.monotonic(), list[Call](), False
        self.counters["nurseries_lost"] += 1
        self._false_start(why)
        for control in (self._nursery.keeper, self._nursery.zygote):
            self._selector.unregister(control)
        self._nursery.close()
        for worker in list(self._workers.values()):
            self._forget(worker)
            again = [call for call in worker.calls.values() if not call.began_at]
            in_quarantine = worker.suspects is not None and worker.suspects.whole_pool
            again_suspected |= in_quarantine
            for call in worker.begun:
                call.deaths += 1
                if (in_quarantine and len(worker.begun) == 1) or call.deaths > _MAX_DEATHS:
                    self._failed(call, ERROR, f"the processes around it died while this sample was scored ({why})")
                else:
                    (suspected if now - call.began_at < _RECENT_S else again).append(call)
            if worker.suspects and again:
                self._suspects.append(Suspects(again, worker.suspects.whole_pool))
            else:
                self._queue.extendleft(reversed(again))
        # All of them again, if this is the first time: mostly none of them was the cause.
        self._suspect(suspected, True, _LOTS if again_suspected else -(-len(suspected) // self._max_concurrent))
        self._spawning = 0
        self._to_kill.clear()
        if not self._closing:
            self._nursery = self._open_nursery()
            self._preload.extendleft(reversed(self._preloaded))
            self._listen_to_nursery()

    # -- clocks

    def _check_clocks(self, now: float) -> None:
        for worker in list(self._workers.values()):
            begun = worker.begun
            if worker.condemned_at:
                if now - worker.condemned_at > _UNKILLABLE_S:
                    self._bury(worker, -signal.SIGKILL)
            elif begun:
                oldest = min(begun, key=lambda call: call.began_at)
                if now - oldest.began_at > self._timeout_s + worker.together * _BLOCKED_S:
                    self._condemn(worker, oldest, f"scoring took longer than {self._timeout_s:g} s and was killed")
                elif not worker.together:
                    self._look_closer(worker, oldest, now)
                elif len(begun) < len(worker.calls) and now - worker.progress_at > _BLOCKED_S:
                    self._set_aside(worker)
            elif worker.calls and now - worker.progress_at > self._start_timeout_s:
                if worker.pid is None:
                    self.stop(self._nursery.lost(f"no process was started in {self._start_timeout_s:g} s"))
                else:
                    self._condemn(worker, None, "")
        if self._to_kill and self._nursery.kill(self._to_kill):
            self._to_kill.clear()

    def _look_closer(self, worker: WorkerRecord, call: Call, now: float) -> None:
        """Set a worker aside whose call takes unusually long: by the clock if it waits, by CPU time if it computes."""
        if worker.pid is None or now - call.began_at < _WAITING_S:
            return
        cpu_s, state = cpu_and_state(worker.pid)
        if worker.looked_at is None:
            worker.looked_at = now, cpu_s
        waited, used = now - worker.looked_at[0], cpu_s - worker.looked_at[1]
        usual = 10 * self._mean_s
        if worker.active and (self._queue or len(worker.calls) > 1):
            stuck = used > max(_COMPUTING_S, usual) if state == "R" else waited > max(_WAITING_S, usual)
            if stuck or waited > max(self._timeout_s / 4, min(usual, self._timeout_s / 2)):
                self._set_aside(worker)
        elif worker.lingering and not worker.slowed and used > max(_HEAVY_S, self._timeout_s / 50):
            # A few slow calls keep their share of the processor; a crowd of busy loops must not starve all others.
            crowd = sum(other.lingering for other in self._workers.values()) > self._num_workers
            worker.slowed = crowd and lower_priority(worker.pid)

    def _set_aside(self, worker: WorkerRecord) -> None:
        """Have other workers do what this one has not begun. Should it begin some of it just now, the first answer counts."""
        if worker.lingering or worker.suspects or len(self._workers) >= self._num_workers + _SPARE_WORKERS:
            return
        worker.lingering = True
        back = [number for number, call in worker.calls.items() if not call.began_at]
        self._queue.extendleft(reversed([worker.calls.pop(number) for number in back]))
        worker.outgoing += frame(0)
        self._send(worker)

    def _condemn(self, worker: WorkerRecord, call: Call | None, why: str) -> None:
        if worker.pid is None:
            return  # not yet reported by the zygote; the next look at the clocks comes soon
        worker.condemned_at, worker.condemned_call, worker.why = time.monotonic(), call, why
        self._to_kill.append(worker.pid)

    # -- the end of a process

    def _forget(self, worker: WorkerRecord) -> None:
        """Hear the last words of a worker that has ended, and strike it off the list."""
        with contextlib.suppress(OSError):
            while worker.channel.recv(1, socket.MSG_PEEK) and self._read(worker):
                pass
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel)
        worker.channel.close()
        del self._workers[worker.number]

    def _bury(self, worker: WorkerRecord, code: int) -> None:
        """The process has ended: find the call that is to blame, give the others to someone else."""
        self._forget(worker)
        begun = worker.begun
        again = [call for call in worker.calls.values() if not call.began_at]
        if not worker.dismissed:
            self.counters["workers_lost"] += 1
            if not (worker.answered or begun or worker.condemned_at):
                self._false_start(f"status {code}")
        if worker.condemned_call is not None and worker.condemned_call not in begun:
            again, begun = begun + again, []  # the condemned call answered at the last moment
        by_others = code in (-signal.SIGKILL, -signal.SIGTERM) and not worker.why
        if worker.suspects and again:
            self._suspects.append(Suspects(again, worker.suspects.whole_pool))
        else:
            self._queue.extendleft(reversed(again))
        if len(begun) == 1 and (worker.suspects or not by_others):
            self._failed(begun[0], TIMEOUT if worker.condemned_call else ERROR, worker.why or self._cause(code))
        else:
            self._suspect(begun, worker.suspects is not None and worker.suspects.whole_pool)

    def _suspect(self, calls: list[Call], whole_pool: bool, lots: int = _LOTS) -> None:
        self._suspects.extend(Suspects(calls[k::lots], whole_pool) for k in range(min(lots, len(calls))))

    def _false_start(self, why: str) -> None:
        self._false_starts += 1
        if self._false_starts > _MAX_FALSE_STARTS:
            self.stop(self._nursery.lost(why))

    def _cause(self, code: int) -> str:
        if code >= 0:
            return f"the scoring process exited with status {code} in the middle of a call"
        name = next((member.name for member in signal.Signals if member == -code), f"signal {-code}")
        return f"the scoring process was ended by {name}; the end of the pool's log:\n{self._nursery.log_tail()}"
