"""How long the driver takes to turn rewards into advantages, for every estimator.

    python bench/algorithms.py [--rows 16384] [--tokens 1024] [--group 8] [--threads 2] [--gaps] [--mask-dtype bool]

Prints the median and the worst of the repeats, after one warm-up, for response lengths drawn uniformly from 1 to
`--tokens`. `--gaps` puts tool outputs (zeros in the mask) into every row. The bar: each estimator under 0.5 s.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from quadriga.algorithms import adv_estimator_names, compute_advantage

BAR_S = 0.5


def make_batch(rows: int, tokens: int, group: int, gaps: bool, mask_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=random)
    position = torch.arange(tokens)
    mask = position < lengths[:, None]
    if gaps:
        mask &= (position % 256 < 224) | (position == lengths[:, None] - 1)
    rewards = torch.zeros(rows, tokens)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), generator=random).float()
    return {
        "token_level_rewards": rewards,
        "response_mask": mask.to(mask_dtype),
        "values": torch.randn(rows, tokens, generator=random),
        "group_ids": torch.arange(rows) // group,
        "reward_baselines": torch.rand(rows, generator=random),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--mask-dtype", default="bool", choices=["bool", "int64", "float32"])
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    batch = make_batch(args.rows, args.tokens, args.group, args.gaps, getattr(torch, args.mask_dtype))
    print(f"{args.rows} rows × {args.tokens} tokens, groups of {args.group}, gaps {args.gaps}, mask {args.mask_dtype}")
    print(f"torch {torch.__version__}, {args.threads} threads")
    print(f"{'estimator':30s} {'median s':>9s} {'worst s':>9s}")
    slow = []
    for name in adv_estimator_names():
        seconds = []
        for _ in range(args.repeats + 1):
            start = time.perf_counter()
            compute_advantage(name, **batch, gamma=0.999, lam=0.95)
            seconds.append(time.perf_counter() - start)
        median, worst = statistics.median(seconds[1:]), max(seconds[1:])
        print(f"{name:30s} {median:9.3f} {worst:9.3f}", flush=True)
        if median > BAR_S:
            slow.append(name)
    if slow:
        raise SystemExit(f"over {BAR_S} s: {', '.join(slow)}")


if __name__ == "__main__":
    main()
