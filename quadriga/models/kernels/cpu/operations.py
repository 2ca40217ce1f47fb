"""Norms, gated MLPs, rotary embedding and the statistics of logits, of float32 tensors on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quadriga.models.kernels.cpu.library import kernels

_NORM_PARTS = 32
"""Sums that the gradient of a norm's weight is made of: more than threads, and as many whatever the number of threads."""


def fits(*tensors: Tensor) -> bool:
    """Whether these kernels can compute with all of `tensors`."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors) and kernels() is not None


class RMSNorm(torch.autograd.Function):
    """`apply(x, weight, eps)`: x / rms(x) · weight over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        width = weight.numel()
        rows = x.numel() // width
        y, scale = torch.empty_like(x), x.new_empty(rows)
        kernels().rms_norm(*pointers(x, weight), eps, rows, width, *pointers(y, scale))
        ctx.save_for_backward(x, weight, scale)  # one number a row spares the backward pass the sums of squares
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, width, rows = grads[0].contiguous(), weight.numel(), scale.numel()
        parts = min(rows, _NORM_PARTS)
        # All rows add to one gradient of the weight. Threads that added to the same sums would do so in another order each time:
        # so each part of the rows has sums of its own, and the parts are added here, always in the same order.
        grad_x, grad_weight = torch.empty_like(x), x.new_empty(parts, width)
        sizes = rows, width, parts
        kernels().rms_norm_gradient(*pointers(grad, x, weight, scale), *sizes, *pointers(grad_x, grad_weight))
        return grad_x, grad_weight.sum(0), None


class Swiglu(torch.autograd.Function):
    """`apply(gate, up)`: silu(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        kernels().swiglu(*pointers(gate, up), gate.numel(), *pointers(out))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad, grad_gate, grad_up = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        kernels().swiglu_gradient(*pointers(grad, gate, up), gate.numel(), *pointers(grad_gate, grad_up))
        return grad_gate, grad_up


class Rotate(torch.autograd.Function):
    """`apply(x, cos, sin)`: the rotary embedding of `x[T, heads, D]` with angles `[T, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, back=True), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, heads, size = x.shape
    kernels().rotate(*pointers(x, cos, sin), rows, heads, size // 2, back, *pointers(out))
    return out


def pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


def statistics(
    raw: Tensor,
    targets: Tensor,
    scale: float,
    softcap: None,
    normaliser: Tensor,
    target_logit: Tensor,
    entropy: Tensor,
) -> None:
    """Fill the `[R]` outputs with logsumexp(z), z of the target, and the entropy of softmax(z); z = `raw[R, V]` · scale."""
    outputs = pointers(normaliser, target_logit, entropy)
    kernels().softmax_statistics(*pointers(raw, targets.contiguous()), scale, *raw.shape, *outputs)


def gradient(
    raw: Tensor,
    targets: Tensor,
    scale: float,
    softcap: None,
    normaliser: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> Tensor:
    """The gradient of the loss by `raw`, in the place of `raw`; `out` is not used."""
    # In place: logits are the largest tensors of an update, and nobody needs these again.
    by_log_prob = grad_log_prob.contiguous()
    by_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    statistics_of = pointers(normaliser, entropy, by_log_prob)
    kernels().softmax_gradient(
        *pointers(raw, targets.contiguous()),
        scale,
        *statistics_of,
        None if by_entropy is None else by_entropy.data_ptr(),
        *raw.shape,
    )
    return raw
