"""Run by test_engine_ranks: `python rank_job.py FOLDER`. Real processes, gloo, one engine over all of them.

One, two, then four ranks do the same job. The parent has imported everything when it forks them, so that they start at
once; rank 0 writes the results to FOLDER/(number of ranks).
"""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine_cases import VOCABULARY, critic_loss, gradients, mini_batch, ppo_loss, sgd_like, tiny_critic, tiny_policy
from omegaconf import OmegaConf

from quadriga.config import load_config
from quadriga.config.schema_models import FSDPConfig
from quadriga.engine import TrainingEngine
from quadriga.engine.weights import host_state_dict
from quadriga.workers import updates
from quadriga.workers.losses import actor_loss
from quadriga.workers.mini_batch_view import MiniBatchView


def sorted_by_length(data):
    """Rank 0 gets the longest rows, so that ranks need different numbers of micro-batches."""
    data.reorder(data.batch["attention_mask"].sum(-1).argsort(descending=True, stable=True))
    return data


def taught(data):
    """The rows with what a teacher says of them, drawn from their own tokens; log-probs of the rollout."""
    data = data[:]
    shape, ids = data.batch["response_mask"].shape, data.batch["input_ids"]
    top = (ids[:, -shape[1] :, None] + torch.arange(5) * 7) % VOCABULARY
    data.batch["teacher_top_ids"] = top.int()
    data.batch["teacher_top_log_probs"] = (-1.0 - (top % 11) / 4.0).float()
    data.batch["teacher_mask"] = torch.ones(shape, dtype=torch.long)
    data.batch["rollout_log_probs"] = data.batch["old_log_probs"]
    return data


def config_of(**changes):
    teacher = {"enabled": True, "teacher_models": {"one": {"model_path": "m"}}}
    teacher["distillation_loss"] = {"loss_mode": "jsd_topk", "topk": 5}
    base = {"algorithm": {"adv_estimator": "grpo"}, "distillation": teacher, "actor_rollout_ref": {"rollout": {"n": 2}}}
    return load_config(OmegaConf.to_container(OmegaConf.merge(base, changes)))


WHOLE_MINI_BATCH = {
    "clip_cov": config_of(
        actor_rollout_ref={
            "actor": {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_lb": 0.0}}
        }
    ),
    "kl_cov": config_of(
        actor_rollout_ref={
            "actor": {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2, "entropy_top_ratio": 0.6}}
        }
    ),
    "reinforce": config_of(
        algorithm={
            "rollout_correction": {
                "bypass_mode": True,
                "loss_type": "reinforce",
                "rollout_is": "sequence",
                "rollout_is_batch_normalize": True,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": 1.4,
            }
        }
    ),
}


def recomputes_by_rank(rank: int, world: int) -> list[bool]:
    """Whether each rank recomputes activations by itself; the last one has much less memory than the others."""
    config = config_of(actor_rollout_ref={"model": {"enable_gradient_checkpointing": "auto"}})
    updates.usable_memory = lambda: (1 << 20 if 0 < rank == world - 1 else 1 << 50, 0)
    decided = [False] * world
    dist.all_gather_object(decided, updates.recomputes_activations(config, "actor", "cpu", 1))
    return decided


def run_rank(rank: int, world: int, port: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    data = sorted_by_length(mini_batch())
    even = data.chunk(world)[rank]
    most = len(data) - world + 1
    uneven = data[:most] if rank == 0 else data[most + rank - 1 : most + rank]  # fewer rows than micro-batches
    results = {}
    for name, loss_fn, build, reshard in (
        ("policy", ppo_loss("token-mean"), tiny_policy, True),
        ("policy, uneven rows", ppo_loss("seq-mean-token-mean"), tiny_policy, True),
        ("policy, weights kept", ppo_loss("token-mean"), tiny_policy, False),
        ("critic", critic_loss, tiny_critic, True),
    ):
        share = uneven if "uneven" in name else even
        fsdp = FSDPConfig(reshard_after_forward=reshard)
        engine = TrainingEngine(build(), optim=sgd_like(1e-4), fsdp=fsdp, grad_clip=None)
        before = engine.values(share, 17) if "critic" in name else engine.log_probs(share, 1.0, 17)[0]
        metrics = engine.train_mini_batch(share, loss_fn, 17, with_entropy="critic" not in name)
        gathered = [before] * world
        dist.all_gather_object(gathered, before)
        results[name] = {
            "metrics": metrics,
            "gradients": gradients(engine),
            "tokens": torch.cat(gathered),
            "weights": host_state_dict(engine.model),
        }
    for name, config in WHOLE_MINI_BATCH.items():
        engine = TrainingEngine(tiny_policy(), optim=sgd_like(1e-4), grad_clip=None)
        part, actor = taught(even), config.actor_rollout_ref.actor
        seen = MiniBatchView(config, engine).add(part, draw=3)
        loss_fn = actor_loss(
            actor, loss_type=config.algorithm.rollout_correction.loss_type, distillation=config.distillation
        )
        ids = "teacher_top_ids"
        metrics = engine.train_mini_batch(part, loss_fn, 17, with_entropy=True, other_ids=ids)
        results[name] = {"metrics": metrics | seen, "gradients": gradients(engine)}
    clipped = TrainingEngine(tiny_policy(), optim=sgd_like(1e-4), grad_clip=0.01)
    results["clipped"] = clipped.train_mini_batch(even, ppo_loss(), 17, with_entropy=True)
    results["clipped gradients"] = gradients(clipped)
    results["recomputes"] = recomputes_by_rank(rank, world)
    if rank == 0:
        torch.save(results, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    for world_size in (1, 2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        arguments = (world_size, free_port, f"{sys.argv[1]}/{world_size}")
        mp.start_processes(run_rank, args=arguments, nprocs=world_size, start_method="fork")
