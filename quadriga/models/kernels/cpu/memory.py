"""Large memory on a CPU."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20


def huge_zeros(*size: int) -> Tensor:
    """Float32 zeros in pages of 2 MiB where the system has them; what is never written takes no memory.

    The tables of small pages halve the speed of reading on a virtual machine.
    """
    count = math.prod(size)
    if 4 * count < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size)
    # One page more than needed, to begin at the start of one.
    memory = mmap.mmap(-1, 4 * count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    start = -whole.data_ptr() % _HUGE // 4
    return whole[start : start + count].view(size)
