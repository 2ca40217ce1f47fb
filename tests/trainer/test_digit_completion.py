"""PPO with a critic teaches digit completion to a small Llama of random weights, through Ray.

The task: "8,3:9,4" asks to go on from 8, 3 by the same difference, modulo 9, for 4 numbers: "7,2,6,1". Measured is the share of the
answer, its end token included, that is right before the first mistake (greedy, 200 held-out prompts): 1 for an exact answer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quadriga.trainer.main_ppo import run_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MANAGER = '''
import torch


class DenseDigits:
    """1 for every right token, the end included, until the first mistake; `acc`, told beside it, is the share of the answer right."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"):
        self.tokenizer = tokenizer

    def __call__(self, data, return_dict=False):
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(1).tolist()
        rewards = torch.zeros(responses.shape)
        shares = []
        for row, (ids, length) in enumerate(zip(responses.tolist(), lengths)):
            truth = data.non_tensor_batch["reward_model"][row]["ground_truth"]
            wanted = self.tokenizer.encode(truth, add_special_tokens=False) + [self.tokenizer.eos_token_id]
            right = 0
            while right < min(length, len(wanted)) and ids[right] == wanted[right]:
                right += 1
            rewards[row, :right] = 1.0
            shares.append(right / len(wanted))
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": shares}} if return_dict else rewards
'''


def answer(prompt: str) -> str:
    start, rule = prompt.split(":")
    first, second = map(int, start.split(","))
    modulus, count = map(int, rule.split(","))
    return ",".join(str((second + k * (second - first)) % modulus) for k in range(1, count + 1))


def write_task(source: Path, folder: Path) -> None:
    """The task as a run reads it: a model folder with its character tokenizer, rows with their answers, the reward manager."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    described = json.loads((source / "model_tokenizer_config.json").read_text())
    tokens = ["[CLS]", "[SEP]", "[PAD]", "[UNK]"] + [chr(code) for code in described["char_ords"]]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="[SEP]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.chat_template = described["chat_template"]
    tokenizer.save_pretrained(folder / "model")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(source / f"model_{name}", folder / "model" / name)
    for split in ("train", "test"):
        prompts = pq.read_table(source / f"data_{split}.parquet")["prompt"].to_pylist()
        rows = [
            {"data_source": "digits", "prompt": prompt, "reward_model": {"ground_truth": answer(prompt[0]["content"])}}
            for prompt in prompts
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "manager.py").write_text(MANAGER)


def settings(folder: Path, steps: int, seed: int) -> dict:
    """Rewards are dense, so each token is credited with its own rightness (gamma 0); the entropy bonus is large because every next
    token of the answer must first be found by chance."""
    return {
        "data": {
            "train_files": str(folder / "train.jsonl"),
            "val_files": str(folder / "test.jsonl"),
            "train_batch_size": 256,
            "max_prompt_length": 8,
            "max_response_length": 18,
            "seed": seed,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {"ppo_mini_batch_size": 256, "entropy_coeff": 0.4, "optim": {"lr": 3e-4, "lr_warmup_steps": 10}},
            "rollout": {"n": 1, "seed": seed},
        },
        "critic": {"ppo_mini_batch_size": 256, "optim": {"lr": 3e-4}},
        "algorithm": {"adv_estimator": "gae", "gamma": 0.0, "lam": 1.0},
        "reward_model": {"reward_manager": f"{folder / 'manager.py'}:DenseDigits"},
        "reward": {"num_workers": 1},
        "ray_kwargs": {"ray_init": {"num_cpus": 2, "log_to_driver": False}},
        "trainer": {
            "total_training_steps": steps,
            "test_freq": 25,
            "default_local_dir": str(folder / "run"),
            "resume_mode": "disable",
        },
    }


def validations(folder: Path) -> list[float]:
    """Mean share of the answer right, at every validation of the run."""
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [step["val/digits/acc/mean@1"] for step in metrics if "val/digits/acc/mean@1" in step]


def test_ppo_learns_digit_completion_from_random_weights(shared_dir, tmp_path):
    source = shared_dir / "data" / "verl-digit-completion"
    if not source.is_dir():
        pytest.skip("needs shared/data/verl-digit-completion; it is not here")
    write_task(source, tmp_path)
    run_ppo(settings(tmp_path, steps=250, seed=1))
    share = validations(tmp_path)
    assert share[0] < 0.05, "nothing is known before"
    assert share[-1] > 0.35, share
