"""A training engine small enough for tests, and what to do with it. Importable by child processes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config.schema_models import OptimConfig
from quadriga.engine import TrainingEngine
from quadriga.models.attention import register_packed_attention
from quadriga.models.token_model import PolicyModel
from quadriga.protocol import DataProto


def make_engine(
    seed: int = 0, *, hidden: int = 12, layers: int = 2, tied: bool = True, lr: float = 1e-2, device: str = "cpu"
) -> TrainingEngine:
    """A policy with AdamW. Its sizes do not divide by the numbers of ranks, and some shards are empty."""
    torch.set_num_threads(1)  # the same bits in every process, however many threads its parent left it
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=hidden,
        intermediate_size=18,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    register_packed_attention()
    return TrainingEngine(
        PolicyModel(LlamaForCausalLM(config)), optim=OptimConfig(lr=lr), total_steps=10, device=device
    )


def batch(rows: int = 4, seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 23, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": mask.cumsum(1) - 1,
            "response_mask": mask[:, 4:],
        }
    )


def train(engine: TrainingEngine, steps: int = 1, first_seed: int = 0, rows: slice = slice(None)) -> list[float]:
    """Optimiser steps on random rows; the losses."""

    def loss_fn(outputs: dict[str, torch.Tensor], micro: dict[str, torch.Tensor], counts: Any) -> Any:
        return -outputs["log_probs"].sum() / counts.num_tokens, {}

    losses = []
    for step in range(first_seed, first_seed + steps):
        losses.append(engine.train_mini_batch(batch(seed=step)[rows], loss_fn, max_tokens=64)["loss"])
        engine.end_step()
    return losses


def whole_state(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Every weight and every moment of the optimiser, whole, on each rank."""
    from quadriga.engine.sharding import full

    moments = engine.optimizer.state if engine.optimizer is not None else {}
    found = {name: full(p.detach()).clone() for name, p in engine.model.named_parameters()}
    for name, parameter in engine.model.named_parameters():
        for kind, value in moments.get(parameter, {}).items():
            found[f"{name}/{kind}"] = full(value).clone()
    return found
