"""A real model, SmolLM2-135M-Instruct, on a CPU: evaluated, fine-tuned, evaluated again, and one step of GRPO."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.commands.evaluate import main as evaluate
from quadriga.trainer.fsdp_sft_trainer import run_sft
from quadriga.trainer.main_ppo import run_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE = 1e-4
PROBLEMS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
TEST = PROBLEMS[::6]


@pytest.fixture(scope="module")
def smollm2(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    tool = shared_dir / "tools" / "smollm2_dir.py"
    made = subprocess.run([sys.executable, str(tool), str(folder)], capture_output=True, text=True, timeout=400)
    if made.returncode:
        pytest.skip(f"the model cannot be fetched: {made.stderr.splitlines()[-1]}")
    return folder


def prompt(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]


def write(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def rl_row(a: int, b: int) -> dict:
    return {"data_source": "arithmetic", "prompt": prompt(a, b), "reward_model": {"ground_truth": str(a + b)}}


def accuracy(data: str, model: Path, capsys: pytest.CaptureFixture[str]) -> float:
    assert evaluate([data, "--model", str(model), "--device", "cpu", "--max-new-tokens", "8", "--json"]) == 0
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)}
    return figures["acc/mean@1"]


def test_fine_tuning_evaluation_and_a_step_of_grpo(smollm2, tmp_path, capsys):
    test_rows = write(tmp_path / "test.jsonl", [rl_row(a, b) for a, b in TEST])
    lessons = [
        {"messages": [*prompt(a, b), {"role": "assistant", "content": f"{a + b}"}]}
        for a, b in PROBLEMS
        if (a, b) not in TEST
    ]
    train_rows = write(tmp_path / "lessons.jsonl", lessons)
    before = accuracy(test_rows, smollm2, capsys)
    last = run_sft(
        {
            "data": {"train_files": train_rows, "messages_key": "messages", "train_batch_size": 16, "max_length": 64},
            "model": {"partial_pretrain": str(smollm2), "save_dtype": "bfloat16"},
            "optim": {"lr": 1e-4, "lr_scheduler": "constant"},
            "trainer": {"total_training_steps": 16, "device": "cpu", "default_local_dir": str(tmp_path / "sft")},
        }
    )
    capsys.readouterr()
    after = accuracy(test_rows, tmp_path / "sft", capsys)
    print(f"accuracy {before:.2f} → {after:.2f}, loss {last['train/loss']:.3f}")
    assert after > before

    run_ppo(
        {
            "data": {
                "train_files": test_rows,
                "val_files": test_rows,
                "train_batch_size": 4,
                "max_prompt_length": 64,
                "max_response_length": 8,
                "val_max_samples": 2,
            },
            "actor_rollout_ref": {
                "model": {"path": str(tmp_path / "sft" / "huggingface")},
                "actor": {"optim": {"lr": 1e-6}},
                "rollout": {"n": 4},
            },
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {
                "executor": "local",
                "device": "cpu",
                "total_training_steps": 1,
                "val_before_train": False,
                "default_local_dir": str(tmp_path / "grpo"),
            },
        }
    )
    (step,) = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert step["actor/grad_norm"] > 0
    assert step["rollout/logprob_diff_mean"] <= TOLERANCE


def test_rollout_and_trainer_agree_on_every_token(smollm2):
    import torch

    from quadriga.config.schema_models import ModelConfig
    from quadriga.engine import TrainingEngine
    from quadriga.models.load import load_policy, load_tokenizer
    from quadriga.protocol import DataProto
    from quadriga.rollout.interface import Request, SamplingParams, create_engine

    tokenizer = load_tokenizer(str(smollm2))
    trainer = TrainingEngine(load_policy(ModelConfig(path=str(smollm2)), tokenizer, trainable=False))
    rollout = create_engine(
        "native", module=trainer.model.huggingface, eos_token_ids=[tokenizer.eos_token_id], max_model_len=96
    )
    chats = [
        tokenizer.apply_chat_template(prompt(a, b), add_generation_prompt=True, return_dict=False) for a, b in TEST[:4]
    ]
    requests = [Request(str(i), ids, SamplingParams(max_new_tokens=24), (0, i), (0, 1)) for i, ids in enumerate(chats)]
    done = list(rollout.generate(requests))
    width, longest = max(map(len, chats)), max(len(c.token_ids) for c in done)
    rows, mask, theirs = [], [], []
    for completion in done:
        asked, answer = chats[int(completion.request_id)], completion.token_ids
        left, right = width - len(asked), longest - len(answer)
        rows.append([0] * left + list(asked) + answer + [0] * right)
        mask.append([0] * left + [1] * (len(asked) + len(answer)) + [0] * right)
        theirs.append(completion.full_log_probs + [0.0] * right)
    attention = torch.tensor(mask)
    response = attention[:, width:].contiguous()
    batch = DataProto.from_dict(
        tensors={"input_ids": torch.tensor(rows), "attention_mask": attention, "response_mask": response}
    )
    ours, _ = trainer.log_probs(batch, 1.0, 4096)
    gap = ((ours - torch.tensor(theirs)).abs() * response).max().item()
    print(f"largest difference of a log-prob: {gap:.2e} over {int(response.sum())} tokens")
    assert gap <= TOLERANCE
