"""The driver's side of the reward pool: hands calls to scoring processes, reads their answers, keeps their deadlines.

One thread does all of it and never waits for user code. The clock of a call starts when a worker takes it up (the
worker writes the time on a shared board), not while it waits behind others.

Hangs run out side by side, not one after the other: a worker that spends far longer on a call than calls usually take
is set aside (*lingering*). It keeps that one call until it answers or its deadline passes; the calls behind it go to
other workers, and another process takes its place. If it answers, it is back, and the least experienced worker goes.
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
from collections.abc import Callable, Iterable
from typing import Any

from quadriga.errors import RewardError
from quadriga.rewards.calls import Call, WorkerRecord
from quadriga.rewards.launch import Nursery
from quadriga.rewards.processes import cpu_and_state, lower_priority
from quadriga.rewards.result import ERROR, TIMEOUT
from quadriga.rewards.wire import frame

_READ_BYTES = 1 << 18
_CHECK_S = 0.02  # how often clocks are looked at while there is work
_CHUNK_SECONDS = 0.1  # a hand-over should last about so long
_TAKE_BACK_S = 0.01  # after so long a worker has seen that its calls were revoked, or shows that it took up another
_WAITING_S = 0.04  # a call that waits for something so long may be stuck …
_COMPUTING_S = 0.08  # … and so may one that has used so much CPU time …
_HEAVY_S = 0.2  # … and one that has used so much is made to yield to the others, if there is a crowd of them
_MAX_SPAWNING = 4  # spawn orders under way at once
_MAX_HANDOVERS = 5  # a call that loses its worker so often, without blame, is given up
_MAX_FALSE_STARTS = 3
_UNKILLABLE_S = 2.0  # a process in uninterruptible sleep is given up after so long


class Dispatcher:
    """See the module. `on_reply(call, reply)` and `on_failure(call, outcome, message)` run in the dispatcher's thread."""

    def __init__(
        self,
        nursery: Nursery,
        *,
        num_workers: int,
        timeout_s: float,
        max_retries: int,
        chunk_size: int,
        start_timeout_s: float,
        on_reply: Callable[[Call, dict[str, Any]], None],
        on_failure: Callable[[Call, str, str], None],
        on_end: Callable[[RewardError | None], None],
    ) -> None:
        self._nursery = nursery
        self._num_workers, self._timeout_s, self._max_retries = num_workers, timeout_s, max_retries
        self._chunk_size, self._start_timeout_s = chunk_size, start_timeout_s
        self._on_reply, self._on_failure, self._on_end = on_reply, on_failure, on_end
        self._submitted: deque[Call] = deque()
        self._preload: deque[str] = deque()
        self._queue: deque[Call] = deque()
        self._workers: dict[int, WorkerRecord] = {}
        self._free_slots = list(range(nursery.board.slots))
        self._next_worker = 1
        self._spawning = 0
        self._false_starts = 0
        self._known_modules: set[str] = set()
        self._to_kill: list[int] = []
        self._next_check = 0.0
        self._answers = 0
        self._mean_s = min(0.05, timeout_s / 200)  # running mean of how long a call takes
        self._closing = False
        self._error: RewardError | None = None
        self.counters = {"workers_started": 0, "workers_lost": 0, "retries": 0}
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, lambda _: self._drain_wake())
        self._selector.register(nursery.warden, selectors.EVENT_READ, lambda _: self._hear_warden())
        self._selector.register(nursery.zygote, selectors.EVENT_READ, lambda _: self._hear_zygote())
        self._thread = threading.Thread(target=self._main, name="quadriga-reward-dispatcher", daemon=True)
        self._thread.start()

    # -- called from other threads

    def put(self, calls: Iterable[Call], preload: Iterable[str] = ()) -> None:
        self._preload.extend(preload)
        self._submitted.extend(calls)
        self._wake()

    def stop(self, error: RewardError | None = None) -> None:
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
                self._hand_out()
                now = time.monotonic()
                if now >= self._next_check:
                    self._check_clocks(now)
                    self._next_check = now + _CHECK_S
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
        busy = self._queue or any(worker.calls or not worker.active for worker in self._workers.values())
        return max(0.0, self._next_check - time.monotonic()) if busy else None

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    # -- handing out

    def _hand_out(self) -> None:
        if not self._queue and len(self._workers) <= self._num_workers:
            return
        chunk = max(1, min(self._chunk_size, int(_CHUNK_SECONDS / max(self._mean_s, 1e-9))))
        share = -(-len(self._queue) // self._num_workers)
        size = min(chunk, share)
        active = sorted((w for w in self._workers.values() if w.active), key=lambda w: -w.answered)
        for worker in active[: self._num_workers]:
            if len(worker.calls) <= size // 2:
                self._give(worker, size)
        for surplus in active[self._num_workers :]:
            if not surplus.calls:
                self._dismiss(surplus)
        missing = self._num_workers - len(active)
        while self._queue and missing > 0 and self._spawning < _MAX_SPAWNING and self._free_slots:
            self._give(self._spawn(), size)
            missing -= 1

    def _give(self, worker: WorkerRecord, size: int) -> None:
        if not worker.calls:
            worker.progress_at = time.monotonic()
        while self._queue and len(worker.calls) < size:
            call = self._queue.popleft()
            worker.last_number += 1
            worker.calls[worker.last_number] = call
            worker.outgoing += frame(worker.last_number, call.payload)
        self._send(worker)

    def _spawn(self) -> WorkerRecord:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        worker = WorkerRecord(self._next_worker, self._free_slots.pop(), ours, progress_at=time.monotonic())
        self._next_worker += 1
        self._nursery.board.clear(worker.slot)
        with theirs:
            preload = [self._preload.popleft() for _ in range(len(self._preload))]
            self._nursery.spawn(worker.number, worker.slot, theirs.fileno(), preload)
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
        self._listen(worker)

    def _listen(self, worker: WorkerRecord) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        key = self._selector.get_map().get(worker.channel.fileno())
        if key is not None and key.events != wanted:
            self._selector.modify(worker.channel, wanted, key.data)

    # -- hearing

    def _on_channel(self, worker: WorkerRecord, mask: int) -> None:
        if worker.number not in self._workers:
            return  # its end was reported in the same moment
        if mask & selectors.EVENT_WRITE:
            self._send(worker)
        if mask & selectors.EVENT_READ and not self._read(worker):
            self._selector.unregister(worker.channel)
            # Normally it has exited, which the zygote reports; user code may also have closed the channel.
            if worker.calls and not worker.condemned_at:
                self._condemn(worker, blamed=self._nursery.board.current(worker.slot))

    def _read(self, worker: WorkerRecord) -> bool:
        """Take in what the worker has answered; False at the end of its channel."""
        try:
            data = worker.channel.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for number, payload in worker.frames.feed(data):
            call = worker.calls.pop(number, None)
            reply = json.loads(payload)
            if call is not None and "skipped" in reply:
                self._queue.appendleft(call)
            elif call is not None:  # None: it was taken back
                self._answer(worker, call, reply)
        if worker.taken_back and not worker.calls and not worker.condemned_at:
            worker.lingering_since, worker.taken_back = 0.0, False
            if worker.slowed:  # only the superuser could give it back its priority
                self._dismiss(worker)
        return bool(data)

    def _answer(self, worker: WorkerRecord, call: Call, reply: dict[str, Any]) -> None:
        worker.answered += 1
        worker.progress_at = time.monotonic()
        self._false_starts = 0
        self._answers += 1
        self._mean_s += max(0.02, 1 / (self._answers + 1)) * (reply["seconds"] - self._mean_s)
        if "imported" in reply:
            new = [name for name in reply["imported"] if name not in self._known_modules]
            self._known_modules.update(new)
            self._preload.extend(new)
        if reply.get("fatal"):
            self.stop(RewardError(f"the reward function cannot be used:\n{reply['error']}"))
        if "error" in reply:
            self._failed(call, ERROR, reply["error"])
        else:
            self._on_reply(call, reply)

    def _failed(self, call: Call, outcome: str, message: str) -> None:
        if call.attempts <= self._max_retries:
            call.attempts += 1
            self.counters["retries"] += 1
            self._queue.append(call)
        else:
            self._on_failure(call, outcome, message)

    def _hear_zygote(self) -> None:
        for message in self._nursery.messages(self._nursery.zygote):
            if "spawned" in message:
                self._spawning -= 1
                if message["spawned"] in self._workers:
                    self._workers[message["spawned"]].pid = message["pid"]
            elif "gone" in message:
                self._hear_warden()
                self.stop(self._nursery.lost({"zygote": "gone"}))
            elif "exited" in message:
                self._hear_warden()  # why it was killed, if it was
                worker = self._workers.get(message["exited"])
                if worker is not None:
                    self._bury(worker, message["code"])

    def _hear_warden(self) -> None:
        for message in self._nursery.messages(self._nursery.warden):
            if "over_memory" in message:
                for worker in self._workers.values():
                    if worker.pid == message["over_memory"]:
                        worker.over_memory_mb = message["used_mb"]
            elif "zygote_ended" in message or "gone" in message:
                self.stop(self._nursery.lost(message))

    # -- clocks

    def _check_clocks(self, now: float) -> None:
        board = self._nursery.board
        for worker in list(self._workers.values()):
            started = board.started(worker.slot)
            if worker.condemned_at:
                if now - worker.condemned_at > _UNKILLABLE_S:
                    self._bury(worker, -signal.SIGKILL)
            elif started > 0.0:
                if now - started > self._timeout_s:
                    self._condemn(worker, blamed=board.current(worker.slot))
                else:
                    self._look_closer(worker, now)
            elif worker.calls and now - worker.progress_at > self._start_timeout_s:
                if worker.pid is None:
                    self.stop(self._nursery.lost({"zygote": f"did not start a process in {self._start_timeout_s:g} s"}))
                else:
                    self._condemn(worker, blamed=0)
            if worker.lingering_since and not worker.taken_back and now - worker.lingering_since > _TAKE_BACK_S:
                self._take_back(worker)
        if self._to_kill and self._nursery.kill(self._to_kill):
            self._to_kill.clear()

    def _look_closer(self, worker: WorkerRecord, now: float) -> None:
        """Set a worker aside whose call takes unusually long: by the clock if it waits, by CPU time if it computes."""
        marked_at, marked_cpu_s = self._nursery.board.marked(worker.slot)
        waited = now - marked_at
        if waited < _WAITING_S or worker.pid is None:
            return
        cpu_s, state = cpu_and_state(worker.pid)
        used = cpu_s - marked_cpu_s
        usual = 10 * self._mean_s
        if worker.active and (self._queue or len(worker.calls) > 1):
            stuck = used > max(_COMPUTING_S, usual) if state == "R" else waited > max(_WAITING_S, usual)
            if stuck or waited > max(self._timeout_s / 4, min(usual, self._timeout_s / 2)):
                self._set_aside(worker, now)
        elif worker.lingering_since and not worker.slowed and used > max(_HEAVY_S, self._timeout_s / 50):
            self._slow_down(worker)

    def _set_aside(self, worker: WorkerRecord, now: float) -> None:
        if self._free_slots:
            self._nursery.board.revoke(worker.slot, worker.last_number)
            worker.lingering_since = now

    def _slow_down(self, worker: WorkerRecord) -> None:
        """A few slow calls keep their share of the processor; a crowd of busy loops must not starve all others."""
        if sum(bool(other.lingering_since) for other in self._workers.values()) > self._num_workers:
            worker.slowed = lower_priority(worker.pid or 0)

    def _take_back(self, worker: WorkerRecord) -> None:
        """Give the calls behind a lingering one to others. By now the worker has taken up no further call, or shows it."""
        worker.taken_back = True
        at = self._nursery.board.current(worker.slot)
        back = [number for number in worker.calls if number > at]
        self._queue.extendleft(reversed([worker.calls.pop(number) for number in back]))

    def _condemn(self, worker: WorkerRecord, blamed: int) -> None:
        if worker.pid is None:
            return  # not yet reported by the zygote; the next look at the clocks comes soon
        worker.condemned_at, worker.condemned_call = time.monotonic(), blamed
        self._to_kill.append(worker.pid)

    def _bury(self, worker: WorkerRecord, code: int) -> None:
        """The process has ended: blame the call it was at, give the others to someone else."""
        while self._read(worker) and self._has_data(worker):
            pass
        board = self._nursery.board
        started, current = board.started(worker.slot), board.current(worker.slot)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel)
        worker.channel.close()
        del self._workers[worker.number]
        timed_out = worker.condemned_call != 0 and time.monotonic() - started > self._timeout_s
        guilty = worker.calls.pop(current, None) if started > 0.0 else None
        if guilty is not None and worker.condemned_at and worker.condemned_call != current:
            worker.calls[current], guilty = guilty, None  # the condemned call answered at the last moment
        if not worker.dismissed:
            self.counters["workers_lost"] += 1
            if not worker.answered and guilty is None and worker.condemned_call == 0:
                self._false_start(code)
        self._give_back(worker, without_cause=guilty is None)
        self._free_slots.append(worker.slot)
        if guilty is not None and timed_out:
            self._failed(guilty, TIMEOUT, f"scoring took longer than {self._timeout_s:g} s and was killed")
        elif guilty is not None:
            self._failed(guilty, ERROR, self._cause(worker, code))

    def _has_data(self, worker: WorkerRecord) -> bool:
        try:
            return bool(worker.channel.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _give_back(self, worker: WorkerRecord, without_cause: bool) -> None:
        """Its unanswered calls go to others. If nothing explains its end, the first of them is watched: it may be why."""
        back = [worker.calls[number] for number in sorted(worker.calls)]
        if back and without_cause:
            back[0].handovers += 1
            if back[0].handovers > _MAX_HANDOVERS:
                times = back[0].handovers
                self._failed(
                    back.pop(0), ERROR, f"the scoring process ended {times} times before it came to this sample"
                )
        self._queue.extendleft(reversed(back))

    def _false_start(self, code: int) -> None:
        self._false_starts += 1
        if self._false_starts > _MAX_FALSE_STARTS:
            self.stop(self._nursery.lost({"worker_ended": code}))

    def _cause(self, worker: WorkerRecord, code: int) -> str:
        if worker.over_memory_mb:
            return f"scoring used {worker.over_memory_mb} MB, more than memory_limit_mb allows, and was killed"
        if code >= 0:
            return f"the scoring process exited with status {code} in the middle of a call"
        name = next((member.name for member in signal.Signals if member == -code), f"signal {-code}")
        return f"the scoring process was ended by {name}; the end of the pool's log:\n{self._nursery.log_tail()}"
