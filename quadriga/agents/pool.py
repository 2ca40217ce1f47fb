"""The driver's side of agents: gives episodes to processes, carries their questions to the engines and the answers back.

One thread does all of it and never waits for user code. A process that ends or stands still takes no innocent episode with it:
those that it had begun are run again, and as all randomness is a function of the episode, they come out as they would have. Whose
code was running last is the *suspect*. Suspects, and episodes that have seen two deaths, are run alone in a process: what ends a
process or stops its loop there is to blame, and its episode ends with a finish reason of its own.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from quadriga.agents.episode import CRASHED, ERROR, FAILED, STUCK, Call, Episode, rows_of_calls
from quadriga.agents.process import CANCELLED, AgentJob
from quadriga.config.schema_rollout import AgentConfig
from quadriga.errors import ConfigError, QuadrigaError, WorkerError
from quadriga.rewards.nursery import Nursery
from quadriga.rewards.worker import READ_BYTES, Frames, Garbled, frame
from quadriga.rollout.interface import Request, SamplingParams
from quadriga.rollout.service import Sample

CHECK_S = 0.1
MAX_DEATHS = 2
"""An episode that was under way when so many processes ended is run alone."""
MAX_FALSE_STARTS = 3
CLOSING_S = 10.0


@dataclass(frozen=True)
class Start:
    """An episode that is to be run.

    `request` is what its first call is made from: id, random key, step, version, and the whole of its sampling.
    """

    agent: str
    task: dict[str, Any]
    """Fields of `Task`."""
    request: Request
    place: tuple[str, int]
    """Where it belongs: told with the finished episode."""


@dataclass(eq=False)
class _Episode:
    start: Start
    attempts: int = 0
    number: int = 0
    """Of this attempt."""
    deaths: int = 0
    suspect: bool = False
    calls: dict[int, Call] = field(default_factory=dict)
    began_at: float = 0.0

    @property
    def alone(self) -> bool:
        return self.suspect or self.deaths >= MAX_DEATHS


@dataclass(eq=False)
class _Process:
    number: int
    channel: socket.socket
    alone: bool
    """For one suspect at a time."""
    pid: int | None = None
    frames: Frames = field(default_factory=Frames)
    outgoing: bytearray = field(default_factory=bytearray)
    waits_to_write: bool = False
    episodes: dict[int, _Episode] = field(default_factory=dict)
    ran_last: _Episode | None = None
    started_at: float = 0.0
    alive_at: float | None = None
    """When it was last heard of; None: it is still starting."""
    retiring: bool = False
    why: str = ""
    """It was condemned: its loop stands still, or it has used too much memory."""
    stuck: bool = False


class EpisodePool:
    """Runs the episodes of a training run.

    Args:
        job: what the processes need to know.
        start_timeout_s: how long importing the agents may take.
        log_file: where prints of user code go; a temporary file when not given.

    The agents are imported before the constructor returns; the error says why if that fails. Then `connect`.
    """

    def __init__(
        self, job: AgentJob, options: AgentConfig, start_timeout_s: float = 120.0, log_file: str | None = None
    ) -> None:
        self._job, self._options, self._start_timeout_s = job, options, start_timeout_s
        self._log: IO[bytes] = open(log_file, "ab+") if log_file else tempfile.TemporaryFile()  # noqa: SIM115
        self._nursery = self._open_nursery()
        self._lock = threading.Lock()
        self._inbox: deque[tuple[str, Any]] = deque()
        self._queue: deque[_Episode] = deque()
        self._suspects: deque[_Episode] = deque()
        self._processes: dict[int, _Process] = {}
        self._live: dict[int, _Episode] = {}
        self._finished: deque[tuple[tuple[str, int], Episode]] = deque()
        self._numbers = self._spawned = self._false_starts = 0
        self.counters = {"processes_lost": 0, "episodes_again": 0}
        """Since the pool was opened."""
        self._submit: Callable[[list[Request]], None] = lambda requests: None
        self._abort: Callable[[list[str]], None] = lambda ids: None
        self._on_done: Callable[[tuple[str, int], Episode], None] = lambda place, episode: None
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread: threading.Thread | None = None

    def connect(
        self,
        submit: Callable[[list[Request]], None],
        abort: Callable[[list[str]], None],
        on_done: Callable[[tuple[str, int], Episode], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Begin to work. `submit` and `abort` reach the engines; all four are called in the pool's own thread."""
        self._submit, self._abort, self._on_done, self._on_failure = submit, abort, on_done, on_failure
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    # ---- from any thread ----

    def start(self, starts: Iterable[Start]) -> None:
        """Have episodes run, in this order as far as there is room."""
        self._put("start", list(starts))

    @staticmethod
    def owns(request_id: str) -> bool:
        """Whether a request was made by an episode."""
        return "@" in request_id

    def answer(self, samples: Sequence[Sample]) -> None:
        """What engines answered to requests of the pool."""
        self._put("answer", samples)

    def waiting_for(self) -> list[str]:
        """The episodes that are under way, and what each waits for."""
        with self._lock:
            now = time.monotonic()
            return [
                f"{e.start.task['uid']}/{e.start.task['sample_index']} "
                + (
                    f"(turn {len(e.calls)}, {'waits for the policy' if _asks(e) else 'its agent is at work'}, "
                    f"{now - e.began_at:.0f} s)"
                    if e.number
                    else "(not begun)"
                )
                for e in [*self._live.values(), *self._queue, *self._suspects]
            ]

    def close(self) -> None:
        """End all processes and wait for it. Closing twice is no error."""
        self._closed = True
        self._poke()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSING_S)
        elif self._thread is None:
            self._nursery.close()
            self._log.close()

    def _put(self, kind: str, what: Any) -> None:
        self._inbox.append((kind, what))
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake; closed: it is over
            self._wake.send(b".")

    # ---- the thread ----

    def _open_nursery(self) -> Nursery:
        return Nursery(self._job, self._start_timeout_s, self._log)

    def _run(self) -> None:
        try:
            self._selector.register(self._woken, selectors.EVENT_READ, self._hear_poke)
            self._watch_nursery()
            while not self._closed:
                for key, _ in self._selector.select(CHECK_S):
                    if key.fd in self._selector.get_map():  # not struck off by an event before
                        key.data()
                self._obey()
                self._look_at_clocks()
                self._give_out()
                self._hand_out()
        except BaseException as error:  # whoever waits for episodes raises it
            if not self._closed:
                problem = error if isinstance(error, QuadrigaError) else None
                self._on_failure(problem or WorkerError(f"the pool of agents failed: {error!r}"))
        finally:
            for process in list(self._processes.values()):
                process.channel.close()
            self._nursery.close()
            self._selector.close()
            self._log.close()

    def _hear_poke(self) -> None:
        self._woken.recv(4096)

    def _obey(self) -> None:
        while self._inbox:
            kind, what = self._inbox.popleft()
            if kind == "start":
                with self._lock:
                    self._queue += [_Episode(start) for start in what]
            else:
                for sample in what:
                    self._take_answer(sample)

    # ---- nursery ----

    def _watch_nursery(self) -> None:
        nursery = self._nursery
        self._selector.register(nursery.keeper, selectors.EVENT_READ, self._hear_keeper)
        self._selector.register(nursery.zygote, selectors.EVENT_READ, self._hear_zygote)

    def _hear_zygote(self) -> None:
        for message in self._nursery.messages(self._nursery.zygote):
            if message.get("gone"):
                self._renew_nursery()
                return
            if "spawned" in message and (process := self._processes.get(message["spawned"])):
                process.pid = message["pid"]
            if "exited" in message and (process := self._processes.get(message["exited"])):
                self._bury(process, message["code"])

    def _hear_keeper(self) -> None:
        for message in self._nursery.messages(self._nursery.keeper):
            if message.get("gone") or "zygote_ended" in message:
                self._renew_nursery()
                return
            if "over_memory" in message:
                for process in self._processes.values():
                    if process.pid == message["over_memory"]:
                        process.why = f"it used {message['used_mb']} MB, more than agent.memory_limit_mb"

    def _renew_nursery(self) -> None:
        """Keeper or zygote is gone, and all processes with it."""
        for control in (self._nursery.keeper, self._nursery.zygote):
            self._selector.unregister(control)
        self._nursery.close()
        for process in list(self._processes.values()):
            process.ran_last = None if not process.alone else process.ran_last
            self._bury(process, -signal.SIGKILL)
        self._count_false_start("keeper or zygote ended")
        self._nursery = self._open_nursery()
        self._watch_nursery()

    def _count_false_start(self, why: str) -> None:
        self._false_starts += 1
        if self._false_starts > MAX_FALSE_STARTS:
            raise self._nursery.lost(why)

    # ---- processes ----

    def _spawn(self, alone: bool) -> _Process:
        self._spawned += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = _Process(self._spawned, ours, alone, started_at=time.monotonic())
        self._processes[process.number] = process
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear(process))
        self._nursery.spawn(process.number, theirs.fileno(), [])
        theirs.close()
        return process

    def _hear(self, process: _Process) -> None:
        self._flush(process)
        try:
            data = process.channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it has ended, or closed its channel: the zygote will tell
            self._selector.unregister(process.channel)
            self._condemn(process, "it closed its channel to the driver")
            return
        self._read(process, data)

    def _read(self, process: _Process, data: bytes) -> None:
        try:
            for number, payload in process.frames.feed(data):
                self._frame(process, number, payload)
        except ConfigError:
            raise
        except (Garbled, ValueError, KeyError, TypeError, AttributeError) as error:
            self._condemn(process, f"user code has written to its channel: {error}")

    def _frame(self, process: _Process, number: int, payload: bytes) -> None:
        process.alive_at = time.monotonic()
        episode = process.episodes.get(number)
        if not payload:
            process.ran_last = episode or process.ran_last
            return
        message = json.loads(payload)
        if "fatal" in message:
            raise ConfigError(*message["fatal"])
        if "unclean" in message:
            process.retiring = True
        if episode is None:
            return
        if "ask" in message:
            self._ask(episode, message)
        elif "drop" in message:
            self._drop_calls(episode, [int(message["drop"])])
        elif "done" in message:
            self._false_starts = 0
            if message["done"]["finish"] != CANCELLED:
                self._finish(episode, message["done"])
            elif process.alone:
                self._finish(episode, {**message["done"], "finish": ERROR})
            else:
                episode.suspect = True
                self._again(episode)
            del process.episodes[number]  # not before: what cannot be read leaves it with the process, which ends
            if process.ran_last is episode:
                process.ran_last = None

    def _flush(self, process: _Process) -> None:
        try:
            while process.outgoing:
                del process.outgoing[: process.channel.send(process.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended
            process.outgoing.clear()
        if bool(process.outgoing) != process.waits_to_write:
            process.waits_to_write = bool(process.outgoing)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.outgoing else 0)
            with contextlib.suppress(KeyError):  # it has closed its end
                self._selector.modify(process.channel, events, lambda: self._hear(process))

    def _condemn(self, process: _Process, why: str) -> None:
        process.why = process.why or why
        if process.pid is not None:
            self._nursery.kill([process.pid])

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        for process in list(self._processes.values()):
            if process.retiring and not process.episodes:
                self._dismiss(process)
            elif process.why:
                self._condemn(process, process.why)  # until its end is told
            elif process.alive_at is None and now - process.started_at > self._start_timeout_s:
                self._count_false_start(f"no process was started in {self._start_timeout_s:g} s")
                self._condemn(process, "it did not start")
            elif process.alive_at is not None and now - process.alive_at > self._options.stall_s:
                process.stuck = True
                self._condemn(process, f"its event loop stood still for {self._options.stall_s:g} s")

    def _dismiss(self, process: _Process) -> None:
        """End a process that has nothing to do. Its leftovers may not heed the end of the channel, so it is killed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(process.channel)
        process.channel.close()
        del self._processes[process.number]
        if process.pid is not None:
            self._nursery.kill([process.pid])

    def _bury(self, process: _Process, code: int) -> None:
        """The process has ended: run again what it had begun, and find out whose fault it was."""
        with contextlib.suppress(OSError):
            while data := process.channel.recv(READ_BYTES):  # its last words
                self._read(process, data)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(process.channel)
        process.channel.close()
        self._processes.pop(process.number, None)
        if process.alive_at is None:
            self._count_false_start(f"status {code}")
        if process.episodes:
            self.counters["processes_lost"] += 1
        why = process.why or self._cause(code)
        for episode in list(process.episodes.values()):
            if process.alone:
                self._finish(episode, {"finish": STUCK if process.stuck else CRASHED, "error": why})
                continue
            episode.deaths += 1
            episode.suspect = episode.suspect or episode is process.ran_last
            self._again(episode)

    def _again(self, episode: _Episode) -> None:
        self.counters["episodes_again"] += 1
        self._drop_calls(episode)
        with self._lock:
            del self._live[episode.number]
            episode.number = 0
            (self._suspects if episode.alone else self._queue).appendleft(episode)

    def _cause(self, code: int) -> str:
        if code >= 0:
            return f"the agent's process exited with status {code}"
        name = next((member.name for member in signal.Signals if member == -code), f"signal {-code}")
        return f"the agent's process was ended by {name}; the end of the log:\n{self._nursery.log_tail()}"

    # ---- episodes ----

    def _hand_out(self) -> None:
        """Give waiting episodes to processes that have room."""
        common = [p for p in self._processes.values() if not (p.alone or p.retiring or p.why)]
        if self._queue:
            for _ in range(len(common), min(self._options.num_workers, len(common) + len(self._queue))):
                common.append(self._spawn(alone=False))
        while self._queue and common:
            process = min(common, key=lambda p: len(p.episodes))
            if len(process.episodes) >= self._options.max_concurrent:
                break
            with self._lock:
                episode = self._queue.popleft()
            self._begin(process, episode)
        idle = [p for p in self._processes.values() if p.alone and not (p.episodes or p.retiring or p.why)]
        while self._suspects:
            if not idle:
                if sum(p.alone for p in self._processes.values()) >= self._options.num_workers:
                    break
                idle.append(self._spawn(alone=True))
            with self._lock:
                episode = self._suspects.popleft()
            self._begin(idle.pop(), episode)

    def _begin(self, process: _Process, episode: _Episode) -> None:
        self._numbers += 1
        with self._lock:
            episode.number, episode.calls = self._numbers, {}
            episode.attempts += 1
            episode.began_at = time.monotonic()
            self._live[episode.number] = episode
        process.episodes[episode.number] = episode
        start = episode.start
        self._tell(process, episode.number, "run", start.agent, start.task, start.request.params)

    def _tell(self, process: _Process, number: int, *what: Any) -> None:
        process.outgoing += frame(number, pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL))
        self._flush(process)

    def _ask(self, episode: _Episode, message: dict[str, Any]) -> None:
        first, call = episode.start.request, int(message["ask"])
        try:
            params = SamplingParams(**message["sampling"])
        except ConfigError as error:  # not by the recorder, which has checked it
            raise Garbled(str(error)) from error
        ids = [int(token) for token in message["ids"]]
        self._job.limits.check(ids, params.max_new_tokens)  # what cannot run would end the engine
        episode.calls[call] = Call(ids)
        request = Request(
            f"{first.request_id}@{episode.number}.{call}",
            episode.calls[call].prompt_ids,
            params,
            first.uid,
            first.sample_indices,
            first.step,
            None,
            first.version,
            call=call,
            affinity=first.request_id,
        )
        self._submit([request])

    def _take_answer(self, sample: Sample) -> None:
        number, _, call = sample.request_id.rpartition("@")[2].partition(".")
        episode = self._live.get(int(number))
        if episode is None:  # it has ended, or was begun again
            return
        episode.calls[int(call)].sample = sample
        process = next(p for p in self._processes.values() if int(number) in p.episodes)
        self._tell(process, episode.number, "answer", int(call), tuple(sample))

    def _drop_calls(self, episode: _Episode, which: Sequence[int] | None = None) -> None:
        """End what engines still write for an episode, or for `which` of its calls: nobody waits for it."""
        waiting = _asks(episode) if which is None else [k for k in _asks(episode) if k in which]
        asked = [f"{episode.start.request.request_id}@{episode.number}.{k}" for k in waiting]
        if asked:
            self._abort(asked)

    def _finish(self, episode: _Episode, said: dict[str, Any]) -> None:
        """What its process said of an episode that has ended, or what we say of its process. Changes nothing if that is nonsense."""
        heard = set(said.get("answered", episode.calls))  # not what was written for somebody who had gone
        calls = [call for number, call in sorted(episode.calls.items()) if number in heard]
        for number, reward in said.get("rewards", {}).items():
            if int(number) in episode.calls:
                episode.calls[int(number)].reward = float(reward)
        reward = said.get("reward")
        done = (
            episode.start.place,
            Episode(
                rows=rows_of_calls(calls, episode.start.request.prompt_ids),
                finish_reason=str(said["finish"]),
                reward=None if reward is None else float(reward),
                turn_rewards=bool(said.get("rewards")),
                told=dict(said.get("told", {})),
                messages=list(said.get("messages", [])),
                turns=sum(call.sample is not None for call in calls),
                tool_calls=int(said.get("tool_calls", 0)),
                tool_errors=int(said.get("tool_errors", 0)),
                given_up=int(said.get("given_up", 0)),
                attempts=episode.attempts,
                leaked_tasks=int(said.get("leaked_tasks", 0)),
                own_s=float(said.get("own_s", 0.0)),
                error=said.get("error") if said["finish"] in FAILED else None,
            ),
        )
        self._drop_calls(episode)
        with self._lock:
            del self._live[episode.number]
        self._finished.append(done)

    def _give_out(self) -> None:
        """Tell of finished episodes: not while frames are read, whose errors are user code's."""
        while self._finished:
            self._on_done(*self._finished.popleft())


def _asks(episode: _Episode) -> list[int]:
    """The calls of an episode that are not answered."""
    return [number for number, call in list(episode.calls.items()) if call.sample is None]
