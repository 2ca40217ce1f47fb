"""MCP servers of the real package, over stdio and HTTP: their tools are used like any other, and their failures too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quadriga.agents.policy import ToolCall
from quadriga.agents.tools import Toolbox, ToolLimits
from quadriga.errors import ConfigError
from quadriga.rewards.processes import descendants

pytest.importorskip("mcp", reason="needs the extra quadriga[mcp]")

SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

@server.tool()
async def misbehave(how: str) -> str:
    "Does something bad."
    if how == "hang":
        time.sleep(600)
    if how == "die":
        os._exit(1)
    if how == "raise":
        raise ValueError("no such thing")
    return "x" * 10_000_000 if how == "big" else how

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
"""
LIMITS = ToolLimits(timeout_s=3.0, max_response_length=200, max_parallel_calls=8)
PATIENT = replace(LIMITS, timeout_s=60.0)  # where nothing hangs: a busy machine takes its time


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, "")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return file


@pytest.fixture
def config(script: Path, tmp_path: Path) -> str:
    """A `tool_config_path` with this server and only some of its tools."""
    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"mcpServers": {"test": {"command": sys.executable, "args": [str(script)]}}}))
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools: [{{config: {{type: mcp}}, mcp: {{mcp_servers_config_path: {servers}}}}}]")
    return str(file)


@pytest.fixture
def port(script: Path) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(script), str(number)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", number)) == 0:
                    break
            time.sleep(0.1)
        yield number
    finally:
        server.kill()
        server.wait()


def run(toolbox: Toolbox, *calls: ToolCall) -> tuple[list[dict[str, Any]], list[Any]]:
    async def main() -> Any:
        async with toolbox, toolbox.session() as tools:
            return tools.schemas, [await tools.call(call) for call in calls]

    before = set(descendants([os.getpid()]))
    result = asyncio.run(asyncio.wait_for(main(), 100))
    deadline = time.monotonic() + 10
    while set(descendants([os.getpid()])) - before:
        assert time.monotonic() < deadline, "a server was left behind"
        time.sleep(0.05)
    return result


def test_a_server_over_stdio(config):
    schemas, results = run(
        Toolbox.from_config(config, limits=PATIENT),
        call("add", a=1, b=2),
        call("add", a="x", b=2),
        call("misbehave", how="raise"),
        call("misbehave", how="big"),
    )
    assert [schema["function"]["name"] for schema in schemas] == ["add", "misbehave"]
    assert schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    good, bad, raised, big = results
    assert (good.text, good.error) == ("3", None)
    assert bad.error == "bad_arguments"
    assert raised.error == "error"
    assert "Error executing tool misbehave" in raised.text
    assert big.truncated
    assert len(big.text) < 300


@pytest.mark.parametrize(("how", "kind"), [("hang", "timeout"), ("die", "crash")])
def test_a_server_that_hangs_or_dies_is_started_again_by_the_next_call(config, how, kind):
    _, (bad, good) = run(Toolbox.from_config(config, limits=LIMITS), call("misbehave", how=how), call("add", a=1, b=2))
    assert bad.error == kind
    assert (good.text, good.error) == ("3", None)


def test_a_server_over_http_with_some_of_its_tools_beside_ones_own(port):
    servers = {"remote": ({"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Key": "1"}}, ["add"])}
    schemas, (good, unknown, own) = run(
        Toolbox(["calculator"], servers, PATIENT),
        call("add", a=1, b=2),
        call("misbehave", how="raise"),
        call("calculator", expression="2*3"),
    )
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", "add"]
    assert (good.text, unknown.error, own.text) == ("3", "unknown_tool", "6")


@pytest.mark.parametrize(
    ("servers", "what"),
    [
        ({"s": ({"command": "/no/such/program"}, None)}, "cannot be used"),
        (
            {"s": ({"command": sys.executable, "args": ["-c", "raise SystemExit('broken server')"]}, None)},
            "broken server",
        ),
        ({"s": ({"url": "http://127.0.0.1:9/mcp"}, None)}, "cannot be used"),
    ],
)
def test_a_server_that_cannot_be_reached_is_named_at_the_start(servers, what):
    with pytest.raises(ConfigError, match=what):
        run(Toolbox(servers=servers, limits=ToolLimits(start_timeout_s=10)))


def test_a_tool_that_no_server_has_is_named(script):
    servers = {"s": ({"command": sys.executable, "args": [str(script)]}, ["subtract"])}
    with pytest.raises(ConfigError, match="no MCP server has a tool 'subtract'; there are: add, misbehave"):
        run(Toolbox(servers=servers, limits=LIMITS))


@pytest.mark.parametrize("text", ["", "{}", '{"mcpServers": {"a": {}}}', '{"mcpServers": []}'])
def test_a_file_that_names_no_servers_is_refused(tmp_path, text):
    servers = tmp_path / "servers.json"
    servers.write_text(text)
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools: [{{config: {{type: mcp}}, mcp: {{mcp_servers_config_path: {servers}}}}}]")
    with pytest.raises(ConfigError, match=r"names no MCP servers|needs `command` or `url`"):
        Toolbox.from_config(str(file))


def test_a_server_ends_with_the_process_that_started_it(config, tmp_path):
    script = tmp_path / "user.py"
    script.write_text(
        "import asyncio, os, signal\n"
        "from quadriga.agents.tools import Toolbox\n"
        "from quadriga.rewards.processes import descendants\n"
        "async def main():\n"
        f"    async with Toolbox.from_config({config!r}):\n"
        "        print(*descendants([os.getpid()]), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in ran.stdout.split()]
    assert pids
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
