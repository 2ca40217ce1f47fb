"""Muon: the momentum of a weight matrix, turned into the nearest matrix that stretches all directions alike.

Matrices of the decoder layers (a stack of experts is many of them) are updated so; embeddings, head, norms and biases by
AdamW with the same learning rate. An orthogonal update is scaled to the size that AdamW's updates usually have, so that a
learning rate carries over from one to the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.engine.compact_adam import CompactAdamW
from quadriga.engine.sharding import full, like, local, own_rows

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton–Schulz iteration: five steps bring every singular value from above 0.001 to between about 0.7 and 1.2."""
USUAL_SIZE = 0.2
"""Root mean square of an AdamW update, in learning rates."""


class Muon(CompactAdamW):
    """Muon for the parameters in `matrices`, AdamW with float32 moments for all others."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        matrices: Collection[nn.Parameter],
    ) -> None:
        self._matrices = {id(p) for p in matrices if p.ndim >= 2}
        super().__init__(groups, lr, betas, bits=32)

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if id(parameter) not in self._matrices:
            return super().new_state(parameter)
        momentum = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        return {"step": torch.zeros(()), "momentum": momentum}

    def update(self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if id(parameter) not in self._matrices:
            super().update(parameter, state, group)
            return
        assert parameter.grad is not None
        weight, lr = local(parameter.detach()), group["lr"]
        momentum, gradient = local(state["momentum"]), local(parameter.grad).float()
        momentum.lerp_(gradient, 1 - MOMENTUM)
        ahead = gradient.lerp(momentum, MOMENTUM)
        rows, columns = parameter.shape[-2:]
        if parameter.ndim > 2:  # a stack of matrices, sharded by matrices
            update = orthogonal(ahead)
        else:
            update = orthogonal(full(like(parameter.detach(), ahead)))[own_rows(parameter)]
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(update.to(weight.dtype), alpha=-lr * USUAL_SIZE * max(rows, columns) ** 0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """About U Vᵀ of the singular value decomposition U S Vᵀ of each of `matrices[…, rows, columns]`."""
    kind = torch.bfloat16 if matrices.device.type != "cpu" else torch.float32
    x = matrices.to(kind)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return (x.mT if tall else x).float()
