"""Run by test_sharded_loading: `python load_job.py FOLDER`. Real processes, gloo; ranks read their parts of models from files.

One rank, which holds whole models, then two and four do the same job; rank 0 writes the results to FOLDER/(number of ranks). The
parent has imported everything when it forks them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from safetensors.torch import load_file, save_file

from quadriga.config.schema_models import FSDPConfig, ModelConfig, OtherModelConfig
from quadriga.engine import TrainingEngine
from quadriga.engine.sharding import full, is_sharded
from quadriga.errors import DataError
from quadriga.models.load import load_policy, load_reward_model, load_value_model

SHAPE = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS: dict[str, Any] = {
    "tied": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "untied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "experts": lambda: transformers.Qwen3MoeConfig(**SHAPE, head_dim=8, **EXPERTS),
    "large": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 8192}
    ),
}
LARGE_BYTES = 4 * (2 * 8192 * 1024 + 4 * (3 * 1024 * 3072 + 3 * 1024 * 1024))
"""Of the float32 weights of `large`, about."""


def write_models(folder: Path) -> None:
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        model.save_pretrained(folder / name, max_shard_size="10KB" if name == "untied" else "5GB")
    config = CONFIGS["tied"]()
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "scorer")
    for name, key in (("not finite", "model.norm.weight"), ("tied by mistake", "lm_head.weight")):
        transformers.AutoModelForCausalLM.from_config(CONFIGS["tied"]()).save_pretrained(folder / name)
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        weights[key] = weights.get(key, weights["model.embed_tokens.weight"]).clone()
        weights[key].view(-1)[-1] = float("nan") if name == "not finite" else 7.0  # in the last rank's part
        save_file(weights, file, {"format": "pt"})


def models(folder: Path, shards: bool) -> dict[str, Any]:
    def path(name: str) -> str:
        return str(folder / name)

    loaded = {
        name: load_policy(ModelConfig(path=path(name)), None, True, shards) for name in ("tied", "untied", "experts")
    }
    torch.manual_seed(3)
    adapted = ModelConfig(path=path("untied"), lora_rank=4, target_modules="all-linear")
    return loaded | {
        "frozen": load_policy(ModelConfig(path=path("tied")), None, False, shards),
        "adapter": load_policy(adapted, None, True, shards),
        "critic": load_value_model(ModelConfig(path=path("tied")), None, shards),
        "scorer": load_reward_model(OtherModelConfig(path=path("scorer")), None, shards),
    }


def refusal(folder: Path, name: str, shards: bool) -> str:
    try:
        TrainingEngine(load_policy(ModelConfig(path=str(folder / name)), None, True, shards))
    except DataError as error:
        return error.what
    return ""


def growth_of_large(folder: Path, shards: bool) -> int:
    """Bytes by which this process's own memory was larger at some time while it loaded and sharded the large model.

    Pages of files that are mapped do not count: how many of them a read maps is the kernel's choice, and it can take them back.
    """

    def own() -> int:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        while not over.wait(0.001):
            sizes.append(own())

    over, sizes = threading.Event(), [own()]
    watcher = threading.Thread(target=watch)
    watcher.start()
    engine = TrainingEngine(load_policy(ModelConfig(path=str(folder / "large")), None, False, shards))
    sizes.append(own())
    over.set()
    watcher.join()
    del engine
    return max(sizes) - sizes[0]


def run_rank(rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    shards = is_sharded("cpu")
    grown = growth_of_large(folder, shards)
    weights, state = {}, {}
    for name, model in models(folder, shards).items():
        fsdp = FSDPConfig(fsdp_size=2 if world == 4 and name == "untied" else -1)
        engine = TrainingEngine(model, fsdp=fsdp)
        parameters = dict(engine.model.named_parameters())
        weights[name] = {key: full(p.detach()).clone() for key, p in parameters.items()}
        state[name] = {
            "trained": sorted(key for key, p in parameters.items() if p.requires_grad),
            "buffers": {key: buffer.clone() for key, buffer in engine.model.named_buffers()},
            "training": engine.model.training,
            "config": json.dumps(engine.model.huggingface.config.to_dict(), default=str, sort_keys=True),
        }
    said = [refusal(folder, name, shards) for name in ("not finite", "tied by mistake")]
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (said, grown))
    if rank == 0:
        torch.save({"weights": weights, "state": state, "ranks": gathered}, folder / str(world))
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    target = Path(sys.argv[1])
    write_models(target)
    for world_size in (1, 2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        mp.start_processes(run_rank, args=(world_size, free_port, target), nprocs=world_size, start_method="fork")
