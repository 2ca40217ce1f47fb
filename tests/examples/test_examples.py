"""Every example runs, with a tiny model and one step of everything. So none of them can rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_chat_model import write_chat_model

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples"
SHORT = [
    "trainer.executor=local",
    "trainer.device=cpu",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=False",
]
TINY_BATCH = ["data.train_batch_size=4", "data.max_response_length=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="needs examples/ of the checkout")


def run(script: str, *arguments: str, cwd: Path, **environment: str) -> str:
    launcher = [sys.executable] if script.endswith(".py") else []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [*launcher, str(EXAMPLES / script), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


def steps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory) -> dict[str, str]:
    """A model folder, and GSM8K as it is published, of a few lines."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        rows = [{"question": f"What is {a} and {a}?", "answer": f"{a}+{a}={2 * a}\n#### {2 * a}"} for a in range(8)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_chat_model(folder / "model")
    return {"GSM8K": str(folder), "MODEL": str(model), "DATA": str(folder / "parquet")}


@pytest.mark.parametrize("script", ["quickstart/run.sh", "quickstart/quickstart.py"])
def test_quickstart(script, tmp_path):
    folder = tmp_path / "run"
    run(script, *SHORT, "data.train_batch_size=8", f"trainer.default_local_dir={folder}", cwd=tmp_path)
    assert steps(folder)[-1]["val/arithmetic/acc/mean@1"] > 0.2


def test_own_loop(tmp_path):
    rewards = [
        float(line.split("reward ")[1].split(",")[0])
        for line in run("own_loop/own_loop.py", "3", cwd=tmp_path).splitlines()
    ]
    assert len(rewards) == 3
    assert max(rewards[1:]) > rewards[0], "it learns"


@pytest.mark.parametrize("script", ["gsm8k/run_grpo.sh", "gsm8k/run_ppo.sh", "lora/run_grpo_lora.sh"])
def test_gsm8k(script, gsm8k, tmp_path):
    folder = tmp_path / "run"
    arguments = [*SHORT, *TINY_BATCH, f"trainer.default_local_dir={folder}"]
    if script == "gsm8k/run_ppo.sh":
        arguments += ["critic.ppo_mini_batch_size=4", "trainer.critic_warmup=0"]
    run(script, *arguments, cwd=tmp_path, **gsm8k)
    (step,) = steps(folder)
    assert "val/openai/gsm8k/acc/mean@1" in step
    assert step["actor/grad_norm"] >= 0
    assert (
        "LORA" not in script.upper() or (folder / "checkpoints/global_step_1/huggingface/model.safetensors").is_file()
    )


def test_gsm8k_says_what_it_needs(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "MODEL"}
    done = subprocess.run(
        [EXAMPLES / "gsm8k/run_grpo.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "set MODEL to a model folder" in done.stderr


def test_custom_reward(tmp_path):
    folder = tmp_path / "run"
    run("custom_reward/run.sh", *SHORT, "data.train_batch_size=8", f"trainer.default_local_dir={folder}", cwd=tmp_path)
    (step,) = steps(folder)
    assert step["reward/extra/distance"] > 0
    assert 0 < step["critic/score/mean"] < 1


@pytest.mark.slow
def test_sft_rm_ppo(tmp_path):
    few = {"SFT_STEPS": "2", "RM_STEPS": "2", "PPO_STEPS": "1"}
    short = ["trainer.executor=local", "trainer.device=cpu", "data.train_batch_size=64"]
    printed = run("sft_rm_ppo/run.sh", *short, cwd=tmp_path, OUT=str(tmp_path / "out"), **few)
    assert printed.count("acc/mean@1") == 3
    assert "val/accuracy" in steps(tmp_path / "out" / "rm")[-1]
    assert "critic/score/mean" in steps(tmp_path / "out" / "ppo")[-1]


def test_every_example_is_run_by_a_test_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "outputs"}
    known = {
        "quickstart",
        "gsm8k",
        "custom_reward",
        "lora",
        "split_placement",
        "sft_rm_ppo",
        "distillation",
        "own_loop",
        "calculator",
        "guessing",
        "cluster",
    }
    assert folders == known
    assert all(
        f"]({name})" in listed for name in folders
    )  # split_placement is run by tests/trainer/test_split_placement.py


def test_distillation(tmp_path):
    run(
        "distillation/run.sh",
        *SHORT,
        cwd=tmp_path,
        TEACHER_STEPS="1",
        STEPS="1",
        TEACHER_OPTIONS=" ".join(SHORT[:2]),
        OUT="out",
    )
    last = steps(tmp_path / "out" / "student")[-1]
    assert last["distillation/loss"] > 0
    assert 0 < last["distillation/overlap_ratio"] <= 1


@pytest.mark.slow
def test_distillation_teaches_sums_without_a_reward(tmp_path):
    """The whole example: the teacher learns by reinforcement, the student from the teacher's top tokens alone."""
    local = "trainer.executor=local trainer.device=cpu"
    run("distillation/run.sh", *local.split(), cwd=tmp_path, OUT="out", TEACHER_OPTIONS=local, OMP_NUM_THREADS="2")
    accuracy = [
        s["val/arithmetic/acc/mean@1"] for s in steps(tmp_path / "out" / "student") if "val/arithmetic/acc/mean@1" in s
    ]
    assert accuracy[-1] > accuracy[0] + 0.3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_calculator(tmp_path):
    """A tool makes up for what the model cannot do: at least 40 points more of the sums are right."""
    out = tmp_path / "out"
    run("calculator/run.sh", "trainer.executor=local", "trainer.device=cpu", cwd=tmp_path, OUT=str(out))
    lines = steps(out / "rl")
    before, after = (line["val/arithmetic/acc/mean@1"] for line in (lines[0], lines[-1]))
    assert after >= before + 0.4
    assert lines[-1]["episode/tool_calls/mean"] > lines[1]["episode/tool_calls/mean"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_guessing(tmp_path):
    """The policy learns to use what it is told: games take a third fewer turns."""
    out = tmp_path / "out"
    run("guessing/run.sh", "trainer.executor=local", "trainer.device=cpu", cwd=tmp_path, OUT=str(out))
    turns = [line["episode/turns/mean"] for line in steps(out / "rl") if "episode/turns/mean" in line]
    assert sum(turns[-5:]) / 5 <= 2 / 3 * sum(turns[:2]) / 2
