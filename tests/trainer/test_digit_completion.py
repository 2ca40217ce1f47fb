"""PPO with a critic learns digit completion from random weights.

The task: "8,3:9,4" means: go on 8, 3, … with the same difference modulo 9, for 4 numbers: "7,2,6,1". The score is the share
of the answer, its end included, that is right before the first mistake.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quadriga.trainer.main_ppo import run_ppo

SCORER = """
def prefix_share(data_source, solution_str, ground_truth, extra_info=None):
    right = 0
    while right < min(len(solution_str), len(ground_truth)) and solution_str[right] == ground_truth[right]:
        right += 1
    complete = solution_str == ground_truth
    return {"score": (right + complete) / (len(ground_truth) + 1), "acc": float(complete), "pred": solution_str}
"""


def answer(prompt: str) -> str:
    start, rule = prompt.split(":")
    first, second = map(int, start.split(","))
    modulus, count = map(int, rule.split(","))
    return ",".join(str((second + k * (second - first)) % modulus) for k in range(1, count + 1))


def write_task(source: Path, folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    described = json.loads((source / "model_tokenizer_config.json").read_text())
    specials = ["[CLS]", "[SEP]", "[PAD]", "[UNK]"]
    vocab = {token: i for i, token in enumerate(specials + [chr(c) for c in described["char_ords"]])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[SEP]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.chat_template = described["chat_template"]
    fast.save_pretrained(folder / "model")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(source / f"model_{name}", folder / "model" / name)
    for split in ("train", "test"):
        prompts = pq.read_table(source / f"data_{split}.parquet")["prompt"].to_pylist()
        rows = [
            {
                "data_source": "digits",
                "prompt": prompt,
                "reward_model": {"ground_truth": answer(prompt[0]["content"])},
                "extra_info": {"index": i, "split": split},
            }
            for i, prompt in enumerate(prompts)
            if answer(prompt[0]["content"])
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "scorer.py").write_text(SCORER)


@pytest.mark.slow
def test_ppo_learns_digit_completion_from_random_weights(shared_dir, tmp_path):
    write_task(shared_dir / "data" / "verl-digit-completion", tmp_path)
    run_ppo(
        {
            "data": {
                "train_files": str(tmp_path / "train.jsonl"),
                "val_files": str(tmp_path / "test.jsonl"),
                "train_batch_size": 128,
                "max_prompt_length": 16,
                "max_response_length": 20,
            },
            "actor_rollout_ref": {
                "model": {"path": str(tmp_path / "model")},
                "actor": {"ppo_mini_batch_size": 32, "optim": {"lr": 1e-3}},
                "rollout": {"n": 2},
            },
            "critic": {"optim": {"lr": 1e-3}},
            "algorithm": {"adv_estimator": "gae", "lam": 0.95},
            "custom_reward_function": {"path": str(tmp_path / "scorer.py"), "name": "prefix_share"},
            "ray_kwargs": {"ray_init": {"num_cpus": 2, "log_to_driver": False}},
            "trainer": {
                "total_training_steps": 200,
                "test_freq": 50,
                "default_local_dir": str(tmp_path / "run"),
            },
        }
    )
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validation = [m["val/digits/score/mean@1"] for m in metrics if "val/digits/score/mean@1" in m]
    print("mean validation reward:", [round(v, 3) for v in validation])
    assert validation[-1] > 0.8
