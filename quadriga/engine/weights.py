"""The weights as the rest of the world knows them: whole tensors under Hugging Face names, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quadriga.engine.sharding import full, rank, world_size
from quadriga.models.token_model import PolicyModel, TokenModel

_PEFT_PREFIX = "base_model.model."


@torch.no_grad()
def full_weights(model: TokenModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of every weight, gathered from all ranks one by one, cast to `dtype` if given.

    A policy's names are those of its Hugging Face model, and a LoRA adapter is added to the weights it adapts, so that
    the receiver needs to know nothing of either. Tied weights come once. A scalar model's names are `trunk.…` and
    `head.…`. All ranks must exhaust the iterator; where nothing is gathered or cast, a tensor is the weight itself.
    """
    adapters = _adapters(model)
    for name, parameter in _persistent_tensors(model):
        if ".lora_" in name:
            continue
        weight = full(parameter).detach()
        if (module := adapters.get(name)) is not None:
            weight = weight + _adapter_product(module)
        yield _public_name(model, name), weight if dtype is None else weight.to(dtype)


def host_state_dict(model: TokenModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All of `full_weights` in host memory on rank 0, for an export; empty on the other ranks, which must call it too."""
    keep = rank() == 0 or world_size() == 1
    return {name: weight.cpu().clone() for name, weight in full_weights(model, dtype) if keep}


def _persistent_tensors(model: TokenModel) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    yield from parameters.items()
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in aliases:
            yield name, tensor


def _public_name(model: TokenModel, name: str) -> str:
    if isinstance(model, PolicyModel):
        name = name.removeprefix("causal_lm.")
        if model.has_adapter:
            name = name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")
    return name


def _adapters(model: TokenModel) -> dict[str, Any]:
    """Name of each adapted weight → peft's layer around it."""
    return {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "lora_A")
    }


def _adapter_product(module: Any) -> Tensor:
    (adapter,) = module.active_adapters
    product = full(module.lora_B[adapter].weight) @ full(module.lora_A[adapter].weight) * module.scaling[adapter]
    return product.t() if getattr(module, "fan_in_fan_out", False) else product
