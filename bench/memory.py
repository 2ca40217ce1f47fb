"""What `quadriga plan` says an update takes, and what it takes: eight configurations on a CPU, each in a process of its own.

    python bench/memory.py [--only NAME …]

Measured is the largest resident memory of the second update, less that of the process before it had a model. The rows of the
table go into docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8} | {
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AdamW": ({}, {}),
    "activations recomputed": ({}, {f"{MODEL}.enable_gradient_checkpointing": True}),
    "half the tokens": ({}, {f"{ACTOR}.ppo_max_token_len_per_gpu": 2048}),
    "adamw_8bit": ({}, {f"{ACTOR}.optim.name": "adamw_8bit"}),
    "adamw_bf16, bf16 gradients": (
        {},
        {f"{ACTOR}.optim.name": "adamw_bf16", f"{ACTOR}.fsdp_config.grad_dtype": "bfloat16"},
    ),
    "LoRA of rank 16": ({}, {f"{MODEL}.lora_rank": 16}),
    "64k words": ({"vocab_size": 65536}, {}),
    "deep and narrow": ({"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20}, {}),
}
LENGTH, ROWS = 512, 16
"""Tokens of a row, and rows of a mini-batch."""
TOKENS = 4096


def configuration(name: str, folder: Path) -> Any:
    """The checked configuration of a case, with a model folder that holds the shape alone."""
    from omegaconf import OmegaConf

    from quadriga.config import load_config

    shape, keys = CASES[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | shape | {"model_type": "llama"}))
    settings = {f"{ACTOR}.ppo_max_token_len_per_gpu": TOKENS, f"{MODEL}.path": str(folder)} | keys
    settings |= {"data.max_prompt_length": LENGTH // 2, "data.max_response_length": LENGTH // 2}
    settings |= {"data.train_batch_size": ROWS, "actor_rollout_ref.rollout.n": 1, "algorithm.adv_estimator": "gae"}
    settings |= {"data.train_files": "t.parquet", "data.val_files": "v.parquet", "trainer.device": "cpu"}
    merged = OmegaConf.create({})
    for key, value in settings.items():
        OmegaConf.update(merged, key, value)
    return load_config(merged)


def predicted(name: str, folder: Path) -> int:
    """Bytes of the actor in its update."""
    from quadriga.config.memory import UPDATE_ACTOR, estimate_memory

    (memory,) = estimate_memory(configuration(name, folder), "cpu")
    return sum(item.size for item in memory.items if item.role == "actor" and UPDATE_ACTOR in item.phases)


def measured(name: str, folder: Path) -> int:
    """Bytes that this process takes more than before it had a model; in a process of its own."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, "--measure", name, "--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return int(done.stdout.split()[-1])


def measure_here(name: str, folder: Path) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quadriga.engine import TrainingEngine
    from quadriga.models.attention import register_packed_attention
    from quadriga.models.load import _with_adapter
    from quadriga.models.policy import PolicyModel
    from quadriga.protocol import DataProto

    config = configuration(name, folder)
    policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    ids = torch.randint(0, 1000, (ROWS, LENGTH))
    rows = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": ids.new_ones(ROWS, LENGTH // 2),
        }
    )

    def engine_of(shape: dict[str, Any]) -> TrainingEngine:
        model = LlamaForCausalLM._from_config(LlamaConfig(**shape), attn_implementation=register_packed_attention())
        if policy.model.lora_rank:
            model = _with_adapter(model, policy.model)
        return TrainingEngine(
            PolicyModel(model),
            optim=actor.optim,
            fsdp=actor.fsdp_config,
            gradient_checkpointing=policy.model.enable_gradient_checkpointing is True,
        )

    def update(engine: TrainingEngine) -> None:
        def loss_fn(outputs: Any, micro: Any, counts: Any) -> Any:
            return -(outputs["log_probs"] + outputs["entropy"]).sum() / counts.num_tokens, {}

        engine.train_mini_batch(rows, loss_fn, actor.ppo_max_token_len_per_gpu, with_entropy=True)

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    update(
        engine_of(SHAPE | small | {"vocab_size": 1024, "num_key_value_heads": 2})
    )  # libraries and threads are loaded
    before = _resident("VmRSS")
    engine = engine_of(SHAPE | CASES[name][0])
    update(engine)
    Path("/proc/self/clear_refs").write_text("5")  # the largest from now on
    update(engine)
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--measure")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.measure:
        print(measure_here(options.measure, Path(options.folder)))
        return
    print("| configuration | plan, MB | measured, MB | plan / measured |\n|---|---|---|---|")
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            said, took = predicted(name, Path(folder)), measured(name, Path(folder))
        print(f"| {name} | {said / 1e6:,.0f} | {took / 1e6:,.0f} | {said / took:.2f} |", flush=True)


if __name__ == "__main__":
    main()
