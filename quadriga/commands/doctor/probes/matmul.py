"""Probe: `matmul.py DTYPE…` takes a CPU matrix product in each dtype, and names each that equals the exact result."""

from __future__ import annotations

import json
import resource
import sys

import torch


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a SIGILL here is expected and must not litter core files
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    # Large enough for the vendor kernels; small integers, so that every format holds inputs and sums without rounding.
    left, right = (torch.randint(0, 2, (256, 256), generator=generator).double() for _ in range(2))
    for name in sys.argv[1:]:
        dtype = getattr(torch, name)
        if not torch.equal((left.to(dtype) @ right.to(dtype)).double(), left @ right):
            sys.exit(f"the {name} product gives wrong numbers")
        print(json.dumps({name: "right"}), flush=True)


if __name__ == "__main__":
    main()
