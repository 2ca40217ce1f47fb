"""The product with a weight and its gradients, where PyTorch's own way is slow.

PyTorch gives float32 products to MKL, which knows AMD's processors badly: oneDNN, which it also carries, is 10 to 130 %
faster there. Both give a row the same bits whatever rows are beside it, oneDNN from two rows on. The gradient of a weight, whose
sums run over all rows, is slow in both, so it has a kernel in C.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.models.kernels.cpu.library import kernels

KEPT_SHAPES = 32
"""Shapes of products that stay prepared. A micro-batch of a model has about ten, the same in all of its layers."""

# oneDNN compiles code for each shape, half a megabyte of it, and keeps the last 1,024; PyTorch's layer above it does the same
# once more. Packed micro-batches have another number of tokens in every step, so nothing of that is used again: a worker would
# grow by hundreds of megabytes. Both read these variables at the first product.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, str(KEPT_SHAPES))


@functools.cache
def prefers_onednn() -> bool:
    """Whether this machine's float32 products are for oneDNN."""
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "AuthenticAMD" in about and torch.backends.mkldnn.is_available()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x[T, K] @ weight[N, K].T + bias` by oneDNN; not differentiable."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """`grad[T, N] @ weight[N, K]` by oneDNN."""
    return product(grad, weight.t())


def add_weight_gradient(total: Tensor, grad: Tensor, rows: Tensor) -> None:
    """`total[N, K] += grad[T, N].T @ rows[T, K]`, twice as fast as by either library on AMD's processors."""
    library = kernels()
    if library is None:
        total.addmm_(grad.t(), rows)
        return
    grad, rows = grad.contiguous(), rows.contiguous()
    room = grad.new_empty(library.weight_gradient_room(*total.shape))
    tensors = grad.data_ptr(), rows.data_ptr()
    library.weight_gradient(*tensors, len(rows), *total.shape, room.data_ptr(), total.data_ptr())


class Linear(torch.autograd.Function):
    """`apply(x[..., K], weight[N, K], bias[N] or None)`"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        want_x, want_weight, want_bias = ctx.needs_input_grad
        grad, rows = grads[0].reshape(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])
        grad_x = input_gradient(grad, weight).view(x.shape) if want_x else None
        grad_weight = None
        if want_weight:
            grad_weight = torch.zeros_like(weight)
            add_weight_gradient(grad_weight, grad, rows)
        return grad_x, grad_weight, grad.sum(0) if want_bias else None


class FusedLinear(nn.Linear):
    """`nn.Linear` with the weights of another one."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        plain = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu" and input.numel() > 0
        if not plain:
            return super().forward(input)
        return Linear.apply(input, self.weight, self.bias)
