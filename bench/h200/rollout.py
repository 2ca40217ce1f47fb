"""Generation speed of the native engine on one GPU.

    python bench/h200/rollout.py [--case NAME …] [--rounds 2] [--exact] [--profile FILE] [--json FILE]

Random weights in bfloat16, prompts of random tokens, end tokens ignored, with the log-prob of every token. The limit is what
the memory allows: each step reads all weights once and every row's keys and values, and writes and reads the logits.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from shapes import MATRIX_RATE, MEMORY_BANDWIDTH, config_of, make_model, parameters

from quadriga.models.exact import set_exact
from quadriga.rollout import Request, SamplingParams, create_engine


@dataclass(frozen=True)
class Case:
    shape: str
    prompts: int
    samples: int
    prompt_length: tuple[int, int]
    new_tokens: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


CASES = {
    "1024 sequences": Case("0.5B", 128, 8, (60, 160), 512),
    "256 sequences": Case("0.5B", 32, 8, (60, 160), 512),
    "64 sequences": Case("0.5B", 8, 8, (60, 160), 512),
    "1.5B, 1024 sequences": Case("1.5B", 128, 8, (60, 160), 512),
    "long context, 64 sequences": Case("0.5B", 64, 1, (8192, 8192), 2048),
}


def limit_seconds(case: Case, count: int, lengths: list[int]) -> dict[str, float]:
    """The least time that memory traffic, and that arithmetic, take for the decoding of a case."""
    config = config_of(case.shape)
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    kv_bytes = 4 * config.num_hidden_layers * width
    context = sum(case.samples * (n * case.new_tokens + case.new_tokens**2 / 2) for n in lengths)
    logits = 8 * config.vocab_size * case.rows
    moved = case.new_tokens * (2 * count + logits) + kv_bytes * context
    return {"memory": moved / MEMORY_BANDWIDTH, "arithmetic": 2 * count * case.rows * case.new_tokens / MATRIX_RATE}


def run(name: str, case: Case, rounds: int, profile: str | None = None) -> dict[str, Any]:
    model = make_model(case.shape, torch.bfloat16)
    lengths = torch.randint(
        case.prompt_length[0], case.prompt_length[1] + 1, (case.prompts,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    params = SamplingParams(max_new_tokens=case.new_tokens, ignore_eos=True)
    samples = tuple(range(case.samples))

    def requests(step: int) -> list[Request]:
        return [
            Request(str(i), torch.randint(0, 151_000, (n,)).tolist(), params, (0, i), samples, step)
            for i, n in enumerate(lengths)
        ]

    start = time.perf_counter()
    engine = create_engine(
        "native",
        module=model,
        max_num_seqs=case.rows,
        max_model_len=case.prompt_length[1] + case.new_tokens,
        max_num_batched_tokens=16384,
    )
    torch.cuda.synchronize()
    made, seconds = time.perf_counter() - start, []
    for step in range(rounds + 1):
        batch = requests(step)
        torch.cuda.synchronize()
        start = time.perf_counter()
        tokens = sum(len(c.token_ids) for c in engine.generate(batch))
        seconds.append(time.perf_counter() - start)
    if profile:
        _profile(engine, requests(9), profile)
    count = parameters(model)
    limit, best = limit_seconds(case, count, lengths), min(seconds[1:])
    return {
        "case": name,
        "tokens_per_s": round(tokens / best),
        "seconds": [round(s, 3) for s in seconds[1:]],
        "first_s": round(seconds[0], 3),
        "engine_made_s": round(made, 2),
        "memory_limit_tokens_per_s": round(tokens / limit["memory"]),
        "share_of_memory_limit": round(limit["memory"] / best, 3),
        "share_of_arithmetic_limit": round(limit["arithmetic"] / best, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def _profile(engine: Any, batch: list[Request], path: str) -> None:
    """A table of kernels of about 30 steps in the middle of a generation."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    stream = engine.generate(batch)
    engine_step, steps = engine.cuda.step, 0

    def step(version: int) -> Any:
        nonlocal steps
        steps += 1
        if steps == 200:
            profiler.start()
        if steps == 230:
            torch.cuda.synchronize()
            profiler.stop()
        return engine_step(version)

    profiler = torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    engine.cuda.step = step
    list(stream)
    engine.cuda.step = engine_step
    with open(path, "w") as file:
        file.write(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90))
        file.write(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="as with trainer.deterministic=exact")
    parser.add_argument("--profile")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: run this on a GPU machine")
    set_exact(options.exact)
    results = []
    for name in options.case:
        torch.cuda.reset_peak_memory_stats()
        results.append({"exact": options.exact} | run(name, CASES[name], options.rounds, options.profile))
        print(json.dumps(results[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
