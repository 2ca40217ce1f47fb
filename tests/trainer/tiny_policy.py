"""A model folder small enough to train in seconds: one layer, letters as tokens, random weights."""

from __future__ import annotations

import json
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=# "


def write_model(folder: Path, seed: int = 0, letters: str = LETTERS) -> Path:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "<pad>": 1, **{c: i + 2 for i, c in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.1,  # large enough for frozen embeddings (LoRA) to express a preference
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_prompts(file: Path, count: int = 32) -> Path:
    rows = [
        {
            "data_source": "letters",
            "prompt": f"say {chr(97 + i % 26)}{i // 26}",
            "reward_model": {"ground_truth": "a"},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return file


REWARD = '''
def share_of_vowels(data_source, solution_str, ground_truth, extra_info=None):
    """Higher the more of the answer is vowels: any policy can get better at it."""
    score = sum(c in "aeiou" for c in solution_str) / 6
    return {"score": score, "acc": float(score > 0.1), "pred": solution_str, "always_one": 1.0}
'''


def write_task(folder: Path) -> dict:
    """Model, prompts and reward in `folder`; returns the configuration of a short run on them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_prompts(folder / "prompts.jsonl")
    (folder / "reward.py").write_text(REWARD)
    return {
        "data": {
            "train_files": str(folder / "prompts.jsonl"),
            "val_files": str(folder / "prompts.jsonl"),
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 6,
            "val_max_samples": 8,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {"optim": {"lr": 1e-2}},
            "rollout": {"n": 8, "val_kwargs": {"do_sample": True, "temperature": 1.0}},
        },
        "custom_reward_function": {"path": str(folder / "reward.py"), "name": "share_of_vowels"},
        "reward": {"num_workers": 1},
        "trainer": {
            "executor": "local",
            "device": "cpu",
            "total_training_steps": 12,
            "val_before_train": False,
            "default_local_dir": str(folder / "run"),
        },
    }
