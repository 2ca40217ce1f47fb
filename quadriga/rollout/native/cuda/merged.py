"""Projections of one input as one product: queries, keys and values; gate and up.

Decoding a small batch is many small kernels, each too short to fill the device. The weights of such projections are laid end
to end in one tensor, and the module's parameters become views of it: whoever copies new weights into them fills both. Only for
a module that generates and is not trained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.models.exact import is_exact
from quadriga.models.fused import ExactLinear, FusedAttention, FusedMLP
from quadriga.models.kernels.gated import gated_halves
from quadriga.models.kernels.linear import linear


def merge_projections(module: nn.Module) -> int:
    """Merge what can be in `module`, in place; returns how many modules have merged projections now."""
    merged = 0
    for child in module.modules():
        if isinstance(child, FusedAttention) and _can_merge(child.q_proj, child.k_proj, child.v_proj):
            child.merged = MergedLinear([child.q_proj, child.k_proj, child.v_proj])
        elif isinstance(child, FusedMLP) and _can_merge(child.gate_proj, child.up_proj):
            child.merged = MergedMLP(MergedLinear([child.gate_proj, child.up_proj]), child)
        else:
            continue
        merged += 1
    return merged


class MergedLinear:
    """`[..., K]` to the outputs of all parts, side by side."""

    def __init__(self, parts: list[Any]) -> None:
        self.sizes = [part.weight.shape[0] for part in parts]
        self.weight = torch.cat([part.weight.data for part in parts])
        self.bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
        for part, weight in zip(parts, self.weight.split(self.sizes), strict=True):
            part.weight.data = weight
        if self.bias is not None:
            for part, bias in zip(parts, self.bias.split(self.sizes), strict=True):
                part.bias.data = bias

    def together(self, x: Tensor) -> Tensor:
        return (linear if is_exact() else F.linear)(x, self.weight, self.bias)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of one tensor, one for each part."""
        return self.together(x).split(self.sizes, -1)


class MergedMLP:
    """The whole gated MLP, without gradient."""

    def __init__(self, projection: MergedLinear, mlp: FusedMLP) -> None:
        self.projection, self.down_proj, self.is_gelu = projection, mlp.down_proj, mlp.is_gelu

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_halves(self.projection.together(x), self.is_gelu))


def _can_merge(*parts: Any) -> bool:
    """Plain linear maps of one input, all with a bias or none."""
    return all(type(part) in (nn.Linear, ExactLinear) for part in parts) and len({p.bias is None for p in parts}) == 1
