"""Every configuration key of the supervised runs: fine-tuning, reward models, DPO. Conventions are those of `schema.py`."""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.config.fields import LARGEST_SEED, LONGEST, LONGEST_S, key, section
from quadriga.config.names import DPO_LOSSES, METRIC_SINKS
from quadriga.config.schema_models import WITH_LORA, FSDPConfig, optimiser_name, shared_sequences


@dataclass
class ExampleDataConfig:
    train_files: str | list[str] | None = key(None, "parquet, json or jsonl file, or a list of them; must be set")
    val_files: str | list[str] | None = key(None, "like train_files, for the validation loss; null: no validation")
    train_max_samples: int = key(-1, "use at most so many training rows; -1: all", unit="rows", at_least=-1)
    val_max_samples: int = key(-1, "use at most so many validation rows; -1: all", unit="rows", at_least=-1)
    train_batch_size: int = key(256, "rows per optimiser step, over all processes", unit="rows", at_least=1)
    micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward-backward pass; null: only max_token_len_per_gpu decides", unit="rows", at_least=1
    )
    max_token_len_per_gpu: int | str = key(
        "auto",
        "token budget of a micro-batch; auto: what fits into the GPU's memory (CPU: 16384)",
        unit="tokens",
        at_least=1,
    )
    max_length: int = key(
        1024, "longest example, prompt and answer together", unit="tokens", at_least=2, at_most=LONGEST
    )
    truncation: str = key(
        "error", "what to do with an example over max_length", choices=("error", "left", "right", "middle")
    )
    empty_response: str = key(
        "error",
        "what to do with a row whose answer has no text, or none left within max_length; skip counts and names them",
        choices=("error", "skip"),
    )
    shuffle: bool = key(True, "visit the rows of an epoch in an order drawn from (seed, epoch)")
    seed: int = key(
        "${trainer.seed}", "seed of the row order", at_least=0, at_most=LARGEST_SEED, only_if=".shuffle=True"
    )
    chat_template: str | None = key(None, "Jinja template, or a file with one, instead of the tokenizer's own")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "extra arguments of the chat template, e.g. enable_thinking")


@dataclass
class MultiTurnConfig:
    enable: bool = key(False, "rows are conversations, in the column messages_key")
    messages_key: str = key("messages", "that column, unless data.messages_key names one", only_if=".enable=True")


@dataclass
class SFTDataConfig(ExampleDataConfig):
    prompt_key: str = key("question", "column with the prompt")
    response_key: str = key("answer", "column with the answer, which is what is learnt")
    prompt_dict_keys: list[str] | None = key(None, "keys to follow inside the prompt column, e.g. [question]")
    response_dict_keys: list[str] | None = key(None, "keys to follow inside the response column, e.g. [answer]")
    messages_key: str | None = key(
        None, "column with whole conversations, of which every assistant message is learnt; null: prompt and response"
    )
    multiturn: MultiTurnConfig = section(MultiTurnConfig, "another way to say messages_key")


@dataclass
class PreferenceDataConfig(ExampleDataConfig):
    prompt_key: str = key(
        "prompt", "column with the prompt, text or messages; may be absent if answers are whole chats"
    )
    chosen_key: str = key("chosen", "column with the better answer: text, or messages")
    rejected_key: str = key("rejected", "column with the worse answer")


@dataclass
class StartModelConfig:
    partial_pretrain: str | None = key(None, "Hugging Face name or folder of the model to start from")
    path: str | None = key(None, "another name of partial_pretrain")
    tokenizer_path: str | None = key(None, "tokenizer name or folder; null: the model's")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    override_config: dict[str, Any] = key({}, "changes to the model's own config, e.g. attention dropout")
    enable_gradient_checkpointing: bool = key(
        False, "recompute activations in the backward pass: less memory, a third more time"
    )
    save_dtype: str = key("float32", "type of the weights in the exported folder", choices=("float32", "bfloat16"))
    ulysses_sequence_parallel_size: int = shared_sequences()
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")


@dataclass
class PolicyModelConfig(StartModelConfig):
    lora_rank: int = key(0, "rank of a LoRA adapter; 0: train all weights", at_least=0, at_most=8192)
    lora_alpha: int = key(16, "LoRA scale", at_least=1, only_if=WITH_LORA)
    target_modules: str | list[str] = key("all-linear", "modules that get an adapter", only_if=WITH_LORA)
    exclude_modules: str | list[str] | None = key(
        None, "modules among them that get none; a text is a pattern", only_if=WITH_LORA
    )
    lora_adapter_path: str | None = key(
        None, "folder of a LoRA adapter to start from, as peft writes it; its rank, alpha and modules hold"
    )


@dataclass
class SFTModelConfig(PolicyModelConfig):
    from_config: str | None = key(
        None, "folder with config.json and a tokenizer: start from random weights of that shape instead"
    )


@dataclass
class SupervisedOptimConfig:
    name: str = optimiser_name()
    lr: float = key(1e-5, "peak learning rate", at_least=0, at_most=100)
    betas: list[float] = key([0.9, 0.95], "AdamW betas")
    weight_decay: float = key(0.01, "AdamW weight decay", at_least=0)
    lr_warmup_steps: int = key(
        -1, "steps of linear warm-up; -1: lr_warmup_steps_ratio decides", unit="steps", at_least=-1
    )
    lr_warmup_steps_ratio: float = key(
        0.1, "linear warm-up as a share of all steps", at_least=0, at_most=1, only_if=".lr_warmup_steps=-1"
    )
    lr_scheduler: str = key("cosine", "after the warm-up", choices=("cosine", "wsd", "linear", "constant"))
    min_lr_ratio: float = key(
        0.0, "lowest learning rate as a share of lr", at_least=0, at_most=1, only_if=".lr_scheduler!=constant"
    )
    clip_grad: float = key(1.0, "largest norm of the gradient", at_least=1e-6)


@dataclass
class SupervisedTrainerConfig:
    project_name: str = key("quadriga", "first part of the run directory's name")
    experiment_name: str | None = key(
        None,
        "second part of it; null: the model and the time, a new run each time. A name is what a later command resumes",
    )
    default_local_dir: str = key(
        "outputs/${trainer.project_name}/${trainer.experiment_name}",
        "run directory: config.yaml, metrics.jsonl, checkpoints/ and, at the end, the model in huggingface/",
    )
    logger: list[str] = key(["console"], "metric sinks besides metrics.jsonl", choices=METRIC_SINKS)
    device: str | None = key(
        None, "accelerator; null: the first of these that the machine has", choices=("cuda", "npu", "cpu")
    )
    total_epochs: int = key(4, "passes over the training set", unit="epochs", at_least=1)
    total_training_steps: int | None = key(
        None, "stop after so many steps; null: total_epochs decides", unit="steps", at_least=1
    )
    test_freq: int = key(-1, "validate every so many steps; 0 or -1: only at the end", unit="steps", at_least=-1)
    save_freq: int = key(
        -1, "write a checkpoint every so many steps; 0 or -1: only at the end", unit="steps", at_least=-1
    )
    max_ckpt_to_keep: int | None = key(None, "keep only the newest checkpoints; null: all", at_least=1)
    resume_mode: str = key(
        "auto", "auto: from the newest complete checkpoint", choices=("auto", "disable", "resume_path")
    )
    resume_from_path: str | None = key(None, "checkpoint folder for resume_mode=resume_path")
    steering: bool = key(False, "let `quadriga tell` save, validate, stop or change keys of the live run")
    log_freq: int = key(1, "print every so many steps; metrics.jsonl has them all", unit="steps", at_least=1)
    seed: int = key(
        1,
        "seed of random weights, of new adapters and, by default, of the row order",
        at_least=0,
        at_most=LARGEST_SEED,
    )
    nccl_timeout: int = key(600, "a collective may take so long", unit="s", at_least=1, at_most=LONGEST_S)


@dataclass
class SFTConfig:
    """A whole supervised fine-tuning run."""

    data: SFTDataConfig = section(SFTDataConfig, "examples")
    model: SFTModelConfig = section(SFTModelConfig, "what is trained")
    optim: SupervisedOptimConfig = section(SupervisedOptimConfig, "optimiser")
    trainer: SupervisedTrainerConfig = section(SupervisedTrainerConfig, "the run: length, schedule, output")


@dataclass
class RMConfig:
    """The training of a reward model on preference pairs."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "preference pairs; a row is a pair")
    model: StartModelConfig = section(StartModelConfig, "the language model that gets a score on top")
    optim: SupervisedOptimConfig = section(SupervisedOptimConfig, "optimiser")
    trainer: SupervisedTrainerConfig = section(SupervisedTrainerConfig, "the run: length, schedule, output")


@dataclass
class DPOLossConfig:
    beta: float = key(0.1, "pull towards the reference, which is the model at the start", at_least=1e-6)
    loss_type: str = key("sigmoid", "loss of a pair", choices=DPO_LOSSES)
    label_smoothing: float = key(
        0.0,
        "share of preferences taken to be the wrong way round, below 0.5",
        at_least=0,
        at_most=0.49,
        only_if=".loss_type=sigmoid",
    )


@dataclass
class DPOConfig:
    """Direct preference optimisation of a policy."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "preference pairs; a row is a pair")
    model: PolicyModelConfig = section(PolicyModelConfig, "what is trained, and as it starts the reference")
    dpo: DPOLossConfig = section(DPOLossConfig, "what is optimised")
    optim: SupervisedOptimConfig = section(lambda: SupervisedOptimConfig(lr=1e-6), "optimiser")
    trainer: SupervisedTrainerConfig = section(SupervisedTrainerConfig, "the run: length, schedule, output")


SCHEMAS: dict[str, type] = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}
