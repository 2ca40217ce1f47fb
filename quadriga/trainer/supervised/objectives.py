"""What a supervised run learns: the model it starts from, its examples and its loss. The loop around them is the same for all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms import dpo_loss, pairwise_reward_loss
from quadriga.checkpoint.huggingface import ModelExport, policy_export, reward_model_export
from quadriga.config.schema_models import ModelConfig
from quadriga.config.supervised_schema import (
    DPOConfig,
    PolicyModelConfig,
    RMConfig,
    SFTConfig,
    SFTModelConfig,
    StartModelConfig,
)
from quadriga.data import collate_pairs, collate_sft, create_preference_dataset, create_sft_dataset
from quadriga.engine import BatchCounts, TrainingEngine
from quadriga.engine.sharding import is_sharded
from quadriga.models.attention import register_packed_attention
from quadriga.models.load import check_vocabulary, load_policy, load_tokenizer, load_value_model, override
from quadriga.models.probe import check_packing
from quadriga.models.source import readable_load_errors, resolve_model_path
from quadriga.models.token_model import PolicyModel, ScalarModel, TokenModel
from quadriga.protocol import DataProto
from quadriga.tracking.run_record import TokenTexts

Columns = dict[str, Tensor]


class Objective:
    """The parts of a supervised run.

    Attributes:
        rows_per_example: rows of a batch that belong together: 1, or 2 for a pair.
        output: what the model says and the loss reads: `log_probs` `[B, R]`, or `values` `[B]`, a score for each row.
    """

    rows_per_example = 1
    output = "log_probs"
    collate = staticmethod(collate_sft)

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tokenizer = start_tokenizer(config.model)

    def load_model(self, shards: bool) -> TokenModel:
        """What is trained, as it starts; an outline if it is going to be sharded."""
        return start_policy(self.config.model, self.tokenizer, shards=shards)

    def dataset(self, files: Any, max_samples: int) -> Any:
        return create_preference_dataset(files, self.config.data, self.tokenizer, max_samples)

    def prepare(self, engine: TrainingEngine) -> None:
        """Called once, with the engine that holds the model as it starts, before a checkpoint is loaded."""

    def add_columns(self, rows: DataProto) -> None:
        """Add to a batch what the loss needs besides the model's output. All ranks call it."""

    def examples(self, counts: BatchCounts) -> int:
        """What the loss is a mean over."""
        return counts.num_sequences // self.rows_per_example

    def sums(self, output: Tensor, columns: Columns) -> dict[str, Tensor]:
        """`loss` and metrics, each added up over the tokens or pairs at hand. For subclasses."""
        raise AttributeError(f"{type(self).__name__} has no loss")

    def samples(self, output: Tensor, columns: Columns) -> list[dict[str, Any]]:
        """What the model said of these examples, for people. For subclasses."""
        raise AttributeError(f"{type(self).__name__} has no samples")

    def export(self, model: Any, dtype: torch.dtype) -> ModelExport:
        """How the model is written as a Hugging Face folder."""
        return policy_export(model, self.tokenizer, dtype)


class SFT(Objective):
    """Mean of −log p over the target tokens."""

    config: SFTConfig

    def dataset(self, files: Any, max_samples: int) -> Any:
        return create_sft_dataset(files, self.config.data, self.tokenizer, max_samples)

    def examples(self, counts: BatchCounts) -> int:
        return counts.num_tokens

    def sums(self, output: Tensor, columns: Columns) -> dict[str, Tensor]:
        return {"loss": -(output * columns["response_mask"]).sum()}

    def samples(self, output: Tensor, columns: Columns) -> list[dict[str, Any]]:
        return answer_rows(self.tokenizer, columns, output)


class RewardModel(Objective):
    """Mean over pairs of −log σ(score of chosen − score of rejected)."""

    config: RMConfig
    rows_per_example = 2
    output = "values"
    collate = staticmethod(collate_pairs)

    def load_model(self, shards: bool) -> TokenModel:
        return start_scorer(self.config.model, self.tokenizer, shards)

    def sums(self, output: Tensor, columns: Columns) -> dict[str, Tensor]:
        chosen, rejected = output.view(-1, 2).unbind(1)
        return {"loss": pairwise_reward_loss(chosen, rejected).sum(), **_margin_sums(chosen, rejected)}

    def samples(self, output: Tensor, columns: Columns) -> list[dict[str, Any]]:
        return pair_rows(self.tokenizer, columns, output)

    def export(self, model: Any, dtype: torch.dtype) -> ModelExport:
        return reward_model_export(model, self.tokenizer, dtype)


class DPO(Objective):
    """Mean over pairs of a loss of how much more the policy than its start prefers the chosen answer."""

    config: DPOConfig
    rows_per_example = 2
    collate = staticmethod(collate_pairs)

    def prepare(self, engine: TrainingEngine) -> None:
        """The reference: the policy without its adapter, or a frozen copy of the start."""
        self.policy = engine
        self.reference = None
        if self.config.model.lora_rank == 0:
            start = start_policy(self.config.model, self.tokenizer, False, is_sharded(engine.device))
            self.reference = TrainingEngine(start, fsdp=self.config.model.fsdp_config, device=engine.device)

    def add_columns(self, rows: DataProto) -> None:
        data, engine = self.config.data, self.reference or self.policy
        with nullcontext() if self.reference is not None else engine.adapter_off():
            log_probs, _ = engine.log_probs(
                rows, 1.0, data.max_token_len_per_gpu, max_rows=data.micro_batch_size_per_gpu
            )
        rows.batch["ref_log_prob_sum"] = log_probs.sum(1)

    def samples(self, output: Tensor, columns: Columns) -> list[dict[str, Any]]:
        return pair_rows(self.tokenizer, columns, self.config.dpo.beta * (output.sum(1) - columns["ref_log_prob_sum"]))

    def sums(self, output: Tensor, columns: Columns) -> dict[str, Tensor]:
        dpo = self.config.dpo
        rewards = output.sum(1) - columns["ref_log_prob_sum"]  # [2 pairs], in units of 1 / beta
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        loss = dpo_loss(chosen - rejected, beta=dpo.beta, loss_type=dpo.loss_type, label_smoothing=dpo.label_smoothing)
        return {"loss": loss.sum(), **_margin_sums(dpo.beta * chosen, dpo.beta * rejected)}


def _margin_sums(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    margin = (chosen - rejected).detach()
    return {
        "accuracy": (margin > 0).float().sum(),
        "margin": margin.sum(),
        "chosen_reward": chosen.detach().sum(),
        "rejected_reward": rejected.detach().sum(),
    }


def objective_of(config: SFTConfig | RMConfig | DPOConfig) -> Objective:
    return {SFTConfig: SFT, RMConfig: RewardModel, DPOConfig: DPO}[type(config)](config)


def start_tokenizer(model: StartModelConfig) -> Any:
    source = model.partial_pretrain or getattr(model, "from_config", None) or ""
    return load_tokenizer(model.tokenizer_path or source, model.trust_remote_code)


def start_policy(model: PolicyModelConfig, tokenizer: Any, trainable: bool = True, shards: bool = False) -> PolicyModel:
    """The policy, on the CPU in float32, or with `shards` as an outline. Random weights and adapters come from torch's random state."""
    if isinstance(model, SFTModelConfig) and model.from_config is not None:
        return _random_policy(model, tokenizer)
    config = _model_config(model)
    config.lora_rank, config.lora_alpha = model.lora_rank, model.lora_alpha
    config.target_modules, config.exclude_modules = model.target_modules, model.exclude_modules
    config.lora_adapter_path = model.lora_adapter_path
    return load_policy(config, tokenizer, trainable, shards)


def start_scorer(model: StartModelConfig, tokenizer: Any, shards: bool = False) -> ScalarModel:
    """The trunk of a language model with a score on top that starts at 0."""
    return load_value_model(_model_config(model), tokenizer, shards)


def _model_config(model: StartModelConfig) -> ModelConfig:
    return ModelConfig(
        path=model.partial_pretrain or "",
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
    )


def _random_policy(model: SFTModelConfig, tokenizer: Any) -> PolicyModel:
    """A policy of the shape in `model.from_config`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = resolve_model_path(model.from_config or "")
    with readable_load_errors(folder, "the shape of a causal language model"):
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        override(shape, model.override_config)
        causal_lm = AutoModelForCausalLM.from_config(
            shape,
            dtype=torch.float32,
            attn_implementation=register_packed_attention(),
            trust_remote_code=model.trust_remote_code,
        )
    check_vocabulary(causal_lm, tokenizer, str(folder))
    policy = PolicyModel(causal_lm)
    check_packing(policy, str(folder))
    return policy.train()


KEPT_EXAMPLES = 64
"""Of a validation, or of a step where there is none."""


def answer_rows(tokenizer: Any, columns: dict[str, Tensor], log_probs: Tensor) -> list[dict[str, Any]]:
    """One dict an example: its text up to the first token learnt from, what follows, and the log-prob of each token there.

    Args:
        columns: `input_ids`, `attention_mask` `[B, T]`, and `response_mask` `[B, T-1]`, which is about token t + 1.
        log_probs: `[B, T-1]`, of token t + 1.
    """
    texts, rows = TokenTexts(tokenizer), []
    for ids, real, mask, said in zip(
        columns["input_ids"], columns["attention_mask"], columns["response_mask"], log_probs
    ):
        length = int(real.sum())
        learnt = mask[: length - 1].bool()
        start = int(learnt.nonzero()[0]) if learnt.any() else length - 1
        answer, values = ids[start + 1 : length].tolist(), said[start : length - 1].double()
        rows.append(
            {
                "prompt": tokenizer.decode(ids[: start + 1].tolist(), skip_special_tokens=True),
                "response": tokenizer.decode(answer, skip_special_tokens=True),
                "response_tokens": len(answer),
                "loss": round(float(-said[: length - 1][learnt].double().mean()), 6) if learnt.any() else None,
                "tokens": {
                    "ids": answer,
                    "texts": texts.of(answer),
                    "trainer_log_probs": [round(value, 4) + 0.0 for value in values.tolist()],
                    "mask": learnt[start:].long().tolist(),
                },
            }
        )
    return rows


def pair_rows(tokenizer: Any, columns: dict[str, Tensor], rewards: Tensor) -> list[dict[str, Any]]:
    """One dict a pair: what both answers begin with, the two answers, and the reward of each, `[2 pairs]`."""
    kept = [ids[real.bool()].tolist() for ids, real in zip(columns["input_ids"], columns["attention_mask"])]
    rows = []
    for chosen, rejected, value in zip(kept[::2], kept[1::2], rewards.view(-1, 2).double().tolist()):
        common = next((k for k, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        rows.append(
            {
                "prompt": tokenizer.decode(chosen[:common], skip_special_tokens=True),
                "chosen": tokenizer.decode(chosen[common:], skip_special_tokens=True),
                "rejected": tokenizer.decode(rejected[common:], skip_special_tokens=True),
                "chosen_reward": round(value[0], 6),
                "rejected_reward": round(value[1], 6),
                "acc": float(value[0] > value[1]),
            }
        )
    return rows
