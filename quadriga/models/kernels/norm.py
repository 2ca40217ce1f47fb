"""x / rms(x) · (weight + offset) with weights in float32 arithmetic, in one kernel forward and one backward.

For norms that PyTorch's own does not compute: Gemma's, whose weights are kept less 1 and must not be rounded after the 1 is added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 256
"""Sums that the gradient of the weight is made of: the same number in every run, so it is added in the same order."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Over the last dimension of `x`, which is as wide as `weight`; computed in float32 and rounded once."""
    return _RMSNorm.apply(x, weight, eps, offset)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        width = weight.numel()
        rows = x.numel() // width
        out, scale = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        _forward_kernel[(rows,)](x, weight, out, scale, width, eps, offset, BLOCK=block, num_warps=_warps(block))
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, rows, width = grads[0].contiguous(), scale.numel(), weight.numel()
        parts = min(rows, _PARTS)
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty(parts, width, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        _backward_kernel[(parts,)](
            grad, x, weight, scale, grad_x, grad_weight, rows, width, ctx.offset, BLOCK=block, num_warps=_warps(block)
        )
        return grad_x, grad_weight.sum(0).to(weight.dtype), None, None


def _warps(block: int) -> int:
    return min(8, max(1, block // 256))


@triton.jit
def _forward_kernel(x, weight, out, scale, width, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(scale + row, factor)
    tl.store(out + row * width + column, (value * factor * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(grad, x, weight, scale, grad_x, grad_weight, rows, width, offset, BLOCK: tl.constexpr):
    """Rows p, p + parts, p + 2 parts, … for part p: the gradient of x, and the sum for that of the weight."""
    part = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(part, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + column
        pull = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(scale + row)
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor
        total += pull * normal
        pull = pull * gain
        slope = (pull - normal * (tl.sum(pull * normal) / width)) * factor
        tl.store(grad_x + at, slope.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + part * width + column, total, mask=inside)
