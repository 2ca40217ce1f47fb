"""A tiny policy, ragged mini-batches and losses, for the engine's tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from quadriga.algorithms import compute_policy_loss, entropy_bonus, kl_loss, value_loss
from quadriga.config.schema_models import OptimConfig
from quadriga.models.attention import register_packed_attention
from quadriga.models.token_model import PolicyModel, ScalarModel, new_scalar_head
from quadriga.protocol import DataProto

VOCABULARY = 61
BUDGET = 10_000


def tiny_causal_lm(seed: int = 0) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def tiny_policy(seed: int = 0) -> PolicyModel:
    return PolicyModel(tiny_causal_lm(seed))


def tiny_critic(seed: int = 0) -> ScalarModel:
    model = ScalarModel(tiny_causal_lm(seed).base_model, new_scalar_head(24))
    torch.nn.init.normal_(model.head.weight, std=0.2)
    return model


def sgd_like(lr: float = 1e-2) -> OptimConfig:
    return OptimConfig(lr=lr, weight_decay=0.0, betas=[0.9, 0.999])


def mini_batch(rows: int = 12, prompt: int = 5, response: int = 7, seed: int = 0, group: int = 1) -> DataProto:
    """Rows of different lengths, one of them with a response of 0 tokens, one with a gap in its response_mask.

    `group` consecutive rows have the same prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, prompt + 1, (rows // group, 1), generator=generator).repeat_interleave(group, 0)
    responses = torch.randint(1, response + 1, (rows, 1), generator=generator)
    responses[0], responses[-1] = response, 0
    columns = torch.arange(prompt + response)
    attention = (columns >= prompt - prompts) & (columns < prompt + responses)
    response_mask = attention[:, prompt:].clone()
    response_mask[0, response // 2] = False
    ids = torch.randint(2, VOCABULARY, attention.shape, generator=generator) * attention
    ids[:, :prompt] = ids[::group, :prompt].repeat_interleave(group, 0)

    def per_token() -> torch.Tensor:
        return torch.randn(rows, response, generator=generator)

    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention.long(),
            "responses": ids[:, prompt:],
            "response_mask": response_mask.long(),
            "advantages": per_token(),
            "old_log_probs": -4.1 + 0.3 * per_token(),
            "ref_log_prob": -4.1 + 0.3 * per_token(),
            "values": per_token(),
            "returns": per_token(),
        }
    )


def ppo_loss(mode: str = "token-mean"):
    """Clipped policy loss − 0.01 entropy + 0.1 KL to the reference."""

    def loss_fn(outputs, micro, counts):
        shared = {"response_mask": micro["response_mask"], "loss_agg": counts.aggregation(mode)}
        loss, metrics = compute_policy_loss(
            "vanilla",
            log_prob=outputs["log_probs"],
            old_log_prob=micro["old_log_probs"],
            advantages=micro["advantages"],
            **shared,
        )
        bonus, more = entropy_bonus(entropy=outputs["entropy"], **shared)
        kl, _ = kl_loss(log_prob=outputs["log_probs"], ref_log_prob=micro["ref_log_prob"], kind="k3", **shared)
        return loss - 0.01 * bonus + 0.1 * kl, metrics | more

    return loss_fn


def critic_loss(outputs, micro, counts):
    return value_loss(
        values=outputs["values"],
        old_values=micro["values"],
        returns=micro["returns"],
        response_mask=micro["response_mask"],
        loss_agg=counts.aggregation("token-mean"),
    )


def gradients(engine) -> dict[str, torch.Tensor]:
    """The gradient of the engine's first step, from AdamW's first moment (0.1 · gradient, where nothing is clipped)."""
    from quadriga.engine.sharding import full

    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    return {names[p]: full(state["exp_avg"]) * 10 for p, state in engine.optimizer.state.items()}
