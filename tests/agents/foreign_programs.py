"""Agents that are programs of other people, in an environment of their own: all they are told is where the policy is, and a key."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


async def _run(policy, folder: str, *command: str) -> str:
    bin_folder = Path(os.environ["QUADRIGA_TEST_CLIENTS"]) / "bin"
    told = {
        "HOME": folder,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),
        "OPENAI_BASE_URL": policy.base_url,
        "OPENAI_API_KEY": policy.api_key,
    }
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(
        str(bin_folder / command[0]), *command[1:], cwd=folder, env={**os.environ, **told}, **pipes
    )
    said, _ = await process.communicate()
    return said.decode()


async def of_openai_agents(task, policy):
    """Two conversations with a tool, one of them streamed. Later samples are worth more, so that there is something to learn."""
    with tempfile.TemporaryDirectory() as folder:
        said = await _run(policy, folder, "python", str(HERE / "agents_sdk_program.py"))
    return {"reward": ("called: [(2, 3), (2, 3)]" in said) * (1.0 + task.sample_index), "said": said[-2000:]}


async def of_verifiers(task, policy):
    """An environment, its tool server and its reward."""
    with tempfile.TemporaryDirectory() as folder:
        said = await _run(
            policy,
            folder,
            *("vf-eval", "adding-v1", "--model", "caller", "--push", "False", "--rich", "None"),
            *("--client.base-url", policy.base_url, "--client.api-key-var", "OPENAI_API_KEY"),
            *("--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess", "--output-dir", folder),
        )
        rewards = [
            json.loads(line)["traces"][0]["rewards"]["right_sum"]["score"]
            for file in Path(folder).rglob("traces.jsonl")
            for line in file.read_text(encoding="utf-8").splitlines()
        ]
    return {"reward": sum(rewards) * (1.0 + task.sample_index), "said": said[-2000:]}
