"""A synchronous run gives the bits that it gave before generation became a service (stored for the machines it was seen on)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_policy import write_task

from quadriga.models import logprobs
from quadriga.models.kernels.cpu import linear
from quadriga.trainer.main_ppo import run_ppo

STORED = Path(__file__).parent / "same_bits.json"
CASES = {
    "grpo": {"algorithm": {"adv_estimator": "grpo"}},
    "ppo": {
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}},
    },
}


def arithmetic() -> str:
    """A name for what this processor and this PyTorch make of some products, exponentials and sums."""
    numbers = torch.arange(1, 64 * 96 + 1, dtype=torch.float32).reshape(64, 96).sin()
    weights = numbers.t().contiguous()
    parts = [numbers @ weights, (numbers @ weights).softmax(-1), numbers.exp().sum(0), numbers.tanh().mean(1)]
    digest = hashlib.sha256(torch.__version__.encode())
    for part in parts:
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()[:16]


def outcome(folder: Path, case: str) -> dict[str, object]:
    """What a short run in this process comes to."""
    torch.set_num_threads(1)
    task = write_task(folder / "task")
    trainer = {
        "executor": "local",
        "total_training_steps": 3,
        "save_freq": 3,
        "test_freq": 3,
        "default_local_dir": str(folder),
    }
    run_ppo(OmegaConf.merge(task, CASES[case], {"trainer": trainer}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [
        json.loads(line)["response"]
        for file in sorted((folder / "samples").glob("train_*"))
        for line in file.read_text().splitlines()
    ]
    weights = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "checkpoints/global_step_3/huggingface/model.safetensors").items()):
        weights.update(name.encode() + tensor.numpy().tobytes())
    return {
        "responses": hashlib.sha256("\n".join(samples).encode()).hexdigest()[:16],
        "grad_norm": [line["actor/grad_norm"] for line in lines if "actor/grad_norm" in line],
        "score": [line["critic/score/mean"] for line in lines if "critic/score/mean" in line],
        "weights": weights.hexdigest()[:16],
    }


@pytest.fixture
def products_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits were stored before the backward pass had products of its own; all else is compared."""

    def weight_gradient(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
        total += grad.t() @ rows if total.shape[0] >= total.shape[1] else (rows.t() @ grad).t()

    monkeypatch.setattr(linear, "add_weight_gradient", weight_gradient)
    monkeypatch.setattr(logprobs, "add_weight_gradient", lambda total, grad, rows: total.addmm_(grad.t(), rows))
    monkeypatch.setattr(logprobs, "input_gradient", torch.mm)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("products_by_pytorch")
def test_a_synchronous_run_gives_the_bits_that_it_always_gave(tmp_path, case):
    known = json.loads(STORED.read_text())
    name = arithmetic()
    if name not in known:
        pytest.skip(f"no bits are stored for a machine with this arithmetic ({name})")
    assert outcome(tmp_path, case) == known[name][case]
