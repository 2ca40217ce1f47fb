"""Sharding over ranks with FSDP2, and the few collectives the engine needs besides.

One rank on a CPU is left as it is. Otherwise every decoder layer is a unit of its own and the rest (embeddings, final
norm, lm_head or scalar head) belongs to the root. Gradients are **added** over ranks, not averaged: every loss is
already normalised by the counts of all ranks (`quadriga.algorithms.Aggregation`).

On a GPU the sharded weights and the reduced gradients are float32 and the computation is bfloat16, for one rank too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from quadriga.errors import WorkerError
from quadriga.models.fused import fuse
from quadriga.models.token_model import TokenModel


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def shard(model: TokenModel, device: torch.device, reshard_after_forward: bool) -> TokenModel:
    """Move `model` to `device` and shard it over all ranks, in place."""
    fuse(model, device)
    model.to(device)
    if world_size() == 1 and device.type == "cpu":
        return model
    if not dist.is_initialized():
        dist.init_process_group(backend="cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(device.type, (world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    if device.type != "cpu":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in _units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def decoder_layers(model: TokenModel) -> list[nn.Module]:
    """The repeated blocks of the Hugging Face model in `model`, by the class names it declares for this purpose."""
    declared = set(getattr(model.huggingface, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in declared]
    if not layers:
        raise WorkerError(
            f"{type(model.huggingface).__name__} does not say which of its modules are decoder layers",
            "use a model whose class declares _no_split_modules, or run on one CPU process",
        )
    return layers


def synchronise_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass adds the gradients up over ranks, or keeps them for a later one to add."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


def free_gathered_weights(model: nn.Module) -> None:
    """Forget gathered weights that a forward pass without a backward pass has left behind."""
    for module in _units(model):
        module.reshard()


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# ---- collectives -----------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; all ranks must call it. A plain tensor as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """`tensor` added up over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def max_over_ranks(number: int, device: torch.device) -> int:
    if world_size() == 1:
        return number
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)
