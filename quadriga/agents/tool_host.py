"""What runs in a tool process: it imports the user's tools, and makes one call after the other.

An order is pickled `(what, *values)`, an answer is JSON. `describe`: the tools and their schemas. `call`: a function. `execute`: a
tool with state, which is made on its first call and lives as long as the process. `release`: their ends. User code that hangs,
crashes or fills the memory ends this process at worst; who waits for it has a deadline.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import os
import pickle
import socket
import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from quadriga.errors import ConfigError, QuadrigaError
from quadriga.registry import import_named, import_place
from quadriga.rewards.processes import end_children, has_children, parents
from quadriga.rewards.worker import READ_BYTES, Frames, frame, leave

MAX_RESULT_CHARACTERS = 1 << 20
"""More of a result never leaves the process."""
_KEY = "multi_turn.tool_config_path or function_tool_path"


@dataclass(frozen=True)
class ToolSource:
    """Where a tool is found.

    `target`: `module:name` or `file.py:name` of a function or a class; a bare file or module stands for all of its tools.
    """

    target: str
    config: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | None = None
    pickled: str | None = None
    """The tool itself, where no import would find it; `target` then only names it."""


@dataclass(frozen=True)
class ToolJob:
    """The tools of a run, as their processes need them; see `rewards.nursery.Job`."""

    sources: tuple[ToolSource, ...]
    memory_limit_mb: int | None = None

    @property
    def what(self) -> str:
        return f"the tools {', '.join(source.target for source in self.sources)}"

    def problem(self, what: str, fix: str) -> QuadrigaError:
        return ConfigError(what, fix)

    def load(self) -> ToolHost:
        return ToolHost(self.sources)

    def needed_columns(self, loaded: ToolHost) -> list[str]:
        return []

    def serve(self, channel: socket.socket, loaded: ToolHost) -> None:
        loaded.serve(channel)


@dataclass
class _Tool:
    made_by: Any
    """The function, or the class."""
    source: ToolSource
    schema: dict[str, Any] | None
    name: str


@dataclass
class _Instance:
    tool: Any
    instance_id: Any


class ToolHost:
    """See the module. Made in the zygote, where user code is imported once."""

    def __init__(self, sources: tuple[ToolSource, ...]) -> None:
        self.tools: dict[str, _Tool] = {}
        for source in sources:
            for tool in _tools_of(source):
                if tool.name in self.tools:
                    raise ConfigError(f"two tools are called {tool.name!r}", "rename one of them")
                self.tools[tool.name] = tool
        self._instances: dict[str, _Instance] = {}
        self._agent_data = SimpleNamespace(extra_fields={})
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve(self, channel: socket.socket) -> NoReturn:
        """Answer orders until the other side closes the channel."""
        mine = parents() if has_children() else {}
        helpers = frozenset(child for child, parent in mine.items() if parent == os.getpid())
        frames = Frames()
        while data := channel.recv(READ_BYTES):
            for number, payload in frames.feed(data):
                answer = self.obey(*pickle.loads(payload))
                if not self._instances and has_children():  # what a call starts ends with it, unless it is state
                    end_children(keep=helpers)
                channel.sendall(frame(number, json.dumps(answer).encode()))
        leave()

    def obey(self, what: str, *values: Any) -> dict[str, Any]:
        try:
            return getattr(self, f"_{what}")(*values)
        except BaseException as problem:  # user code may raise anything, SystemExit and KeyboardInterrupt included
            if not isinstance(problem, TimeoutError):
                traceback.print_exc()
            kind = "timeout" if isinstance(problem, TimeoutError) else "error"
            return {"error": kind, "text": f"{type(problem).__name__}: {problem}"[:MAX_RESULT_CHARACTERS]}

    def _describe(self) -> dict[str, Any]:
        from transformers.utils import get_json_schema

        described, wrong = [], []
        for tool in self.tools.values():
            stateful = inspect.isclass(tool.made_by)
            schema = tool.schema
            if schema is None and stateful:
                schema = _own_schema(tool)
            if schema is None and not stateful:
                try:
                    schema = get_json_schema(tool.made_by)
                    schema["function"]["name"] = tool.name  # the decorator may have given it another
                except Exception as problem:  # what transformers says of the hints or the docstring
                    wrong.append(f"the tool {tool.name!r} has no schema: {problem}")
            if schema is None:
                wrong.append(f"the tool {tool.name!r} has no schema")
            else:
                described.append({"key": tool.name, "schema": _plain_schema(schema, tool.name), "stateful": stateful})
        return {"wrong": wrong[0]} if wrong else {"tools": described}

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return _as_result(self._run(self.tools[name].made_by(**arguments)))

    def _execute(self, name: str, arguments: dict[str, Any], create_kwargs: dict[str, Any]) -> dict[str, Any]:
        if name not in self._instances:
            self._instances[name] = self._create(self.tools[name], create_kwargs)
        instance = self._instances[name]
        takes = inspect.signature(instance.tool.execute).parameters
        more = {"agent_data": self._agent_data} if _takes(takes, "agent_data") else {}
        return _as_result(self._run(instance.tool.execute(instance.instance_id, arguments, **more)))

    def _create(self, tool: _Tool, create_kwargs: dict[str, Any]) -> _Instance:
        made = _construct(tool)
        takes = inspect.signature(made.create).parameters
        given = {"create_kwargs": create_kwargs} if "create_kwargs" in takes else create_kwargs
        returned = self._run(made.create(**given))
        return _Instance(made, returned[0] if isinstance(returned, tuple) else returned)

    def _release(self) -> dict[str, Any]:
        """Rewards of the tools that have one, by name; each tool is released once, whatever another one does."""
        rewards, problems = {}, []
        for name, instance in self._instances.items():
            for part in ("calc_reward", "release"):
                try:
                    value = (
                        self._run(getattr(instance.tool, part)(instance.instance_id))
                        if hasattr(instance.tool, part)
                        else None
                    )
                    if part == "calc_reward" and value:
                        rewards[name] = float(value)
                except BaseException as problem:  # user code
                    traceback.print_exc()
                    problems.append(f"{name}.{part}: {type(problem).__name__}: {problem}")
        self._instances.clear()
        return {"rewards": rewards, "problems": problems}

    def _run(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value


def _tools_of(source: ToolSource) -> list[_Tool]:
    if source.pickled is not None:
        import cloudpickle

        made_by = cloudpickle.loads(base64.b64decode(source.pickled))
        return [_tool(made_by, source)]
    place, colon, name = source.target.rpartition(":")
    if colon and name.isidentifier():
        return [_tool(import_named(place, name, _KEY), source)]
    module = import_place(source.target, _KEY)
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    marked = [value for value in own if hasattr(value, "_quadriga_tool")]
    found = marked or [f for f in own if inspect.isfunction(f) and inspect.getdoc(f) and not f.__name__.startswith("_")]
    if not found:
        raise ConfigError(
            f"{source.target} has no tool", "decorate a function with @function_tool, or give it a docstring"
        )
    return [_tool(function, source) for function in found]


def _tool(made_by: Any, source: ToolSource) -> _Tool:
    if not callable(made_by):
        raise ConfigError(f"{source.target} is no tool", "name a function, or a class with `execute`")
    if inspect.isclass(made_by):
        for part in ("create", "execute"):
            if not callable(getattr(made_by, part, None)):
                raise ConfigError(f"the tool class {source.target} has no `{part}`", "derive it from BaseTool")
    name, schema = getattr(made_by, "_quadriga_tool", (None, None))
    schema = source.schema or schema or None
    name = (schema or {}).get("function", schema or {}).get("name") or name or made_by.__name__
    return _Tool(made_by, source, schema, name)


def _construct(tool: _Tool) -> Any:
    """verl's classes take `(config, tool_schema)`; one that takes nothing is made without."""
    takes = inspect.signature(tool.made_by).parameters
    given = {"config": dict(tool.source.config), "tool_schema": tool.schema}
    return tool.made_by(**{name: value for name, value in given.items() if _takes(takes, name)})


def _own_schema(tool: _Tool) -> dict[str, Any] | None:
    """What a tool object says of itself: verl's `get_openai_tool_schema`, or `tool_schema`."""
    made = _construct(tool)
    if hasattr(made, "get_openai_tool_schema"):
        return made.get_openai_tool_schema()
    return getattr(made, "tool_schema", None)


def _plain_schema(schema: Any, name: str) -> dict[str, Any]:
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_none=True)
    function = schema.get("function", schema)
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}, **function},
    }


def _takes(parameters: Any, name: str) -> bool:
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _as_result(returned: Any) -> dict[str, Any]:
    """`response`, or `(response[, reward[, metrics]])`, as plain data."""
    reward, metrics = 0.0, {}
    if isinstance(returned, tuple) and 1 <= len(returned) <= 3:
        response, *more = returned
        reward = float(more[0] or 0.0) if more else 0.0
        if not math.isfinite(reward):
            raise ValueError(f"the tool gave the reward {reward}")
        metrics = (
            {str(k): float(v) for k, v in (more[1] or {}).items() if isinstance(v, (int, float))} if more[1:] else {}
        )
    else:
        response = returned
    text, binary = _as_text(response)
    result = {"text": text[: MAX_RESULT_CHARACTERS + 1], "reward": reward, "metrics": metrics, "length": len(text)}
    if len(text) > MAX_RESULT_CHARACTERS:  # both ends: which of them is kept is decided elsewhere
        result["text"] = text[: MAX_RESULT_CHARACTERS // 2] + text[-MAX_RESULT_CHARACTERS // 2 :]
    return {**result, "error": "binary"} if binary else result


def _as_text(response: Any) -> tuple[str, bool]:
    """Text, and whether it stands for something that is no text."""
    if isinstance(response, str):
        return response, False
    if isinstance(response, (bytes, bytearray, memoryview)):
        try:
            text = bytes(response).decode()
            if "\x00" not in text:
                return text, False
        except UnicodeDecodeError:
            pass
        return f"Error: the tool returned {len(bytes(response))} bytes that are no text.", True
    if response is None:
        return "", False
    if not isinstance(response, dict) and hasattr(response, "text") and hasattr(response, "image"):
        if response.image or getattr(response, "video", None):
            return "Error: the tool returned an image or a video, which cannot be read here.", True
        return response.text or "", False
    try:
        return json.dumps(response, ensure_ascii=False), False
    except (TypeError, ValueError):
        return str(response), False
