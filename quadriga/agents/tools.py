"""Tools that the policy may call.

    async with Toolbox(["calculator", "my_tools.py:search"]) as toolbox:
        async with toolbox.session() as tools:               # one for each episode
            answer = await policy.generate(messages, tools=tools.schemas)
            results = await tools.call_all(answer.tool_calls)

A function with type hints and a docstring is a tool; so is a class with state (`BaseTool`), of which every episode gets its own. Tools
run in processes that can be killed. A call that fails, whatever the reason, is a text for the policy and a count for us.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quadriga.agents.mcp_tools import McpFailed, McpServer, check_package, read_servers
from quadriga.agents.policy import Message, ToolCall
from quadriga.agents.tool_host import ToolJob, ToolSource
from quadriga.agents.tool_processes import ProcessGone, ToolProcess, ToolProcesses, own_task
from quadriga.errors import ConfigError

BUILT_IN = ("calculator", "python")
KINDS = ("unreadable", "unknown_tool", "bad_arguments", "timeout", "crash", "error", "binary", "dropped")
"""What may become of a call besides success."""
TRUNCATED = "...(truncated)..."


@dataclass(frozen=True)
class ToolLimits:
    """Bounds of tool calls."""

    timeout_s: float = 30.0
    """Of one call; its process is killed when it passes."""
    max_concurrent: int = 64
    """Calls that run at once, each in a process; others wait their turn."""
    max_parallel_calls: int = 1
    """Calls of one answer that are made; those beyond get a text that says so."""
    max_response_length: int = 256
    """Characters of a result that the policy reads."""
    truncate_side: str = "middle"
    """Which part of a longer result is cut off: left, right or middle."""
    counts_rewards: bool = True
    """Whether what tools give is part of an episode's reward."""
    memory_limit_mb: int | None = 2048
    """Of one tool process."""
    start_timeout_s: float = 60.0
    """For importing the tools, and for an MCP server to list its own."""

    def __post_init__(self) -> None:
        if self.truncate_side not in ("left", "right", "middle"):
            raise ConfigError(
                f"tool_response_truncate_side={self.truncate_side!r} is none of left, right, middle",
                "choose one of them",
            )
        if min(self.timeout_s, self.max_concurrent, self.max_parallel_calls, self.max_response_length) <= 0:
            raise ConfigError(f"a limit of tool calls is not above 0: {self}", "give a number above 0")


@dataclass(frozen=True)
class ToolResult:
    """What came of a call. `text` is what the policy reads, whatever happened."""

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    """One of `KINDS`, or None."""
    truncated: bool = False
    seconds: float = 0.0
    name: str = ""
    call_id: str = ""

    @property
    def message(self) -> Message:
        return {"role": "tool", "name": self.name, "tool_call_id": self.call_id, "content": self.text}


@dataclass
class ToolResponse:
    """What a `BaseTool` may return beside plain text."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """A tool with state: made and created once for an episode, executed often, released once. In verl's words.

    Args:
        config: what the tool's entry in `tool_config_path` says.
        tool_schema: its schema there; None: override `get_openai_tool_schema`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config, self.tool_schema = config, tool_schema

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Before the first call of an episode; `kwargs`: the row's `tools_kwargs[name]["create_kwargs"]`."""
        return instance_id or "0", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """One call: the response, or (response, reward, metrics)."""
        raise NotImplementedError(f"{type(self).__name__} must define `execute`")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """At the end of the episode, before `release`."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """At the end of the episode."""


def function_tool(name: Any = None, *, schema: dict[str, Any] | None = None) -> Any:
    """Decorator: this function of a `function_tool_path` is a tool; others of that file are not."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function._quadriga_tool = (name if isinstance(name, str) else None, schema)  # type: ignore[attr-defined]
        return function

    return mark(name) if callable(name) else mark


@dataclass(frozen=True)
class _Kind:
    """A tool as it is called."""

    schema: dict[str, Any]
    key: str
    """Its name where it runs; the policy calls it by the name in its schema."""
    stateful: bool = False
    server: McpServer | None = None


class Toolbox:
    """The tools of a run, in one event loop.

    Args:
        tools: `calculator`, `python`; `file.py:name` or `module:name`; a function or a class; or a `ToolSource`.
        servers: MCP servers by name, as in a `mcpServers` file; `(spec, names of the tools to take, or None for all)`.
        limits: see `ToolLimits`.
    """

    def __init__(
        self,
        tools: Iterable[str | Callable[..., Any] | ToolSource] = (),
        servers: Mapping[str, tuple[Mapping[str, Any], Sequence[str] | None]] | None = None,
        limits: ToolLimits | None = None,
    ) -> None:
        self.limits = limits or ToolLimits()
        self._sources = tuple(as_source(tool) for tool in tools)
        self._wanted_servers = dict(servers or {})
        if not self._sources and not self._wanted_servers:
            raise ConfigError("there are no tools", "name some, or set tool_config_path or function_tool_path")
        if self._wanted_servers:
            check_package()
        self.counts: Counter[str] = Counter()
        """Calls, by what came of them: `calls`, `truncated`, and `KINDS`."""
        self._kinds: dict[str, _Kind] = {}
        self._started: asyncio.Task[None] | None = None

    @classmethod
    def from_config(
        cls,
        tool_config_path: str | None = None,
        function_tool_path: str | None = None,
        tools: Iterable[str] = (),
        limits: ToolLimits | None = None,
    ) -> Toolbox:
        """From the keys of `multi_turn`. ConfigError where a file does not say what it should."""
        sources: list[str | ToolSource] = list(tools)
        servers: dict[str, tuple[Mapping[str, Any], Sequence[str] | None]] = {}
        if tool_config_path:
            more, servers = read_tool_config(tool_config_path)
            sources += more
        if function_tool_path:
            sources.append(ToolSource(_absolute(function_tool_path)))
        return cls(sources, servers, limits)

    # -- life

    async def start(self) -> None:
        """Import the tools and connect to the servers; once, however often it is called.

        Raises:
            ConfigError: a tool cannot be imported or has no schema, a server cannot be reached, or two have one name.
        """
        if self._started is None:
            self._started = own_task(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        self._running = asyncio.Semaphore(self.limits.max_concurrent)
        self._idle: list[ToolProcess] = []
        self._servers: list[McpServer] = []
        self._left_out: list[str] = []
        self._processes = ToolProcesses(
            ToolJob(self._sources, self.limits.memory_limit_mb), self.limits.start_timeout_s
        )
        try:
            if self._sources:
                await self._describe()
            for name, (spec, selected) in self._wanted_servers.items():
                await self._connect(name, spec, selected)
            wanted = [tool for _, selected in self._wanted_servers.values() for tool in selected or ()]
            if missing := [tool for tool in wanted if tool not in self._kinds]:
                raise ConfigError(
                    f"no MCP server has a tool {missing[0]!r}; there are: {', '.join([*self._kinds, *self._left_out])}",
                    "correct tool_selected_list",
                )
        except BaseException:
            await self._close()
            raise

    async def _describe(self) -> None:
        process = await self._processes.spawn()
        try:
            said = await self._processes.ask(process, self.limits.start_timeout_s, "describe")
        except ProcessGone as gone:
            raise ConfigError(f"the tools cannot be described: {gone.text}", "mend their module") from gone
        self._processes.end(process)  # it has imported more than a call needs
        if wrong := said.get("wrong") or (said["text"] if "error" in said else None):
            raise ConfigError(wrong, "give every parameter a type hint and a line under `Args:` in the docstring")
        for tool in said["tools"]:
            self._add(_Kind(tool["schema"], tool["key"], tool["stateful"]))

    async def _connect(self, name: str, spec: Mapping[str, Any], selected: Sequence[str] | None) -> None:
        server = McpServer(name, spec, self.limits.start_timeout_s)
        self._servers.append(server)
        await server.start()
        for schema in server.schemas:
            tool = schema["function"]["name"]
            if selected is None or tool in selected:
                self._add(_Kind(schema, tool, server=server))
            else:
                self._left_out.append(tool)

    def _add(self, kind: _Kind) -> None:
        name = kind.schema["function"]["name"]
        if name in self._kinds:
            raise ConfigError(f"two tools are called {name!r}", "rename one of them, or select others")
        self._kinds[name] = kind

    async def close(self) -> None:
        """End all processes of the tools, and the servers that were started for them."""
        if self._started is not None:
            await asyncio.wait({self._started})
            if self._started.exception() is None:
                await self._close()
            self._started = None

    async def _close(self) -> None:
        await self._processes.close()
        for server in self._servers:
            await server.close()
        self._kinds.clear()

    async def __aenter__(self) -> Toolbox:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- use

    @property
    def names(self) -> list[str]:
        return list(self._kinds)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [kind.schema for kind in self._kinds.values()]

    def session(
        self, create_kwargs: Mapping[str, Mapping[str, Any]] | None = None, only: Sequence[str] | None = None
    ) -> ToolSession:
        """The tools of one episode.

        Args:
            create_kwargs: for tools with state, by name (the row's `tools_kwargs`, verl's `{name: {"create_kwargs": …}}` too).
            only: names of the tools that this episode may use; None: all.
        """
        return ToolSession(self, create_kwargs or {}, only)

    async def _call_function(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        process = self._idle.pop() if self._idle else await self._processes.spawn()
        if not process.usable:
            return await self._call_function(name, arguments)
        answer = await self._processes.ask(process, self.limits.timeout_s, "call", name, arguments)
        self._idle.append(process)
        return answer

    def _cut(self, text: str, whole_length: int) -> str:
        """At most `max_response_length` characters, and a mark where something is missing."""
        limit, side = self.limits.max_response_length, self.limits.truncate_side
        if whole_length <= limit:
            return text
        if side == "left":
            return TRUNCATED + text[-limit:]
        if side == "right":
            return text[:limit] + TRUNCATED
        tail = limit // 2
        return text[: limit - tail] + TRUNCATED + (text[-tail:] if tail else "")


class ToolSession:
    """One episode's tools. Its tools with state live in a process of its own, from their first call to `close`."""

    def __init__(
        self, toolbox: Toolbox, create_kwargs: Mapping[str, Mapping[str, Any]], only: Sequence[str] | None
    ) -> None:
        self._toolbox, self._create_kwargs, self._only = toolbox, create_kwargs, only
        self._process: ToolProcess | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self.counts: Counter[str] = Counter()
        self.rewards: dict[str, float] = {}
        """What tools with state gave the episode as it was closed, by name."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the policy is shown. Empty before the toolbox has been started."""
        return [kind.schema for name, kind in self._toolbox._kinds.items() if self._only is None or name in self._only]

    async def __aenter__(self) -> ToolSession:
        await self._toolbox.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """All calls of one answer side by side; the results in their order."""
        limit = self._toolbox.limits.max_parallel_calls
        made = [self.call(call) for call in calls[:limit]]
        text = f"Error: only {limit} of these calls {'is' if limit == 1 else 'are'} made at once. Call again."
        dropped = [
            self._counted(ToolResult(text, error="dropped", name=call.name, call_id=call.call_id))
            for call in calls[limit:]
        ]
        return [*await asyncio.gather(*made), *dropped]

    async def call(self, call: ToolCall) -> ToolResult:
        """Make a call. It never raises for what the policy or a tool did."""
        await self._toolbox.start()
        began = time.monotonic()
        try:
            result = await self._made(call)
        except ProcessGone as gone:
            result = {"error": gone.kind, "text": f"Error: the tool did not work: {gone.text}."}
        except McpFailed as failed:
            result = {"error": failed.kind, "text": f"Error: the tool did not work: {failed.text}."}
        text = result["text"].encode("utf-8", "replace").decode()
        if result.get("error") in ("error", "timeout") and not text.startswith("Error: "):
            text = f"Error: {text}"
        length = max(result.get("length", 0), len(text))
        cut = self._toolbox._cut(text, length)
        return self._counted(
            ToolResult(
                cut,
                result.get("reward", 0.0),
                result.get("metrics", {}),
                result.get("error"),
                length > self._toolbox.limits.max_response_length,
                time.monotonic() - began,
                call.name,
                call.call_id,
            )
        )

    async def close(self) -> dict[str, float]:
        """Release the tools with state; their rewards. Closing twice is no error."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None and process.usable:
            processes = self._toolbox._processes
            try:
                async with self._turn:
                    said = await processes.ask(process, self._toolbox.limits.timeout_s, "release")
                given = said.get("rewards", {})
                kinds = self._toolbox._kinds
                self.rewards = {
                    name: given[kind.key] for name, kind in kinds.items() if kind.stateful and kind.key in given
                }
                if said.get("problems") or "error" in said:
                    self._count("error")
            except ProcessGone as gone:
                self._count(gone.kind)
            finally:
                processes.end(process)
        return self.rewards

    async def _made(self, call: ToolCall) -> dict[str, Any]:
        if call.error is not None or call.arguments is None:
            return {"error": "unreadable", "text": f"Error: this tool call cannot be read: {call.error}."}
        kind = self._toolbox._kinds.get(call.name)
        if kind is None or (self._only is not None and call.name not in self._only):
            known = ", ".join(schema["function"]["name"] for schema in self.schemas)
            return {"error": "unknown_tool", "text": f"Error: there is no tool {call.name!r}. There are: {known}."}
        if wrong := wrong_arguments(call.arguments, kind.schema["function"].get("parameters") or {}):
            return {"error": "bad_arguments", "text": f"Error: {wrong}."}
        toolbox = self._toolbox
        async with toolbox._running:
            if kind.server is not None:
                text, failed = await kind.server.call(kind.key, call.arguments, toolbox.limits.timeout_s)
                return {"text": text, **({"error": "error"} if failed else {})}
            if kind.stateful:
                return await self._with_state(call.name, kind.key, call.arguments)
            return await toolbox._call_function(kind.key, call.arguments)

    async def _with_state(self, name: str, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
        toolbox = self._toolbox
        async with self._turn:
            if self._closed:
                return {"error": "error", "text": "Error: the episode is over."}
            if self._process is None or not self._process.usable:  # none yet, or its state is lost
                self._process = await toolbox._processes.spawn()
            create = dict(self._create_kwargs.get(name, {}))
            create = dict(create.get("create_kwargs", create))
            return await toolbox._processes.ask(
                self._process, toolbox.limits.timeout_s, "execute", key, arguments, create
            )

    def _counted(self, result: ToolResult) -> ToolResult:
        self._count("calls")
        if result.error:
            self._count(result.error)
        if result.truncated:
            self._count("truncated")
        return result

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        self._toolbox.counts[what] += 1


def wrong_arguments(arguments: dict[str, Any], parameters: dict[str, Any]) -> str | None:
    """What is wrong with the arguments by a JSON schema, or None. Names that the schema does not know are wrong too."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.exceptions import best_match

    known = parameters.get("properties")
    if (
        known
        and "additionalProperties" not in parameters
        and (strange := [name for name in arguments if name not in known])
    ):
        return f"there is no argument {strange[0]!r}; there are: {', '.join(known)}"
    try:
        problem = best_match(Draft202012Validator(parameters).iter_errors(arguments))
    except (SchemaError, RecursionError, ValueError, LookupError) as error:
        return f"the tool's schema cannot be used: {type(error).__name__}"
    if problem is None:
        return None
    place = ".".join(map(str, problem.absolute_path))
    return f"wrong arguments: {place + ': ' if place else ''}{problem.message[:300]}"


def as_source(tool: str | Callable[..., Any] | ToolSource) -> ToolSource:
    """However a user names a tool."""
    if isinstance(tool, ToolSource):
        return tool
    if isinstance(tool, str):
        if tool in BUILT_IN:
            return _built_in(tool)
        place, colon, name = tool.rpartition(":")
        if colon and name.isidentifier():
            return ToolSource(f"{_absolute(place)}:{name}")
        if tool.endswith(".py"):
            return ToolSource(_absolute(tool))
        raise ConfigError(
            f"there is no tool {tool!r}",
            f"built in: {', '.join(BUILT_IN)}; your own is 'file.py:name' or 'module:name'",
        )
    name, module = getattr(tool, "__qualname__", ""), getattr(tool, "__module__", None) or ""
    if name.isidentifier() and module and module != "__main__" and module in sys.modules:
        file = inspect.getsourcefile(tool) if hasattr(sys.modules[module], "__file__") else None
        if module.partition(".")[0] in ("quadriga",) or file is None:
            return ToolSource(f"{module}:{name}")
    return ToolSource(name or "function", pickled=_bytes_of(tool))


def _built_in(name: str) -> ToolSource:
    if name == "python":
        from quadriga.rewards.sandbox import can_isolate

        if not can_isolate():
            raise ConfigError(
                "the tool `python` runs programs of the policy, and this machine cannot shut them in",
                "use Linux with seccomp and Landlock (docs/tools.md), or leave the tool out",
            )
    return ToolSource(f"quadriga.agents.builtin_tools:{name}")


def _bytes_of(tool: Callable[..., Any]) -> str:
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(tool)).decode()
    except Exception as error:  # whatever it holds on to may refuse in its own way
        raise ConfigError(
            f"the tool {getattr(tool, '__qualname__', tool)!r} cannot be sent to the tool processes: {error}",
            "let it hold on to plain data only, or name it as 'file.py:name'",
        ) from error


def _absolute(place: str) -> str:
    if not place.endswith(".py"):
        return place
    file = Path(os.path.expandvars(place)).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {file} with tools", "correct the path")
    return str(file)


def read_tool_config(
    path: str,
) -> tuple[list[ToolSource], dict[str, tuple[Mapping[str, Any], Sequence[str] | None]]]:
    """verl's YAML: `tools: [{class_name, config: {type: native | mcp, …}, tool_schema, mcp: {…}}]`.

    Returns:
        Tools, and MCP servers with the tools to take of each.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file = Path(os.path.expandvars(path)).expanduser()
    try:
        said = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
        entries = said["tools"]  # type: ignore[index,call-overload]
        if not isinstance(entries, list) or any(not isinstance(entry, dict) for entry in entries):
            raise TypeError("`tools` is no list of entries")
    except (OSError, YAMLError, OmegaConfBaseException, KeyError, TypeError) as problem:
        raise ConfigError(
            f"tool_config_path={path}: {type(problem).__name__}: {problem}",
            "write `tools:` and under it entries with class_name, config and tool_schema",
        ) from problem
    sources: list[ToolSource] = []
    servers: dict[str, tuple[Mapping[str, Any], Sequence[str] | None]] = {}
    for number, entry in enumerate(entries):
        config = dict(entry.get("config") or {})
        if config.pop("type", "native") == "mcp":
            mcp = entry.get("mcp") or {}
            if "mcp_servers_config_path" not in mcp:
                raise ConfigError(
                    f"{path}: tool {number} is of type mcp but has no mcp.mcp_servers_config_path", "add it"
                )
            for name, spec in read_servers(mcp["mcp_servers_config_path"]).items():
                servers[name] = (spec, mcp.get("tool_selected_list"))
            continue
        name = entry.get("class_name")
        if not isinstance(name, str):
            raise ConfigError(f"{path}: tool {number} has no class_name", "name a function or a class: 'module.Class'")
        sources.append(ToolSource(_target_of(name), config, entry.get("tool_schema")))
    return sources, servers


def _target_of(name: str) -> str:
    """`package.module.Class`, as verl has it, or one of ours."""
    if name in BUILT_IN:
        return _built_in(name).target
    if ":" in name:
        return as_source(name).target
    place, _, attribute = name.rpartition(".")
    if not place:
        raise ConfigError(f"class_name={name!r} names no module", "write 'package.module.Class' or 'file.py:Class'")
    return f"{place}:{attribute}"
