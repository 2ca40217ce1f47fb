"""Agents that do to their process what user code does sooner or later; the row says which."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time

MARK = "HOSTILE_FOLDER"


async def run(task, policy):
    """Two turns of four tokens; what is asked for in `kind` happens between them, or before, in training."""
    kind = "good" if task.validates else task.row["extra_info"]["kind"]
    if kind == "raises at once":
        raise ValueError("this agent raises before it asks")
    first = await policy.generate(task.row["extra_info"]["text"], max_new_tokens=4)
    if kind == "raises":
        raise ValueError("this agent raises")
    if kind == "hangs":
        await asyncio.sleep(1000)
    if kind == "does not heed":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
    if kind == "blocks":
        time.sleep(1000)
    if kind == "segfaults":
        ctypes.string_at(0)
    if kind == "exits":
        os._exit(3)
    if kind == "leaves":
        raise SystemExit
    if kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "leaks":
        for _ in range(3):
            asyncio.create_task(asyncio.sleep(1000))  # noqa: RUF006 (to be left behind is the point)
    if kind == "cancels all":
        for other in asyncio.all_tasks():
            other.cancel()
        await asyncio.sleep(0)
    if kind == "begins anew":
        await policy.generate("say", max_new_tokens=1)
    if kind == "begins anew for ever":
        for word in "abcdefghijklmnop":
            await policy.generate(word, max_new_tokens=1)
    if kind == "never ends":
        text = task.row["extra_info"]["text"] + first.text
        while True:
            try:
                answer = await policy.generate(text, max_new_tokens=1)
                text += answer.text
            except Exception:
                continue
    if kind == "starts a process":
        import subprocess

        subprocess.Popen(["sleep", "1000"])
    if kind == "bad ids":
        await policy.generate([10**6])
    if kind == "gives up":
        call = asyncio.create_task(policy.generate("say", max_new_tokens=8))
        await asyncio.sleep(0)  # it has asked
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    if kind == "odd words":
        import numpy as np

        policy.count(tool_calls=np.int64(1))
        loop = []
        loop.append(loop)
        await policy.generate([*first.prompt_ids, *first.token_ids, 5, 6], max_new_tokens=4)
        return {"reward": 1.0, "keys": {(1, 2): 3}, "loop": loop}
    if kind == "bad reward":
        return "much"
    await policy.generate([*first.prompt_ids, *first.token_ids, 5, 6], max_new_tokens=4)
    return {"reward": 1.0, "kind": kind}
