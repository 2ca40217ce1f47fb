"""Tools that do what tools should not, and some that behave."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quadriga.agents.tools import BaseTool, ToolResponse, function_tool

SCHEMA = {
    "type": "function",
    "function": {
        "name": "counter",
        "description": "Counts.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}, "how": {"type": "string"}}},
    },
}


@function_tool
def add(a: int, b: int = 1) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@function_tool("shout")
async def loud(text: str) -> tuple[str, float, dict[str, Any]]:
    """
    Says it loudly.

    Args:
        text: What.
    """
    await asyncio.sleep(0)
    return text.upper(), 0.5, {"letters": len(text)}


@function_tool
def misbehave(how: str) -> Any:
    """
    Does something bad.

    Args:
        how: What.
    """
    if how == "hang":
        time.sleep(600)
    if how == "spin":
        while True:
            pass
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(7)
    if how == "system exit":
        sys.exit("bye")
    if how == "raise":
        raise KeyError("nothing here")
    if how == "child":
        subprocess.Popen(["sleep", "600"])
        return "left a child"
    if how == "memory":
        return len([bytearray(1 << 20) for _ in range(10_000)])
    if how == "scribble":
        for fd in range(3, 30):
            try:
                os.write(fd, b"\xff" * 64)
            except OSError:
                continue
    return {
        "10 MB": "x" * 10_000_000,
        "binary": bytes(range(256)),
        "text as bytes": b"text",
        "nothing": None,
        "dict": {"a": [1, "é"]},
        "object": {1, 2}.__class__,
        "surrogate": "a\ud800b",
        "no reward": ("text", float("nan")),
        "picture": ToolResponse(image=["…"]),
    }.get(how, how)


def helper(x):  # not a tool: not decorated
    return x


class Counter(BaseTool):
    """State of its own; writes down what becomes of it."""

    def _note(self, what: str) -> None:
        if "notes" in self.config:
            with Path(self.config["notes"]).open("a") as notes:
                notes.write(what + "\n")

    async def create(self, instance_id=None, start=0, **kwargs):
        self._note("create")
        self.value = start
        return "mine", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        assert instance_id == "mine"
        self._note("execute")
        if "how" in parameters:
            misbehave(parameters["how"])
        self.value += parameters.get("by", 1)
        return ToolResponse(text=str(self.value)), 0.1, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.value)

    async def release(self, instance_id, **kwargs):
        self._note("release")


class Notebook:
    """No BaseTool, but it does as one; its schema has a name of its own."""

    tool_schema = {
        "name": "note",
        "description": "Takes a note.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    }

    def create(self, greeting="hi"):
        self.notes = [greeting]
        return 1

    def execute(self, instance_id, parameters):
        self.notes.append(parameters["text"])
        return self.notes, 0.0, {"notes": len(self.notes)}

    def calc_reward(self, instance_id):
        return len(self.notes)

    def release(self, instance_id):
        raise RuntimeError("will not let go")
