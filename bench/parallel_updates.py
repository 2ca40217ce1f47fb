"""Actor and critic in pools of their own: what updating them at the same time saves.

    python bench/parallel_updates.py [--repeats 5]

Two slots of one thread each, real workers, the same rows and the same optimiser steps. Each repeat updates one after the
other and then both at once; times are the workers' own. Bar: both at once in at most 0.65 of their sum.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch

from quadriga import DataProto
from quadriga.config import load_config
from quadriga.config.placement import placement_of
from quadriga.controller import RayWorkerGroup, ResourcePoolManager
from quadriga.trainer.ppo.crew import Crew, Role
from quadriga.workers import ActorRolloutRefWorker, CriticWorker

ROWS, PROMPT, RESPONSE, VOCAB = 32, 32, 96, 4096


def write_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {f"t{i}": i for i in range(VOCAB - 8)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0").save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, tie_word_embeddings=True, **shape, **heads)).save_pretrained(folder)
    return folder


def rows() -> DataProto:
    random = torch.Generator().manual_seed(1)
    response = torch.randn(ROWS, RESPONSE, generator=random)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.randint(2, VOCAB, (ROWS, PROMPT + RESPONSE), generator=random),
            "attention_mask": torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.long),
            "response_mask": torch.ones(ROWS, RESPONSE, dtype=torch.long),
            "advantages": response,
            "returns": response,
            "values": torch.zeros(ROWS, RESPONSE),
        },
        meta_info={"step": 1, "mini_batches": 1},
    )


def spans(crew: Crew) -> dict[str, tuple[float, float]]:
    """Start and end of the updates since the last time."""
    calls = [call for host in crew.groups.values() for rank in host.take_calls() for call in rank]
    return {method: (start, start + seconds) for _, method, start, seconds in calls if method.startswith("update_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        trainer = {"placement": "split", "n_gpus_per_node": 2, "device": "cpu", "default_local_dir": folder}
        config = load_config(
            {"trainer": trainer, "actor_rollout_ref": {"model": {"path": str(write_model(Path(folder) / "model"))}}}
        )
        placed = placement_of(config)
        classes = {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker}
        homes = {role: placed.role_pool[str(role)] for role in classes}
        crew = Crew(config, classes, ResourcePoolManager(placed.pools, homes, device="cpu"), RayWorkerGroup)
        threads = [report.threads for report in crew.start()]
        crew.load_models(total_steps=100)
        data, ratios = rows(), []
        for repeat in range(repeats + 1):
            crew.actor.update_actor(data)
            crew.critic.update_critic(data)
            alone = sum(end - start for start, end in spans(crew).values())
            pending = [crew.critic.start("update_critic", data), crew.actor.start("update_actor", data)]
            for call in pending:
                call.get()
            both = list(spans(crew).values())
            wall = max(end for _, end in both) - min(start for start, _ in both)
            if repeat:  # the first is for warming up
                ratios.append(wall / alone)
                print(f"one after the other {alone:.2f} s   at the same time {wall:.2f} s   ratio {wall / alone:.2f}")
        crew.shutdown()
    print(f"threads per worker {threads}, median ratio {statistics.median(ratios):.2f} (bar 0.65)")


if __name__ == "__main__":
    main()
