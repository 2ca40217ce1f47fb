"""The norm of the gradient over all shards, and its clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quadriga.engine.sharding import local, sum_over_ranks


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """2-norm of the whole gradient: over all parameters and all ranks' shards of them. The same on every rank."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    squared = torch.nn.utils.get_total_norm(grads, foreach=True).float().square()
    return sum_over_ranks(squared).sqrt()


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
