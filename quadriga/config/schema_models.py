"""The part of the schema about models and how they are trained: weights, optimiser, sharding, profiles. See `schema.py`."""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.config.fields import MOST_PROCESSES, key, section
from quadriga.config.names import OPTIMISERS

ACTOR = "actor_rollout_ref.actor"
WITH_LORA = ".lora_rank or .lora_adapter_path"
ON_A_DEVICE = "trainer.device!=cpu"
"""Said by the user: the same file serves a machine that has a device and one that has none."""
PROFILED = "global_profiler.tool"
BY_TOKENS, BY_ROWS = ".{0}=True or .{1}=null and .{0}!=False", ".{0}!=True"
"""Of passes that are filled up to a token budget, and of those with a fixed number of rows."""


# Keys that stand in several sections with one meaning.


def optimiser_name() -> Any:
    doc = "optimiser; adamw_8bit and adamw_bf16: AdamW with moments of 2 or 4 bytes a weight instead of 8, rounded at random"
    return key("adamw", doc, choices=OPTIMISERS)


def shared_sequences(default: int | str = 1) -> Any:
    doc = "so many neighbouring workers share their rows and split each sequence; token budgets stay per worker"
    return key(default, doc, unit="workers", at_least=1)


def log_prob_rows(doc: str) -> Any:
    doc = f"{doc}; null: log_prob_use_dynamic_bsz"
    return key(None, doc, unit="rows", at_least=1, only_if=BY_ROWS.format("log_prob_use_dynamic_bsz"))


def budget_of_a_pass(only_if: str, doc: str = "token budget of a forward pass") -> Any:
    return key(f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", doc, unit="tokens", at_least=1, only_if=only_if)


BY_LOG_PROB_TOKENS = BY_TOKENS.format("log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu")


@dataclass
class ModelConfig:
    path: str = key("builtin:arithmetic", "Hugging Face name or folder; builtin:arithmetic is the embedded tiny model")
    tokenizer_path: str | None = key(None, "tokenizer name or folder; null: the model's")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    override_config: dict[str, Any] = key({}, "changes to the model's own config, e.g. attention dropout")
    enable_gradient_checkpointing: bool | str = key(
        False,
        "recompute activations in the backward pass: less memory, a third more time; auto: where the plan says that all would not fit",
        choices=(True, False, "auto"),
    )
    lora_rank: int = key(0, "rank of a LoRA adapter; 0: train all weights", at_least=0, at_most=8192)
    lora_alpha: int = key(16, "LoRA scale", at_least=1, only_if=WITH_LORA)
    target_modules: str | list[str] = key("all-linear", "modules that get an adapter", only_if=WITH_LORA)
    exclude_modules: str | list[str] | None = key(
        None, "modules among them that get none; a text is a pattern", only_if=WITH_LORA
    )
    lora_adapter_path: str | None = key(
        None, "folder of a LoRA adapter to start from, as peft writes it; its rank, alpha and modules hold"
    )
    external_lib: str | list[str] | None = key(
        None,
        "module or Python file of your own, or several, that driver and workers import first: it may register losses, estimators, models",
    )


@dataclass
class OtherModelConfig:
    """A model beside the policy."""

    path: str = key("${actor_rollout_ref.model.path}", "Hugging Face name or folder")
    trust_remote_code: bool = key(
        "${actor_rollout_ref.model.trust_remote_code}", "run Python code that comes with the model"
    )
    override_config: dict[str, Any] = key({}, "changes to the model's own config")


@dataclass
class CriticModelConfig(OtherModelConfig):
    enable_gradient_checkpointing: bool | str = key(
        "${actor_rollout_ref.model.enable_gradient_checkpointing}",
        "recompute activations in the backward pass",
        choices=(True, False, "auto"),
    )


@dataclass
class RewardModelPathConfig(OtherModelConfig):
    tokenizer_path: str | None = key(
        None, "its tokenizer; null: the model's. Where it is not the policy's, responses are written anew with it"
    )


@dataclass
class OptimConfig:
    name: str = optimiser_name()
    lr: float = key(1e-6, "peak learning rate", at_least=0, at_most=100)
    lr_warmup_steps: int = key(
        -1, "steps of linear warm-up; -1: lr_warmup_steps_ratio decides", unit="steps", at_least=-1
    )
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all steps", at_least=0, at_most=1)
    lr_scheduler_type: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine", "wsd"))
    min_lr_ratio: float = key(
        0.0,
        "lowest learning rate as a share of lr",
        at_least=0,
        at_most=1,
        only_if=".lr_scheduler_type!=constant",
    )
    weight_decay: float = key(0.01, "AdamW weight decay", at_least=0)
    betas: list[float] = key([0.9, 0.999], "AdamW betas")


@dataclass
class FSDPConfig:
    param_offload: bool = key(False, "keep the weights in host memory while they are not used", only_if=ON_A_DEVICE)
    optimizer_offload: bool = key(
        False,
        "keep the optimiser's state in host memory; a step takes it through the device in parts",
        only_if=ON_A_DEVICE,
    )
    grad_dtype: str = key(
        "float32", "type of the gradients that add up over micro-batches", choices=("float32", "bfloat16")
    )
    reshard_after_forward: bool = key(True, "free gathered weights after the forward pass: less memory, more traffic")
    fsdp_size: int = key(
        -1,
        "shard over so many neighbouring workers, with a copy of the weights for each such set; -1: over all of them",
        unit="workers",
        at_least=-1,
    )


@dataclass
class RefFSDPConfig:
    param_offload: bool = key(False, "keep the weights in host memory while they are not used", only_if=ON_A_DEVICE)
    fsdp_size: int = key(
        f"${{{ACTOR}.fsdp_config.fsdp_size}}",
        "shard over so many neighbouring workers, with a copy of the weights for each such set; -1: over all of them",
        unit="workers",
        at_least=-1,
    )


@dataclass
class TorchProfilerConfig:
    contents: list[str] = key(
        ["cpu", "cuda"], "what a trace holds", choices=("cpu", "cuda", "stack", "shapes", "memory")
    )


@dataclass
class ProfilerToolConfig:
    torch: TorchProfilerConfig = section(TorchProfilerConfig, "the torch profiler")


@dataclass
class ProfilerConfig:
    """Whether a role is profiled in the steps of `global_profiler`."""

    enable: bool = key(False, "profile this role in the steps of global_profiler", only_if=PROFILED)
    all_ranks: bool = key(False, "all of its ranks; False: those of ranks", only_if=PROFILED)
    ranks: list[int] = key([0], "which of them", at_least=0, at_most=MOST_PROCESSES, only_if=PROFILED)
    tool_config: ProfilerToolConfig = section(ProfilerToolConfig, "options of the tools", only_if=PROFILED)
