"""Tools of MCP servers, over stdio and HTTP, with the `mcp` package (`pip install quadriga[mcp]`).

A server is named as everywhere: `{"mcpServers": {name: {"command", "args", "env", "cwd"} or {"url", "headers"}}}`. One that is started
here ends with this process; one that dies or no longer answers is started again by the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from quadriga.agents.tool_processes import own_task
from quadriga.errors import ConfigError
from quadriga.rewards.processes import die_with_parent, python_command

_PING_S = 2.0
_CLOSE_S = 5.0


class McpFailed(Exception):
    """A call without an answer. `kind`: timeout or crash."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


def read_servers(path: str) -> dict[str, dict[str, Any]]:
    """Name → how to reach it, from a JSON file.

    Raises:
        ConfigError: no such file, or it says something else.
    """
    file = Path(os.path.expandvars(path)).expanduser()
    try:
        servers = json.loads(file.read_text(encoding="utf-8"))["mcpServers"]
        assert isinstance(servers, dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as problem:
        raise ConfigError(
            f"mcp_servers_config_path: {path} names no MCP servers: {problem!r}",
            'write {"mcpServers": {"name": {"command": "…", "args": […]}}} or {"url": "…"}',
        ) from problem
    for name, spec in servers.items():
        if not isinstance(spec, dict) or ("command" in spec) == ("url" in spec):
            raise ConfigError(f"{path}: the MCP server {name!r} needs `command` or `url`", "give one of them")
    return servers


def check_package() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError("tools of MCP servers need the package `mcp`", "pip install 'quadriga[mcp]'") from error


class McpServer:
    """One server and the connection to it, in the event loop that starts it.

    Args:
        spec: `command`, `args`, `env`, `cwd`; or `url`, `headers`.
        start_timeout_s: until it must have listed its tools.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], start_timeout_s: float = 30.0) -> None:
        check_package()
        self.name, self._spec, self._start_timeout_s = name, dict(spec), start_timeout_s
        self._client: Any = None
        self._life: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._starting = asyncio.Lock()
        self._log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        self.schemas: list[dict[str, Any]] = []

    async def start(self) -> None:
        """Connect and list the tools; a connection that is there is kept."""
        async with self._starting:
            if self._life is not None and not self._life.done():
                return
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stop = asyncio.Event()
            self._life = own_task(self._live(ready, self._stop))
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await asyncio.shield(ready)
            except TimeoutError:
                await self._end()
                raise self._cannot(f"it did not list its tools in {self._start_timeout_s:g} s") from None
            except Exception as problem:  # whatever a server or the network does
                await self._end()
                raise self._cannot(_innermost(problem)) from problem

    async def _live(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        """The connection's life: `mcp` wants it entered and left in one task."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack)))
                self.schemas = await _list(client)
                self._client = client
                ready.set_result(None)
                await stop.wait()
        except Exception as problem:
            if not ready.done():
                ready.set_exception(problem)
        finally:
            self._client = None

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        if "url" in self._spec:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            http = httpx2.AsyncClient(headers=self._spec.get("headers") or {}, timeout=httpx2.Timeout(30.0, read=None))
            return streamable_http_client(self._spec["url"], http_client=await stack.enter_async_context(http))
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        command = [self._spec["command"], *map(str, self._spec.get("args") or ())]
        own, *words = python_command(f"{__name__}:server_main", os.getpid(), *command)
        return stdio_client(
            StdioServerParameters(command=own, args=words, env=self._spec.get("env"), cwd=self._spec.get("cwd")),
            errlog=self._log,
        )

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> tuple[str, bool]:
        """The tool's text, and whether the tool itself says that it failed.

        Raises:
            McpFailed: no answer in time, or the server is gone.
        """
        try:
            await self.start()
        except ConfigError as problem:
            raise McpFailed("crash", problem.what) from problem
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError:
            await self._check()
            raise McpFailed("timeout", f"it took longer than {timeout_s:g} s and was given up") from None
        except Exception as problem:
            await self._check()
            raise McpFailed("crash", f"the server of this tool failed: {_innermost(problem)}") from problem
        parts = [
            block.text if hasattr(block, "text") else f"[{block.type}, which cannot be read here]"
            for block in result.content
        ]
        return "\n".join(parts), bool(getattr(result, "is_error", getattr(result, "isError", False)))

    async def _check(self) -> None:
        """End a connection whose server answers nothing any more."""
        try:
            async with asyncio.timeout(_PING_S):
                await _list(self._client)
        except Exception:  # of any kind: what counts is that there is no answer
            await self._end()

    async def _end(self) -> None:
        life, self._life = self._life, None
        self._stop.set()
        if life is not None:
            done, _ = await asyncio.wait({life}, timeout=_CLOSE_S)
            if not done:
                life.cancel()
                await asyncio.wait({life}, timeout=_CLOSE_S)

    async def close(self) -> None:
        await self._end()
        self._log.close()

    def _cannot(self, why: str) -> ConfigError:
        self._log.seek(0)
        said = self._log.read()[-2000:].strip()
        return ConfigError(
            f"the MCP server {self.name!r} cannot be used: {why}" + (f"\n{said}" if said else ""),
            "try its command by hand, or correct mcp_servers_config_path",
        )


async def _list(client: Any) -> list[dict[str, Any]]:
    schemas, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor) if cursor else await client.list_tools()
        for tool in page.tools:
            parameters = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {"type": "object"}
            function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
            schemas.append({"type": "function", "function": function})
        cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
        if not cursor:
            return schemas


def _innermost(problem: BaseException) -> str:
    while isinstance(problem, BaseExceptionGroup) and problem.exceptions:
        problem = problem.exceptions[0]
    return f"{type(problem).__name__}: {problem}"


def server_main(parent: str, *command: str) -> None:
    """Become the server's command; it ends when the process that asked for it does."""
    die_with_parent(int(parent))
    os.execvp(command[0], command)
