"""Run by test_sequence_parallel: `python sequence_job.py FOLDER`. Real processes, gloo; ranks share their sequences.

The parent has imported everything when it forks the ranks, so that they start at once; rank 0 writes the results of each
layout (ranks, s, fsdp_size) to FOLDER.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from engine_cases import VOCABULARY, critic_loss, gradients, mini_batch, ppo_loss, sgd_like, tiny_causal_lm, tiny_critic
from test_experts import policy as experts

from quadriga.config.schema_models import FSDPConfig
from quadriga.engine import TrainingEngine
from quadriga.models.attention import register_packed_attention
from quadriga.models.token_model import PolicyModel

LAYOUTS = [(1, 1, -1), (2, 2, -1), (4, 4, -1), (4, 2, -1), (4, 2, 2), (4, 1, 2)]
"""Ranks, ranks that share a sequence, ranks that share a copy of the weights."""
SHAPE = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


def windowed() -> PolicyModel:
    """Gemma 2: capped scores, every other layer with a window."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=3, query_pre_attn_scalar=8
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return PolicyModel(model)


def policy(checkpointing: bool = False) -> PolicyModel:
    model = tiny_causal_lm()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PolicyModel(model)


def cases(size: int, fsdp: FSDPConfig) -> dict[str, tuple[Any, Any, Any, int]]:
    """Name → model, loss, rows, budget of a rank (all ranks' together are the same everywhere)."""
    rows, groups = mini_batch(), mini_batch(rows=12, prompt=9, response=5, group=3)
    return {
        "policy": (policy(), ppo_loss("token-mean"), rows, 40),
        "small micro-batches": (policy(), ppo_loss("seq-mean-token-mean"), rows, 20),
        "shared prompts": (policy(), ppo_loss("token-mean"), groups, 80),
        "checkpointing": (policy(True), ppo_loss("token-mean"), rows, 40),
        "windows and capped scores": (windowed(), ppo_loss("token-mean"), groups, 80),
        "critic": (tiny_critic(), critic_loss, rows, 40),
        "budgets that differ": (policy(), ppo_loss("token-mean"), rows, 40),
        "experts": (experts("qwen3_moe"), ppo_loss("token-mean"), groups, 4000),
        "experts, evened": (experts("qwen3_moe"), ppo_loss("token-mean"), groups, 4000),
    }


def score_loss(outputs: Any, micro: Any, counts: Any) -> Any:
    loss = outputs["values"].square().sum() / counts.num_sequences
    return loss, {}


def run_rank(rank: int, world: int, size: int, fsdp_size: int, port: int, path: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    fsdp, results = FSDPConfig(fsdp_size=fsdp_size), {}
    for name, (model, loss_fn, rows, budget) in cases(size, fsdp).items():
        share = rows.chunk(world)[rank]
        is_critic = name == "critic"
        engine = TrainingEngine(
            model,
            optim=sgd_like(1e-4),
            fsdp=fsdp,
            grad_clip=None,
            sequence_parallel=size,
            router_aux_loss_coef=1.0 if name == "experts, evened" else 0.0,
        )
        each: Any = budget // size
        if name == "budgets that differ":
            engine.budget.auto, each = each + 7 * rank // size, "auto"  # as on devices with more free memory
        told = engine.values(share, each) if is_critic else engine.log_probs(share, 1.0, each)[0]
        metrics = engine.train_mini_batch(share, loss_fn, each, with_entropy=not is_critic)
        gathered = [told] * world
        if world > 1:
            dist.all_gather_object(gathered, told)
        results[name] = {"metrics": metrics, "gradients": gradients(engine), "tokens": torch.cat(gathered)}
    scorer = TrainingEngine(tiny_critic(), optim=sgd_like(), fsdp=fsdp, grad_clip=None, sequence_parallel=size)
    share = mini_batch().chunk(world)[rank]
    uneven = share[: 1 if rank == 0 else None]  # in a validation, ranks may have different numbers of rows
    scores, few = scorer.scores(share, 1000), scorer.scores(uneven, 1000)
    assert torch.allclose(scores[: len(few)], few, atol=1e-6)
    metrics = scorer.train_mini_batch(share, score_loss, 1000, at_last_token=True)
    results["scores"] = {"metrics": metrics, "gradients": gradients(scorer)}
    if rank == 0:
        torch.save(results, path)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    for ranks, sharing, copy in LAYOUTS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        arguments = (ranks, sharing, copy, free_port, f"{sys.argv[1]}/{ranks}-{sharing}-{copy}")
        mp.start_processes(run_rank, args=arguments, nprocs=ranks, start_method="fork")
