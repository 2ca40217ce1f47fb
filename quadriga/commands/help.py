"""`--help` of the commands that take key=value: what they do, an example, and the keys that most runs set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Help:
    about: str
    examples: tuple[str, ...]
    keys: tuple[str, ...]
    more: str
    file: str


_RL_KEYS = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.use_kl_loss",
    "custom_reward_function.path",
    "reward_model.enable",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.default_local_dir",
)
_RUN_KEYS = (
    "optim.lr",
    "optim.lr_scheduler",
    "trainer.total_epochs",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.resume_mode",
    "trainer.default_local_dir",
)
_PAIRS = (
    "model.partial_pretrain",
    "data.train_files",
    "data.val_files",
    "data.prompt_key",
    "data.chosen_key",
    "data.rejected_key",
    "data.train_batch_size",
    "data.max_length",
)
_SEVERAL = (
    "--config my.yaml takes keys from a file of yours.\n"
    "--nproc-per-node=N trains in N processes of this machine (or start them with torchrun)."
)

HELPS: dict[str, Help] = {
    "train": Help(
        "Reinforcement learning: PPO, GRPO and their family. Without arguments, the quickstart.",
        (
            "quadriga train",
            "quadriga train actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\\n"
            "      data.train_files=~/data/gsm8k/train.parquet data.val_files=~/data/gsm8k/test.parquet \\\n"
            "      algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8",
        ),
        _RL_KEYS,
        "--config my.yaml takes keys from a file of yours; arguments come after it.\n"
        "`quadriga plan` with the same arguments prints what they amount to, without running. --from-verl takes the\n"
        "arguments of a verl command line as they are, and --write my.yaml keeps what they mean here.",
        "ppo_trainer.yaml",
    ),
    "plan": Help(
        "What a configuration of `quadriga train` amounts to: batches, pools, roles and memory. Runs nothing.",
        ("quadriga plan data.train_batch_size=256 actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8",),
        _RL_KEYS[:10],
        "--gpu h100-80g tells whether it fits that GPU, and else which keys would make it.\n"
        "Exit code 1 if the configuration cannot run; every problem is named with its fix.",
        "ppo_trainer.yaml",
    ),
    "sft": Help(
        "Supervised fine-tuning on prompts and answers, or on conversations.",
        (
            "quadriga sft model.partial_pretrain=Qwen/Qwen2.5-0.5B data.train_files=train.parquet \\\n"
            "      data.prompt_key=question data.response_key=answer",
            "quadriga sft --nproc-per-node=8 model.partial_pretrain=my_model data.train_files=chats.jsonl \\\n"
            "      data.messages_key=messages model.lora_rank=16",
        ),
        (
            "model.partial_pretrain",
            "model.lora_rank",
            "data.train_files",
            "data.val_files",
            "data.prompt_key",
            "data.response_key",
            "data.messages_key",
            "data.train_batch_size",
            "data.max_length",
            *_RUN_KEYS,
        ),
        _SEVERAL,
        "sft_trainer.yaml",
    ),
    "rm": Help(
        "Train a reward model on preference pairs. `quadriga train reward_model.enable=True reward_model.model.path=…` uses it.",
        ("quadriga rm model.partial_pretrain=outputs/quadriga/my_sft/huggingface data.train_files=pairs.jsonl",),
        (*_PAIRS, *_RUN_KEYS),
        _SEVERAL,
        "rm_trainer.yaml",
    ),
    "dpo": Help(
        "Direct preference optimisation of a policy on preference pairs.",
        (
            "quadriga dpo model.partial_pretrain=outputs/quadriga/my_sft/huggingface data.train_files=pairs.jsonl dpo.beta=0.1",
        ),
        (*_PAIRS, "model.lora_rank", "dpo.beta", "dpo.loss_type", *_RUN_KEYS),
        _SEVERAL,
        "dpo_trainer.yaml",
    ),
}


def help_text(command: str) -> str:
    """The whole text; keys with default and meaning from the schema, so that it cannot be out of date."""
    from quadriga.config.typed import all_keys, default_of

    entry, schema = HELPS[command], _schema(command)
    keys = {path: f"{path}={_shown(default_of(schema, path))}" for path in entry.keys}
    width = min(60, max(map(len, keys.values())))
    lines = [f"usage: quadriga {command} key=value …", "", entry.about, "", "examples:"]
    lines += [f"  {example}" for example in entry.examples]
    lines += ["", "keys that most runs set, with their defaults:"]
    lines += [f"  {text:<{width}}  {all_keys(schema)[path].spec.doc}" for path, text in keys.items()]
    lines += ["", f"All {len(all_keys(schema))} keys: quadriga/trainer/config/{entry.file}.", entry.more]
    return "\n".join([*lines, "--debug shows the stack of an error."])


def _schema(command: str) -> type:
    if command in ("train", "plan"):
        from quadriga.config.schema import Config

        return Config
    from quadriga.config.supervised_schema import SCHEMAS

    return SCHEMAS[command]


def _shown(default: Any) -> str:
    return "null" if default is None else str(default)
