"""The norm of the gradient over all shards, its clipping, and gradients of 16 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quadriga.engine.sharding import local, sum_over_ranks


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """2-norm of the whole gradient: over all parameters and all ranks' shards of them. The same on every rank."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    if grads[0].dtype == torch.bfloat16:  # a sum of 16 bits would be one of three digits
        squared = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in grads]).sum()
    else:
        squared = torch.nn.utils.get_total_norm(grads, foreach=True).float().square()
    return (sum_over_ranks(squared) / copies(parameters)).sqrt()


def copies(parameters: Sequence[nn.Parameter]) -> int:
    """How often each gradient is there among the ranks: more than once with hybrid sharding."""
    from torch.distributed.tensor import DTensor

    kind = next(iter(parameters))
    if not isinstance(kind, DTensor):
        return 1
    replicated = zip(kind.device_mesh.shape, kind.placements, strict=True)
    return math.prod(size for size, placement in replicated if placement.is_replicate())


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def keep_narrow(parameters: Sequence[nn.Parameter]) -> None:
    """From now on each gradient becomes bfloat16 as soon as it is there: over all layers it never is float32."""
    for parameter in parameters:
        if not getattr(parameter, "_post_accumulate_grad_hooks", None):
            parameter.grad_dtype = None  # it need not be the weight's
            parameter.register_post_accumulate_grad_hook(_narrow)


def _narrow(parameter: Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.dtype != torch.bfloat16:
        parameter.grad = gradient.to(torch.bfloat16)
