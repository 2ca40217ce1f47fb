"""Speed of the GRPO update on one GPU.

    python bench/h200/update.py [--shape 0.5B] [--budget TOKENS] [--rounds 2] [--exact] [--profile FILE] [--json FILE]

1,024 rows of prompts as long as GSM8K's and 512 response tokens, one optimiser step, bfloat16 compute over float32 weights.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from shapes import MATRIX_RATE, make_model, parameters, train_flops

from quadriga.config.schema_models import OptimConfig
from quadriga.config.schema_roles import ActorConfig
from quadriga.engine import TrainingEngine
from quadriga.models.attention import register_packed_attention
from quadriga.models.exact import set_exact
from quadriga.models.token_model import PolicyModel
from quadriga.protocol import DataProto
from quadriga.workers.losses import actor_loss


def make_batch(rows: int, prompt: int, response: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(60, prompt + 1, (rows // 8, 1), generator=generator).repeat_interleave(8, 0)
    ids = torch.randint(0, 151_000, (rows, prompt + response), generator=generator)
    ids[:, :prompt] = ids[::8, :prompt].repeat_interleave(8, 0)
    mask = (torch.arange(prompt + response) >= prompt - lengths).long()
    ones = torch.ones(rows, response, dtype=torch.long)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, response).contiguous()
    return DataProto.from_dict(
        {"input_ids": ids * mask, "attention_mask": mask, "response_mask": ones, "advantages": advantages}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--budget", type=int, nargs="*", default=[32768])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="as with trainer.deterministic=exact")
    parser.add_argument("--profile")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: run this on a GPU machine")
    set_exact(options.exact)
    torch.set_num_threads(1)  # as a worker of a run has: more only get into each other's way
    model = make_model(options.shape, torch.float32, attn_implementation=register_packed_attention()).train()
    count, config = parameters(model), model.config
    engine = TrainingEngine(PolicyModel(model), optim=OptimConfig(lr=1e-6), device="cuda")
    data, loss = make_batch(options.rows, 160, 512), actor_loss(ActorConfig(ppo_mini_batch_size=1))
    lengths = data.batch["attention_mask"].sum(1).tolist()
    flops = train_flops(count, config, lengths)

    def step(budget: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.train_mini_batch(data, loss, budget, with_entropy=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    results: list[dict[str, Any]] = []
    first = step(options.budget[0])
    for budget in options.budget:
        torch.cuda.reset_peak_memory_stats()
        seconds = [step(budget) for _ in range(options.rounds)]
        best = min(seconds)
        results.append(
            {
                "shape": options.shape,
                "exact": options.exact,
                "budget": budget,
                "tokens": sum(lengths),
                "tokens_per_s": round(sum(lengths) / best),
                "mfu": round(flops / best / MATRIX_RATE, 3),
                "seconds": [round(s, 3) for s in seconds],
                "first_s": round(first, 2),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    if options.profile:
        from torch.profiler import ProfilerActivity, profile

        part = data[:64]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            engine.train_mini_batch(part, loss, options.budget[-1], with_entropy=True)
            torch.cuda.synchronize()
        with open(options.profile, "w") as file:
            file.write(
                profiler.key_averages().table(sort_by="cuda_time_total", row_limit=60, max_name_column_width=100)
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
