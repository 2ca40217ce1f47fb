"""Agents that other people wrote for other models, unchanged: against `quadriga serve`, and trained.

They need packages that do not go together with the project's own, so they live in a virtual environment beside it:

    python -m venv clients && clients/bin/pip install openai-agents==0.20.0 verifiers==0.4.0 uv
    QUADRIGA_TEST_CLIENTS=$PWD/clients python -m pytest tests/agents/test_client_libraries.py
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling_model import ANSWER, calling_model
from test_serve_command import Server, serving

from quadriga.trainer.main_ppo import run_ppo

HERE = Path(__file__).parent
CLIENTS = os.environ.get("QUADRIGA_TEST_CLIENTS", "")
pytestmark = pytest.mark.skipif(
    not CLIENTS, reason="needs openai-agents and verifiers in an environment of their own: set QUADRIGA_TEST_CLIENTS"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(calling_model(), "--name", "caller", "--temperature", "0", "--api-key") as found:
        yield found


def run(server: Server, folder: Path, *command: str) -> str:
    bin_folder = Path(CLIENTS) / "bin"
    environment = {
        "HOME": str(folder),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": server.key,
    }
    done = subprocess.run(
        [str(bin_folder / command[0]), *command[1:]],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_agent_of_openai_agents_uses_its_tool(server: Server, tmp_path: Path) -> None:
    told = run(server, tmp_path, "python", str(HERE / "agents_sdk_program.py"))
    assert told.splitlines() == [f"whole: {ANSWER}", f"streamed: {ANSWER}", "called: [(2, 3), (2, 3)]"]


def test_an_environment_of_verifiers_is_played_with_its_tool_server(server: Server, tmp_path: Path) -> None:
    run(
        server,
        tmp_path,
        *("vf-eval", "adding-v1", "--model", "caller", "--push", "False", "--rich", "None"),
        *("--client.base-url", server.url, "--client.api-key-var", "OPENAI_API_KEY"),
        *("--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess", "--output-dir", str(tmp_path)),
    )
    (file,) = tmp_path.rglob("traces.jsonl")
    traces = [json.loads(line)["traces"][0] for line in file.read_text(encoding="utf-8").splitlines()]
    found = {trace["nodes"][0]["message"]["content"]: trace for trace in traces}
    # The model always adds 2 and 3: one of the two sums is right.
    assert [found[f"What is 2+{b}?"]["rewards"]["right_sum"]["score"] for b in (3, 4)] == [1.0, 0.0]
    for trace in traces:
        roles = [node["message"]["role"] for node in trace["nodes"]]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert "5" in json.dumps(trace["nodes"][2]["message"]["content"])
        assert not trace["errors"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", ["of_openai_agents", "of_verifiers"])
def test_their_programs_are_trained_as_they_are(tmp_path: Path, agent: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"data_source": "sums", "prompt": "What is 2+3?"}\n')
    config: dict[str, Any] = {
        "data": {
            "train_files": str(tmp_path / "rows.jsonl"),
            "val_files": str(tmp_path / "rows.jsonl"),
            "train_batch_size": 1,
            "max_prompt_length": 2048,
            "max_response_length": 1024,
        },
        "actor_rollout_ref": {
            "model": {"path": str(calling_model())},
            "rollout": {
                "n": 2,
                "agent": {"default_agent_loop": f"{HERE / 'foreign_programs.py'}:{agent}", "episode_timeout_s": 300.0},
            },
        },
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True},
        "trainer": {
            "executor": "local",
            "device": "cpu",
            "total_training_steps": 1,
            "val_before_train": False,
            "default_local_dir": str(tmp_path / "run"),
            "rollout_data_dir": str(tmp_path / "rollouts"),
        },
    }
    run_ppo(config)
    figures = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    lines = (tmp_path / "run" / "samples" / "train_00000001.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert figures["episode/finish/done"] == 1, rows
    assert figures["episode/contexts/mean"] == 2, "two conversations"
    assert 2 < figures["episode/turns/mean"] <= 4, "most answers call the tool first"
    assert figures["critic/score/max"] > 0
    assert figures["actor/grad_norm"] > 0
    assert sum(0 in row["tokens"]["mask"] for row in rows) >= 2, "what the tool said is read in between"
    for row in rows:
        told = row["tokens"]
        for mine, theirs, written in zip(told["rollout_log_probs"], told["trainer_log_probs"], told["mask"]):
            assert not written or abs(mine - theirs) < 2e-3
