"""Three command lines of verl's own examples train: only paths and sizes are other ones, and the sink that needs an account."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import quadriga

pytestmark = pytest.mark.slow
MODEL = Path(quadriga.__file__).parent / "assets" / "arithmetic"
SIZES = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 64,
    "data.max_response_length": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 3,
    "trainer.save_freq": 3,
    "trainer.test_freq": 3,
    "trainer.logger": "console",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """verl's keys for paths → files of a task in verl's format, and a reward model with one label."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("task")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": "train", "index": 8 * a + b},
        }
        for a in range(4)
        for b in range(8)
    ]
    data = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    shutil.copytree(MODEL, folder / "model")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(MODEL, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(folder / "rm")
    tokenizer.save_pretrained(folder / "rm")
    return {
        "data.train_files": str(data),
        "data.val_files": str(data),
        "actor_rollout_ref.model.path": str(folder / "model"),
        "critic.model.path": str(folder / "model"),
        "reward_model.model.path": str(folder / "rm"),
    }


@pytest.mark.parametrize(
    ("script", "learns"),
    [
        ("examples/grpo_trainer/run_qwen2-7b_math.sh", "actor/kl_loss"),
        ("examples/ppo_trainer/run_qwen2-7b_rm_legacy.sh", "critic/vf_loss"),
        ("examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh", "actor/kl_loss"),
    ],
)
def test_recorded_command_line_trains(
    commands: list[dict[str, Any]], paths: dict[str, str], tmp_path: Path, script: str, learns: str
) -> None:
    (command,) = [c["overrides"] for c in commands if c["script"] == script]
    given = dict(argument.split("=", 1) for argument in command)
    replaced = {key: str({**paths, **SIZES}.get(key.lstrip("+"), value)) for key, value in given.items()}
    added = {"trainer.total_training_steps": "3", "trainer.default_local_dir": str(tmp_path / "run")}
    arguments = [f"{key}={value}" for key, value in {**replaced, **added}.items()]
    done = subprocess.run(
        [sys.executable, "-m", "quadriga", "train", "--from-verl", *arguments],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "set aside" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "actor/grad_norm" in line]
    assert len(steps) == 3
    assert all(line["actor/grad_norm"] >= 0 and learns in line for line in steps)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) >= 1
