"""silu(gate) · up, the middle of a gated MLP, in one kernel forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gate` and `up` of any one shape. Computed in float32 and rounded once; only the two inputs are kept for backward."""
    return _Swiglu.apply(gate, up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _forward_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _backward_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
            grads[0].contiguous(), gate, up, grad_gate, grad_up, gate.numel(), BLOCK=_BLOCK
        )
        return grad_gate, grad_up


@triton.jit
def _forward_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    tl.store(grad_up + at, (g * x * sigmoid).to(grad_up.dtype.element_ty), mask=inside)
    slope = sigmoid * (1 + x * (1 - sigmoid))
    tl.store(grad_gate + at, (g * y * slope).to(grad_gate.dtype.element_ty), mask=inside)
