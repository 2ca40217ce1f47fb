"""An agent process: many episodes side by side in one event loop, and one socket to the driver.

Frames as in `rewards.worker`: a number, that of an episode or 0, and a payload. To the process: pickled `("run", …)`,
`("answer", …)`. From it, as JSON: a question to the policy, the end of an episode, and with the number 0 that the loop is alive.
An empty frame says that code of that episode is about to run; it is sent at once, so that the driver knows who was at it when the
process ends or its loop stands still.

Nothing that user code does to tasks can stop the frames: they are written and read by callbacks of the loop, not by tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from quadriga.agents.episode import DONE, ERROR, FINISH_REASONS, TIME
from quadriga.agents.load import Agent, AgentSpec, find_agent, load_agent
from quadriga.agents.recorder import FREE, Limits, RecordingPolicy, Texts
from quadriga.agents.task import EpisodeOver, Task, outcome_of
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.rewards.worker import MAX_TRACEBACK, READ_BYTES, Frames, frame, leave
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.service import Sample

ALIVE_S = 0.5
"""The loop says so often that it is alive."""
HEED_S = 2.0
"""A task that was cancelled gets so long to end; else its process takes no new episodes and ends with its last."""
MAX_TOLD = 1 << 16
"""Bytes of JSON that an agent's messages, and what else it tells, may take each; more is cut or left out."""


CANCELLED = "cancelled"
"""What the driver is told where the code of another episode may have cancelled this one."""


@dataclass(frozen=True)
class AgentJob:
    """What agent processes need to know; see `rewards.nursery.Job`."""

    default: str
    agents: dict[str, AgentSpec]
    tokenizer: Any
    chat_template: str | None
    template_kwargs: dict[str, Any]
    end_token_ids: tuple[int, ...]
    limits: Limits
    timeout_s: float
    max_threads: int
    tool_options: dict[str, Any]
    """Keys of `multi_turn` that are about tools."""
    memory_limit_mb: int | None = None

    @property
    def what(self) -> str:
        return f"the agent {self.default}"

    def problem(self, what: str, fix: str) -> QuadrigaError:
        return ConfigError(what, fix)

    @property
    def has_tools(self) -> bool:
        return any(self.tool_options[key] for key in ("tools", "tool_config_path", "function_tool_path"))

    def texts(self) -> Texts:
        options = self.chat_template, self.template_kwargs, self.end_token_ids, self.tool_options["format"]
        return Texts(self.tokenizer, *options)

    def load(self) -> Agents:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process with threads cannot be forked
        return Agents(self)

    def needed_columns(self, loaded: Any) -> list[str]:
        return []

    def serve(self, channel: socket.socket, loaded: Any) -> None:
        asyncio.run(AgentProcess(self, loaded, channel).serve())


class Agents:
    """The agents of a run and what they share, imported before processes are forked."""

    def __init__(self, job: AgentJob) -> None:
        self._job = job
        self._loaded: dict[str, Agent] = {}
        self.texts = job.texts()
        for name in {*job.agents, job.default}:
            if name != "single_turn":
                self.get(name)
        if self.texts.has_template:
            _ = self.texts.template  # a template that cannot be used is found out now

    def get(self, name: str) -> Agent:
        if name not in self._loaded:
            self._loaded[name] = load_agent(find_agent(name, self._job.agents))
        return self._loaded[name]

    @cached_property
    def toolbox(self) -> Any:
        """The run's tools; None without any."""
        given = self._job.tool_options
        if not self._job.has_tools:
            return None
        from quadriga.agents.tools import Toolbox, ToolLimits

        limits = ToolLimits(
            timeout_s=given["tool_timeout_s"],
            max_parallel_calls=given["max_parallel_calls"],
            max_response_length=given["max_tool_response_length"],
            truncate_side=given["tool_response_truncate_side"],
            counts_rewards=given["tool_rewards"],
        )
        return Toolbox.from_config(given["tool_config_path"], given["function_tool_path"], given["tools"], limits)


@dataclass(eq=False)
class _Live:
    """An episode under way."""

    number: int
    policy: RecordingPolicy | None = None
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """All that its code has begun."""
    main: asyncio.Task[Any] | None = None
    answers: dict[int, asyncio.Future[Sample]] = field(default_factory=dict)
    used_s: float = 0.0
    since: float | None = None
    """When its own time began to run."""
    timer: asyncio.TimerHandle | None = None
    timed_out: bool = False
    over: bool = False
    key: str | None = None
    """Of its endpoint, once its agent has asked for one."""


_EPISODE: contextvars.ContextVar[_Live | None] = contextvars.ContextVar("episode", default=None)


class AgentProcess:
    """See the module."""

    def __init__(self, job: AgentJob, agents: Agents, channel: socket.socket) -> None:
        self._job, self._agents, self._channel = job, agents, channel
        self._frames = Frames()
        self._unsent = bytearray()
        self._live: dict[int, _Live] = {}
        self._endpoint: Any = None

    async def serve(self) -> None:
        """Run episodes until the driver closes the channel."""
        self._loop = loop = asyncio.get_running_loop()
        loop.set_task_factory(_in_its_episode)  # type: ignore[arg-type]
        loop.set_default_executor(ThreadPoolExecutor(self._job.max_threads))
        loop.set_exception_handler(lambda _, context: None)  # of tasks that nobody awaits: they are counted as leaked
        self._channel.setblocking(False)
        self._alive()
        try:
            if self._agents.toolbox is not None:
                await self._agents.toolbox.start()
        except QuadrigaError as error:
            self._send(0, {"fatal": [error.what, error.fix]})
        loop.add_reader(self._channel, self._readable)
        while True:  # user code may cancel every task there is, this one included
            try:
                await loop.create_future()
            except asyncio.CancelledError:
                continue

    # ---- the socket ----

    def _readable(self) -> None:
        try:
            data = self._channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            leave()
        for number, payload in self._frames.feed(data):
            kind, *values = pickle.loads(payload)
            if kind == "run":
                self._begin(number, *values)
            elif kind == "answer":
                self._answered(number, *values)

    def _send(self, number: int, message: dict[str, Any] | None = None) -> None:
        self._unsent += frame(number, b"" if message is None else json.dumps(message).encode())
        self._writable()

    def _writable(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._channel.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._channel, self._writable)
            return
        except OSError:
            leave()
        self._loop.remove_writer(self._channel)

    def _alive(self) -> None:
        self._send(0, {"alive": True})
        self._loop.call_later(ALIVE_S, self._alive)

    # ---- episodes ----

    def _begin(self, number: int, agent: str, task: dict[str, Any], sampling: SamplingParams) -> None:
        live = self._live[number] = _Live(number)
        live.policy = RecordingPolicy(
            self._agents.texts,
            self._job.limits,
            sampling,
            partial(self._ask, live),
            partial(self._send_mark, live),
        )
        live.policy.open_endpoint = partial(self._open_endpoint, live)
        context = contextvars.copy_context()
        context.run(_EPISODE.set, live)
        self._send(number)
        self._clock_runs(live)
        live.main = self._loop.create_task(self._conduct(live, agent, Task(**task)), context=context)
        live.main.add_done_callback(lambda ended: self._ended(live, ended))

    def _send_mark(self, live: _Live) -> None:
        if not live.over:
            self._send(live.number)

    async def _conduct(self, live: _Live, agent: str, task: Task) -> dict[str, Any]:
        """What came of the agent; raises nothing."""
        try:
            task.tools = self._agents.toolbox
            returned = await self._agents.get(agent)(task, live.policy)  # type: ignore[arg-type]
            reward, told = outcome_of(returned)
            finish = told.pop("finish_reason", DONE)
            return {"finish": finish if finish in FINISH_REASONS else DONE, "reward": reward, "told": told}
        except EpisodeOver as over:
            return {"finish": over.reason}
        except asyncio.CancelledError as problem:
            if live.timed_out:
                return {"finish": TIME}
            by_others = live.main is not None and live.main.cancelling()
            return {"finish": CANCELLED if by_others else ERROR, "error": _text_of(problem)}
        except BaseException as problem:  # user code may raise anything, SystemExit and KeyboardInterrupt included
            told_over = self._endpoint.over(live.key) if live.key is not None else None
            if isinstance(told_over, EpisodeOver):  # its client was told so, and it let that through
                return {"finish": told_over.reason}
            return {"finish": ERROR, "error": _text_of(problem)}

    def _ended(self, live: _Live, ended: asyncio.Task[Any]) -> None:
        if live.over:
            return
        if ended.cancelled():
            outcome = {"finish": TIME if live.timed_out else CANCELLED, "error": "the agent's task was cancelled"}
        else:
            outcome = ended.result()
        self._close(live, outcome)

    def _close(self, live: _Live, outcome: dict[str, Any]) -> None:
        """Tell the driver how an episode ended, and end what it left behind."""
        live.over = True
        self._clock_stops(live)
        if live.key is not None:
            self._endpoint.dismiss(live.key)
        leaked = [task for task in live.tasks if not task.done()]
        for task in leaked:
            task.cancel()
        del self._live[live.number]
        policy = live.policy
        assert policy is not None
        left = [task for task in leaked if task is not live.main]
        told = {
            "rewards": policy.rewards,
            "answered": policy.answered,
            "given_up": policy.given_up,
            "leaked_tasks": len(left),
            "own_s": live.used_s,
            **policy.counts,
            **outcome,
        }
        try:
            told |= {"told": _plain_within(told.get("told", {})), "messages": _messages_within(policy.messages)}
        except Exception as problem:  # values of the agent's own classes: no end of an episode may be lost over them
            told |= {"told": {}, "finish": ERROR, "error": _text_of(problem)}
        self._send(live.number, {"done": told})
        if leaked:
            self._loop.call_later(HEED_S, self._look_after, leaked)

    def _look_after(self, tasks: list[asyncio.Task[Any]]) -> None:
        if any(not task.done() for task in tasks):
            self._send(0, {"unclean": "a task went on after it was cancelled"})

    # ---- the clock: the agent's own time ----

    def _clock_runs(self, live: _Live) -> None:
        if live.since is None and not live.over:
            live.since = time.monotonic()
            left = max(0.0, self._job.timeout_s - live.used_s)
            live.timer = self._loop.call_later(left, self._time_is_up, live)

    def _clock_stops(self, live: _Live) -> None:
        if live.since is not None:
            live.used_s += time.monotonic() - live.since
            live.since = None
        if live.timer is not None:
            live.timer.cancel()
            live.timer = None

    def _time_is_up(self, live: _Live) -> None:
        live.timed_out = True
        if live.main is not None:
            live.main.cancel()
        self._loop.call_later(HEED_S, self._give_up, live)

    def _give_up(self, live: _Live) -> None:
        if not live.over:
            self._close(live, {"finish": TIME})
            self._send(0, {"unclean": "an agent went on after its time was up"})

    # ---- the policy ----

    def _open_endpoint(self, live: _Live) -> tuple[str, str]:
        """URL and key on which the policy of this episode answers; one server for all episodes of the process."""
        if self._endpoint is None or not self._endpoint.runs:  # user code may have cancelled its task
            from quadriga.agents.endpoint import Endpoint
            from quadriga.agents.endpoint import Limits as CallLimits

            for other in self._live.values():
                other.key = None
            # An answer may have to wait for other weights, for steps on end: that is for the watchdog to judge, as without a client.
            self._endpoint = Endpoint(self._agents.texts.tokenizer, limits=CallLimits(call_s=None), may_set=FREE)
            self._endpoint.open()
        if live.key is None and not live.over:
            live.key = self._endpoint.admit(live.policy)
        return self._endpoint.base_url, live.key or ""

    async def _ask(self, live: _Live, call: int, ids: list[int], params: SamplingParams) -> Sample:
        if live.over:
            raise asyncio.CancelledError
        future = live.answers[call] = self._loop.create_future()
        self._clock_stops(live)
        try:
            self._send(live.number, {"ask": call, "ids": ids, "sampling": vars(params)})
            return await future
        except asyncio.CancelledError:
            if not live.over and live.policy is not None:  # whoever asked has gone: an answer that nobody reads is none
                live.policy.given_up += 1
                self._send(live.number, {"drop": call})
            raise
        finally:
            del live.answers[call]
            if not live.answers:
                self._clock_runs(live)

    def _answered(self, number: int, call: int, sample: tuple[Any, ...]) -> None:
        live = self._live.get(number)
        future = live.answers.get(call) if live is not None else None
        if future is not None and not future.done():
            future.set_result(Sample(*sample))


def _in_its_episode(loop: Any, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """A task, noted with the episode whose code begins it."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    context = options.get("context")
    live = _EPISODE.get() if context is None else context.get(_EPISODE)
    if live is not None:
        live.tasks.add(task)
        task.add_done_callback(live.tasks.discard)
    return task


def _text_of(problem: BaseException) -> str:
    return "".join(traceback.format_exception(problem))[-MAX_TRACEBACK:]


def _messages_within(messages: list[Any]) -> list[Any]:
    """Messages as plain values, the longest texts cut so that all fit."""
    limit = MAX_TOLD
    while True:
        cut = json.loads(json.dumps(messages, default=str), object_hook=partial(_cut_texts, limit))
        if len(json.dumps(cut)) <= MAX_TOLD or limit < 64:
            return cut if len(json.dumps(cut)) <= 16 * MAX_TOLD else cut[:64]
        limit //= 2


def _cut_texts(limit: int, value: dict[str, Any]) -> dict[str, Any]:
    return {k: v[:limit] + " …" if isinstance(v, str) and len(v) > limit else v for k, v in value.items()}


def _plain_within(told: dict[str, Any]) -> dict[str, Any]:
    """What an agent told besides its reward, as JSON has it; what is too long is left out, and what JSON cannot say is text."""
    plain = {}
    for name, value in told.items():
        try:
            text = json.dumps(value, default=_number_or_text)
        except (TypeError, ValueError, RecursionError):  # such as keys that are no text, or a list that holds itself
            text = json.dumps(repr(value))
        if len(text) <= MAX_TOLD:
            plain[name] = json.loads(text)
    return plain


def _number_or_text(value: Any) -> Any:
    item: Callable[[], Any] | None = getattr(value, "item", None)
    try:
        return item() if item is not None else str(value)
    except Exception:  # user code's own class
        return f"<{type(value).__name__}>"
