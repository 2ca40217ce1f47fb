"""What can only be judged on the configuration of a supervised run as a whole."""

from __future__ import annotations

from typing import Any

from quadriga.config.run_name import name_problems
from quadriga.config.supervised_schema import SFTConfig
from quadriga.config.typed import Problems


def check_supervised(config: Any, problems: Problems) -> None:
    """Note every impossible combination; fills in what is said by another name."""
    data, optim, trainer = config.data, config.optim, config.trainer
    _take_path(config.model, problems)
    for what, fix in name_problems(trainer):
        problems.add(what, fix)
    if not data.train_files:
        problems.add("data.train_files is not set", "set it to a parquet, json or jsonl file, or a list of them")
    if isinstance(config, SFTConfig):
        _check_sft(config, problems)
    elif config.model.partial_pretrain is None:
        problems.add("model.partial_pretrain is not set", "set it to the model to start from: a folder or a hub name")
    for name, most in (("train", data.train_max_samples), ("val", data.val_max_samples)):
        if most == 0:
            problems.add(f"data.{name}_max_samples=0 leaves no rows", f"set data.{name}_max_samples=-1 for all rows")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        problems.add(f"optim.betas={optim.betas} are no AdamW betas", "give two numbers in [0, 1)")
    budget = data.max_token_len_per_gpu
    if isinstance(budget, str) and budget != "auto":
        problems.add(f"data.max_token_len_per_gpu={budget} is no budget", "set a number of tokens, or auto")
    elif isinstance(budget, int) and data.max_length > budget * config.model.ulysses_sequence_parallel_size:
        problems.add(
            f"data.max_token_len_per_gpu={budget} has no room for one row of data.max_length={data.max_length} tokens",
            f"set data.max_token_len_per_gpu={data.max_length} or more",
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        problems.add(
            f"trainer.resume_mode={trainer.resume_mode} and trainer.resume_from_path={trainer.resume_from_path} do not "
            "go together",
            "set trainer.resume_mode=resume_path and trainer.resume_from_path, or neither",
        )


def _take_path(model: Any, problems: Problems) -> None:
    """`model.path`, as verl's newer trainer spells it, is `model.partial_pretrain`."""
    if model.path is not None and model.partial_pretrain not in (None, model.path):
        problems.add(
            f"model.path={model.path} and model.partial_pretrain={model.partial_pretrain} are two models",
            "set one of them",
        )
    model.partial_pretrain, model.path = model.partial_pretrain or model.path, None


def _check_sft(config: SFTConfig, problems: Problems) -> None:
    data, model = config.data, config.model
    if (model.partial_pretrain is None) == (model.from_config is None):
        problems.add(
            "the run must start from either model.partial_pretrain (weights) or model.from_config (random weights)",
            "set exactly one of them",
        )
    if model.from_config is not None and model.lora_rank > 0:
        problems.add("a LoRA adapter on random weights learns nothing of use", "set model.lora_rank=0")
    if data.multiturn.enable and data.messages_key is None:
        data.messages_key = data.multiturn.messages_key
