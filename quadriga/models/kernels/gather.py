"""Rows of a tensor by index, with a gradient that is summed in a fixed order and in float32.

PyTorch's own gradient of `index_select` adds with atomics in the tensor's precision: in another order in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Readers(NamedTuple):
    """Which places read each row: those of row t are `order[starts[t] : starts[t + 1]]`, ascending."""

    order: Tensor
    starts: Tensor


def readers_of(index: Tensor, rows: int) -> Readers:
    """The readers of each of `rows` rows, where place s reads row `index[s]`. Waits for nothing."""
    ascending, order = index.sort(stable=True)
    bounds = torch.arange(rows + 1, dtype=index.dtype, device=index.device)
    return Readers(order, torch.searchsorted(ascending, bounds))


def gather_rows(x: Tensor, index: Tensor, readers: Readers) -> Tensor:
    """`x[index]` along the first dimension, differentiable; `readers` are those of `index`."""
    return _Gather.apply(x, index, *readers)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(order, starts)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        order, starts = ctx.saved_tensors
        grad = grads[0].contiguous()
        out = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device)
        rows, width = ctx.shape[0], ctx.shape[1:].numel()
        block = min(1024, triton.next_power_of_2(width))
        _sum_kernel[(rows, triton.cdiv(width, block))](
            grad, order, starts, out, width, BLOCK=block, num_warps=max(1, block // 256)
        )
        return out, None, None, None


@triton.jit
def _sum_kernel(grad, order, starts, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
        source = tl.load(order + place)
        total += tl.load(grad + source * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
