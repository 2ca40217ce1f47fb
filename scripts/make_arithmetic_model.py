"""Make the embedded model, quadriga/assets/arithmetic, from nothing: shape, tokenizer, lessons, supervised training.

    python scripts/make_arithmetic_model.py                            # writes quadriga/assets/arithmetic anew
    python scripts/make_arithmetic_model.py --output m --steps 20      # a short run elsewhere

The model learns sums from a careless teacher: of five lessons on a problem, three leave out every carry. So its likeliest
answer is wrong wherever there is one, while the right answer is among its samples: reinforcement learning has something
to find. No lesson is about a problem of `builtin:arithmetic/test`, nor about one with its terms swapped.

The same machine and torch version give the same bytes; other ones may round differently.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ASSET = Path(__file__).resolve().parents[1] / "quadriga" / "assets" / "arithmetic"
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*=# "
RIGHT, CARELESS = 2, 3
"""Lessons on each problem."""

SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
}
STEPS, BATCH, LR = 4000, 128, 3e-3


def careless(a: int, b: int) -> int:
    """`a + b` of two numbers below 100, digit by digit, forgetting every carry."""
    return (a // 10 + b // 10) % 10 * 10 + (a % 10 + b % 10) % 10


def write_lessons(file: Path) -> None:
    """All training problems of the built-in task, each in right and careless lessons; JSON lines of question, answer."""
    from quadriga.data.prep.arithmetic import BUILTIN_TASK, generate_arithmetic

    train, _ = generate_arithmetic(**{**BUILTIN_TASK, "train_size": None})
    with file.open("w", encoding="utf-8") as out:
        for row in train:
            question, right = row["extra_info"]["question"], row["reward_model"]["ground_truth"]
            a, b = map(int, question.rstrip("=").split("+"))
            for answer in [right] * RIGHT + [careless(a, b)] * CARELESS:
                out.write(json.dumps({"question": question, "answer": f"#### {answer}"}) + "\n")


def write_shape(folder: Path) -> None:
    """config.json and a tokenizer with one token per character, without a chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(**SHAPE).save_pretrained(folder)
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=SHAPE["max_position_embeddings"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def train(folder: Path, steps: int) -> Path:
    """Train in `folder`; returns the folder of the finished model."""
    from quadriga.trainer.fsdp_sft_trainer import run_sft

    write_shape(folder / "shape")
    write_lessons(folder / "lessons.jsonl")
    run_sft(
        {
            "data": {
                "train_files": str(folder / "lessons.jsonl"),
                "train_batch_size": BATCH,
                "max_length": SHAPE["max_position_embeddings"],
            },
            "model": {"from_config": str(folder / "shape"), "save_dtype": "bfloat16"},
            "optim": {
                "lr": LR,
                "betas": [0.9, 0.99],
                "lr_warmup_steps_ratio": 0.02,
                "weight_decay": 0.1,
                "lr_scheduler": "wsd",
            },
            "trainer": {
                "total_training_steps": steps,
                "log_freq": 100,
                "seed": 0,
                "device": "cpu",
                "default_local_dir": str(folder / "run"),
            },
        }
    )
    return folder / "run" / "huggingface"


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    parser = argparse.ArgumentParser(description="Make the embedded arithmetic model.")
    parser.add_argument("--output", type=Path, default=ASSET, help=f"folder for the model ({ASSET})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimiser steps ({STEPS})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # sums in the same order on every machine
    with tempfile.TemporaryDirectory() as scratch:
        made = train(Path(scratch), options.steps)
        shutil.rmtree(options.output, ignore_errors=True)
        shutil.copytree(made, options.output)
    print(f"{options.output}: {sum(f.stat().st_size for f in options.output.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
