"""act(gate) · up, the middle of a gated MLP, in one kernel forward and one backward; act is SiLU or GELU (by tanh)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _HALF_BLOCK = 2048, 1024


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gate` and `up` of any one shape. Computed in float32 and rounded once; only the two inputs are kept for backward."""
    return _Gated.apply(gate, up, False)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """The same with GELU, as Gemma computes it."""
    return _Gated.apply(gate, up, True)


def gated_halves(both: Tensor, gelu: bool) -> Tensor:
    """act(first half) · second half along the last dimension of `both`, contiguous. Without gradient."""
    width = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], width, dtype=both.dtype, device=both.device)
    rows = out.numel() // width
    _halves_kernel[(rows, triton.cdiv(width, _HALF_BLOCK))](both, out, width, GELU=gelu, BLOCK=_HALF_BLOCK)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        out = torch.empty_like(gate)
        _forward_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), GELU=gelu, BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _backward_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
            grads[0].contiguous(), gate, up, grad_gate, grad_up, gate.numel(), GELU=ctx.gelu, BLOCK=_BLOCK
        )
        return grad_gate, grad_up, None


@triton.jit
def _share(x, GELU: tl.constexpr):
    """act(x) / x, and d act / dx."""
    if GELU:  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        share = tl.sigmoid(x)
        slope = share * (1 + x * (1 - share))
    return share, slope


@triton.jit
def _forward_kernel(gate, up, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    share, _ = _share(x, GELU)
    tl.store(out + at, (x * share * y).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, gate, up, grad_gate, grad_up, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    share, slope = _share(x, GELU)
    tl.store(grad_up + at, (g * x * share).to(grad_up.dtype.element_ty), mask=inside)
    tl.store(grad_gate + at, (g * y * slope).to(grad_gate.dtype.element_ty), mask=inside)


@triton.jit
def _halves_kernel(both, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    share, _ = _share(x, GELU)
    tl.store(out + row * width + column, (x * share * y).to(out.dtype.element_ty), mask=inside)
