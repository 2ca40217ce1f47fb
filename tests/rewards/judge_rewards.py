"""Asynchronous reward functions, for the pool's tests. What to do is the response's first word."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import time
from collections.abc import Awaitable
from typing import Any

in_flight = 0


async def judge(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Answers after 0.4 s, as a model behind HTTP would, unless the response says otherwise."""
    global in_flight
    word, _, rest = solution_str.partition(" ")
    in_flight += 1
    most = in_flight
    try:
        if word == "throw":
            raise KeyError("the judge is not at home")
        if word == "leave":
            raise SystemExit(3)
        if word == "cancel":
            raise asyncio.CancelledError
        if word == "hang":
            await asyncio.sleep(1e6)
        if word == "stubborn":
            await _ignore_cancellation()
        if word == "block":
            time.sleep(1e6)
        if word == "segfault":
            ctypes.string_at(0)
        if word == "die":
            os._exit(7)
        await asyncio.sleep(float(rest) if word == "wait" else 0.4)
    finally:
        in_flight -= 1
    return {"score": float(ground_truth), "in_flight": most, "pid": os.getpid()}


async def _ignore_cancellation() -> None:
    for _ in range(1000):
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            continue


def returns_an_awaitable(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> Awaitable[dict[str, Any]]:
    return judge(data_source, solution_str, ground_truth, extra_info)


partly = functools.partial(judge)


def sometimes(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """Every second one needs no judge."""
    if int(ground_truth) % 2:
        return float(ground_truth)
    return judge(data_source, solution_str, ground_truth, extra_info)


async def judge_a_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[dict[str, Any]]
) -> list[Any]:
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos)
    return await asyncio.gather(*(judge(*row) for row in rows))
