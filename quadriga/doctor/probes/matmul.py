"""Probe: one CPU matrix product in the dtype named by the first argument, compared with the exact result."""

from __future__ import annotations

import resource
import sys

import torch


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a SIGILL here is expected and must not litter core files
    torch.set_num_threads(1)
    dtype = getattr(torch, sys.argv[1])
    generator = torch.Generator().manual_seed(0)
    # Large enough for the vendor kernels; small integers, so that every format holds inputs and sums without rounding.
    left, right = (torch.randint(0, 2, (256, 256), generator=generator).double() for _ in range(2))
    product = left.to(dtype) @ right.to(dtype)
    if not torch.equal(product.double(), left @ right):
        sys.exit(f"{sys.argv[1]} matrix product gives wrong numbers")


if __name__ == "__main__":
    main()
