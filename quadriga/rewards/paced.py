"""What scoring processes run for the managers `rate_limited` and `judge`: a reward function at a limited pace, a judge.

Nothing heavy is imported here: a scoring process starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from quadriga.errors import RewardError
from quadriga.rewards import functions
from quadriga.rewards.functions import RewardFunction

TEMPLATE = (
    "Judge the answer against the reference. Reply with one number from 0 (wrong) to 1 (right).\n\n"
    "Reference: {ground_truth}\n\nAnswer: {solution_str}"
)
SECONDS = 60.0


class Pace:
    """So many units a minute, evenly: `await take(n)` returns when the next `n` may be used."""

    def __init__(self, per_minute: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds_each = SECONDS / per_minute
        self.now = now
        self.free_at = 0.0

    def reserve(self, units: float = 1.0) -> float:
        """Seconds from now until `units`, which are taken by this call, may be used."""
        now = self.now()
        start = max(now, self.free_at)
        self.free_at = start + units * self.seconds_each
        return start - now

    async def take(self, units: float = 1.0) -> None:
        await asyncio.sleep(self.reserve(units))


_PACES: dict[str, Pace] = {}
_LOADED: dict[str, Callable[..., Any]] = {}


async def paced(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    *,
    function: dict[str, Any],
    limits: Mapping[str, float],
) -> Any:
    """Runs in scoring processes: `function` when the pace allows it; a sync one in a thread, so that others can wait."""
    if "max_rpm" in limits:
        await _pace("max_rpm", limits["max_rpm"]).take()
    if "max_tpm" in limits:
        await _pace("max_tpm", limits["max_tpm"]).take(limits.get("estimated_tokens_per_request", 2000.0))
    target = function["target"]
    if target not in _LOADED:
        _LOADED[target] = functions.load(RewardFunction(**function))
    result = await asyncio.to_thread(_LOADED[target], data_source, solution_str, ground_truth, extra_info)
    return await result if inspect.isawaitable(result) else result


def _pace(name: str, per_minute: float) -> Pace:
    return _PACES.setdefault(name, Pace(per_minute))


def ask_judge(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    *,
    url: str,
    model: str,
    template: str | None = None,
    score_pattern: str | None = None,
    api_key_env: str | None = None,
    max_tokens: int = 256,
    request_timeout_s: float = 60.0,
) -> dict[str, Any]:
    """One question to the judge; a reply without a score counts as unparsed."""
    question = (template or TEMPLATE).format(
        solution_str=solution_str, ground_truth=ground_truth, data_source=data_source, extra_info=extra_info
    )
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    headers = {"Content-Type": "application/json"}
    if api_key_env:
        headers["Authorization"] = f"Bearer {os.environ.get(api_key_env, '')}"
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=request_timeout_s) as answer:
            reply = str(json.loads(answer.read())["choices"][0]["message"]["content"])
    except (urllib.error.URLError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RewardError(f"the judge at {url} gave no answer: {error}", "see whether the endpoint works") from error
    found = re.findall(score_pattern or r"-?\d+(?:\.\d+)?", reply)
    text = (found[-1][0] if isinstance(found[-1], tuple) else found[-1]) if found else ""
    try:
        return {"score": float(text), "pred": text, "reply": reply}
    except ValueError:
        return {"score": 0.0, "parsed": False, "reply": reply}
