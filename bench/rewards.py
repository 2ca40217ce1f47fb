"""How fast the reward pool scores, and what hanging samples cost it.

    python bench/rewards.py [--workers 2] [--data shared/data/gsm8k/train.jsonl]

1. GSM8K scores per second through the pool: reference answers, handed over in batches, 30,000 of them.
2. 4,096 mixed samples (GSM8K, MATH, countdown), 1 % of which never end: half of these sleep, half spin. The time of the
   whole batch is reported against the deadline of one sample.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quadriga.rewards import scorers
from quadriga.rewards.pool import RewardPool
from quadriga.rewards.result import RewardSample, metrics


def score_or_hang(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """The built-in scorers, except for the samples that are to hang."""
    if extra_info.get("hang") == "sleep":
        time.sleep(1e6)
    while extra_info.get("hang") == "spin":
        pass
    return scorers.score(data_source, solution_str, ground_truth, extra_info)


def gsm8k_samples(file: Path, count: int) -> list[RewardSample]:
    """Reference answers where the dataset is at hand, else generated ones of the same length."""
    if file.is_file():
        answers = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
    else:
        print(f"{file} is not here: generated answers instead")
        answers = ["He adds 3 and 4 to get <<3+4=7>>7. " * 8 + f"\n#### {k}" for k in range(8000)]
    pairs = [(text, text.rpartition("####")[2].strip().replace(",", "")) for text in answers]
    return [RewardSample("openai/gsm8k", *pairs[k % len(pairs)], {"index": k}) for k in range(count)]


def mixed_samples(file: Path, count: int, hanging_share: float) -> list[RewardSample]:
    samples = gsm8k_samples(file, count)
    for k in range(0, count, 4):
        truth = f"\\frac{{{k}}}{{2}}" if k % 8 else str(k / 2)  # half of them are equal as text, half by algebra
        samples[k] = RewardSample("lighteval/MATH", f"so \\boxed{{\\frac{{{k}}}{{2}}}}", truth)
        samples[k + 1] = RewardSample("countdown", "<answer>(3 + 4) * 2</answer>", {"target": 14, "numbers": [2, 3, 4]})
    every = round(1 / hanging_share)
    for j, k in enumerate(range(every // 2, count, every)):
        samples[k] = RewardSample("gsm8k", "#### 1", "1", {"hang": "sleep" if j % 2 else "spin"})
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=10.0)
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared/data/gsm8k/train.jsonl"
    )
    options = parser.parse_args()

    samples = gsm8k_samples(options.data, 30_000)
    began = time.perf_counter()
    with RewardPool(num_workers=options.workers) as pool:
        print(f"pool ready after {time.perf_counter() - began:.3f} s")
        pool.score_all(samples[:500])
        began = time.perf_counter()
        results = pool.score_all(samples)
        seconds = time.perf_counter() - began
    right = sum(result.score for result in results)
    print(
        f"GSM8K: {len(samples) / seconds:,.0f} scores/s ({options.workers} workers, {right:.0f} of {len(samples)} right)"
    )

    samples = mixed_samples(options.data, 4096, 0.01)
    hanging = sum("hang" in sample.extra_info for sample in samples)
    began = time.perf_counter()
    with RewardPool(score_or_hang, num_workers=options.workers, timeout_s=options.deadline) as pool:
        results = pool.score_all(samples)
        seconds = time.perf_counter() - began
        counters = pool.counters
    found = metrics(results)
    wrong = sum(r.score != 1.0 for s, r in zip(samples, results) if "hang" not in s.extra_info)
    print(
        f"mixed: 4,096 samples, {hanging} hanging: {seconds:.1f} s = deadline ({options.deadline:g} s) + "
        f"{seconds - options.deadline:.1f} s; timeouts {found['reward/timeouts'] * len(samples):.0f}, "
        f"wrong scores {wrong}, processes started {counters['workers_started']}"
    )


if __name__ == "__main__":
    main()
