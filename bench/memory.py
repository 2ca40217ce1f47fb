"""What `quadriga plan` says a worker takes, and what it takes: each configuration in processes of its own.

    python bench/memory.py [--only NAME …] [--device cuda]

Measured is the most memory while a worker does for the second time what the configuration is about (an update, or generation),
less that of its process before it had a model: resident memory on a CPU, allocated memory of the device elsewhere. The rows of
the table go into docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8} | {
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "model_type": "llama",
}
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
LENGTH, ROWS = 512, 16
"""Tokens of a row, and rows of a mini-batch."""
TOKENS = 4096


@dataclass
class Case:
    """A configuration: how its model, its keys and its workers differ from the first one's.

    Attributes:
        phase: what is measured.
    """

    shape: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    phase: str = "update actor"


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
CASES = {
    "AdamW": Case(),
    "activations recomputed": Case(keys={f"{MODEL}.enable_gradient_checkpointing": True}),
    "half the tokens": Case(keys={f"{ACTOR}.ppo_max_token_len_per_gpu": TOKENS // 2}),
    "adamw_8bit": Case(keys={f"{ACTOR}.optim.name": "adamw_8bit"}),
    "adamw_bf16, bf16 gradients": Case(
        keys={f"{ACTOR}.optim.name": "adamw_bf16", f"{ACTOR}.fsdp_config.grad_dtype": "bfloat16"}
    ),
    "LoRA of rank 16": Case(keys={f"{MODEL}.lora_rank": 16}),
    "64k words": Case({"vocab_size": 65536}),
    "deep and narrow": Case({"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20}),
    "mixture of 16 experts": Case(EXPERTS),
    "two workers": Case(workers=2),
    "generation": Case(phase="generate"),
}


def configuration(name: str, folder: Path) -> Any:
    """The checked configuration of a case, with a model folder that holds the shape alone."""
    from omegaconf import OmegaConf

    from quadriga.config import load_config

    case = CASES[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | case.shape))
    settings = {f"{ACTOR}.ppo_max_token_len_per_gpu": TOKENS, f"{MODEL}.path": str(folder)} | case.keys
    settings |= {"data.max_prompt_length": LENGTH // 2, "data.max_response_length": LENGTH // 2}
    settings |= {"data.train_batch_size": ROWS, "actor_rollout_ref.rollout.n": 1, "algorithm.adv_estimator": "gae"}
    settings |= {"data.train_files": "t.parquet", "data.val_files": "v.parquet", "trainer.device": "cpu"}
    settings |= {"trainer.n_gpus_per_node": case.workers}
    merged = OmegaConf.create({})
    for key, value in settings.items():
        OmegaConf.update(merged, key, value)
    return load_config(merged)


def predicted(name: str, folder: Path, device: str = "cpu") -> int:
    """Bytes of the actor in its update, or of the actor's weights and the engine in generation."""
    from quadriga.config.memory import estimate_memory

    (memory,) = estimate_memory(configuration(name, folder), device)
    roles = ("actor",) if CASES[name].phase == "update actor" else ("actor", "rollout")
    unmade = ("optimiser",) if CASES[name].phase == "generate" else ()  # nothing was trained there
    return sum(
        item.size
        for item in memory.items
        if item.role in roles and item.what not in unmade and CASES[name].phase in item.phases
    )


def measured(name: str, folder: Path, device: str = "cpu") -> int:
    """Bytes that the first worker takes more than before it had a model; in processes of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    allocator = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, "--measure", name, "--folder", str(folder), "--device", device]
    ranks = []
    for rank in range(CASES[name].workers):
        meeting = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=os.environ | allocator | meeting, **pipes))
    try:
        told = [rank.communicate(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(errors[-2000:] for _, errors in told))
    return int(told[0][0].split()[-1])


def measure_here(name: str, folder: Path, device: str) -> int:
    import torch
    import torch.distributed as dist

    from quadriga.accelerator import collectives

    if CASES[name].workers > 1:
        dist.init_process_group(collectives(device), rank=int(os.environ["RANK"]), world_size=CASES[name].workers)
    config = configuration(name, folder)
    work = _generator if CASES[name].phase == "generate" else _updater
    small = SHAPE | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    work(config, small | {"vocab_size": 1024, "num_key_value_heads": 2}, device)()  # libraries and threads are loaded
    before = _used(device)
    again = work(config, SHAPE | CASES[name].shape, device)
    again()
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # the largest from now on
    else:
        torch.get_device_module(device).reset_peak_memory_stats()
    again()
    return _used(device, most=True) - before


def _model(config: Any, shape: dict[str, Any], trains: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from quadriga.models.attention import register_packed_attention
    from quadriga.models.load import _with_adapter

    described = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(described, attn_implementation=register_packed_attention())
    lora = config.actor_rollout_ref.model.lora_rank and trains
    return _with_adapter(model, config.actor_rollout_ref.model) if lora else model


def _updater(config: Any, shape: dict[str, Any], device: str) -> Any:
    """A function that updates a model of that shape once."""
    import torch

    from quadriga.engine import TrainingEngine
    from quadriga.engine.sharding import rank, world_size
    from quadriga.models.token_model import PolicyModel
    from quadriga.protocol import DataProto

    policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    ids = torch.randint(0, 1000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.chunk(world_size())[rank()]
    rows = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": ids.new_ones(len(ids), LENGTH // 2),
        }
    )
    engine = TrainingEngine(
        PolicyModel(_model(config, shape, True)),
        optim=actor.optim,
        fsdp=actor.fsdp_config,
        device=device,
        gradient_checkpointing=policy.model.enable_gradient_checkpointing is True,
    )

    def loss_fn(outputs: Any, micro: Any, counts: Any) -> Any:
        return -(outputs["log_probs"] + outputs["entropy"]).sum() / counts.num_tokens, {}

    return lambda: engine.train_mini_batch(rows, loss_fn, actor.ppo_max_token_len_per_gpu, with_entropy=True)


def _generator(config: Any, shape: dict[str, Any], device: str) -> Any:
    """A function that generates responses of the greatest length with a model of that shape."""
    from quadriga.rollout.interface import Request, SamplingParams
    from quadriga.rollout.native.engine import NativeEngine

    module = _model(config, shape, False).to(device).requires_grad_(False).eval()
    engine = NativeEngine(module, max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs, max_model_len=LENGTH)
    sampling = SamplingParams(max_new_tokens=LENGTH // 2)
    turn = iter(range(1_000_000))

    def run() -> None:
        number = next(turn)
        engine.update_weights(number)  # what the cache knows of other weights is worth nothing
        for row in range(ROWS):
            ids = [(7919 * row + 13 * n) % 1000 for n in range(LENGTH // 2)]
            engine.submit(Request(f"{number}-{row}", tuple(ids), sampling, uid=(0, row)))
        while not engine.idle:
            engine.step()

    return run


def _used(device: str, most: bool = False) -> int:
    import torch

    if device != "cpu":
        module = torch.get_device_module(device)
        return int(module.max_memory_allocated() if most else module.memory_allocated())
    what = "VmHWM" if most else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.measure:
        print(measure_here(options.measure, Path(options.folder), options.device))
        return
    print("| configuration | plan, MB | measured, MB | plan / measured |\n|---|---|---|---|")
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            said = predicted(name, Path(folder), options.device)
            took = measured(name, Path(folder), options.device)
        print(f"| {name} | {said / 1e6:,.0f} | {took / 1e6:,.0f} | {said / took:.2f} |", flush=True)


if __name__ == "__main__":
    main()
