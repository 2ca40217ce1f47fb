"""Sharding over ranks with FSDP2, and the few collectives the engine needs besides.

One rank on a CPU is left as it is. Otherwise the weights are sharded over all ranks, or hybrid (`fsdp_size`): over some
neighbours, with a copy for each such set of ranks; every decoder layer is a unit of its own and the rest (embeddings, final
norm, lm_head or scalar head) belongs to the root. Gradients are **added** over ranks, not averaged: every loss is
already normalised by the counts of all ranks (`quadriga.algorithms.Aggregation`).

On a GPU the sharded weights that are trained and the reduced gradients are float32 and the computation is bfloat16, for
one rank too; frozen weights are bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from quadriga.accelerator import collectives
from quadriga.config.schema_models import FSDPConfig
from quadriga.errors import ConfigError, DataError, WorkerError
from quadriga.models.fused import fuse
from quadriga.models.token_model import TokenModel
from quadriga.models.weight_files import require_finite, tied_by_mistake
from quadriga.models.weight_reader import WeightReader


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def shard(model: TokenModel, device: torch.device, config: FSDPConfig) -> TokenModel:
    """Shard `model` over the devices of all ranks, or of each `fsdp_size` neighbours of them, in place.

    Layer after layer goes to the device, and all but this rank's part of it is forgotten before the next one does; the weights of
    an outline are read when it is sharded. So nobody ever holds the whole model.
    """
    names = {} if model.reader is None else model.reader.names_of(model)
    fuse(model, device)
    if device.type != "cpu":
        _narrow_frozen(model)
    if not is_sharded(device):
        return model
    if not dist.is_initialized():
        dist.init_process_group(collectives(device.type), store=dist.HashStore(), rank=0, world_size=1)
    options: dict[str, Any] = {"mesh": _mesh(device, config), "reshard_after_forward": config.reshard_after_forward}
    if device.type != "cpu":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Each layer is a unit of its own: it is gathered alone, and while it computes the next one is on its way. What is left
    # (embedding, last norm, head) is the unit of the whole model.
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    # Losses are divided by the counts of all ranks already, so gradients are added up over ranks and never averaged.
    for module in _units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if model.reader is not None:
        _read_weights(model, model.reader, names, device)
        model.reader = None
    return model


def is_sharded(device: torch.device | str) -> bool:
    """Whether models on such a device are sharded, if only over one rank; one on a CPU is left as it is."""
    return torch.device(device).type != "cpu" or world_size() > 1


@torch.no_grad()
def _read_weights(model: TokenModel, reader: WeightReader, names: dict[str, str], device: torch.device) -> None:
    """Give the parameters on the meta device this rank's part of their numbers; the same error on all ranks if one finds a
    weight that cannot be used.

    Args:
        names: what the reader calls the parameters of `model`.
    """
    made: dict[int, nn.Parameter] = {}
    problem: DataError | None = None
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            continue
        own, rows = torch.empty_like(local(parameter), device=device), own_rows(parameter)
        stored = reader.read(names[name], rows)
        own.copy_(stored)
        # A rank that stopped here would leave the others waiting in their next collective: all read on, then all stop.
        try:
            require_finite(names[name], own, reader.folder)
            if any(not torch.equal(stored, reader.read(other, rows)) for other in reader.aliases(names[name])):
                raise tied_by_mistake(reader.folder)
        except DataError as error:
            problem = problem or error
        made[id(parameter)] = nn.Parameter(like(parameter, own), requires_grad=parameter.requires_grad)
    reader.close()
    _raise_on_all_ranks(problem)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in made:
                setattr(module, name, made[id(parameter)])


def _raise_on_all_ranks(problem: DataError | None) -> None:
    problems = [None if problem is None else (problem.what, problem.fix)]
    if world_size() > 1:
        own, problems = problems[0], [None] * world_size()
        dist.all_gather_object(problems, own)
    for seen in problems:
        if seen is not None:
            raise DataError(*seen)


def _narrow_frozen(model: nn.Module) -> None:
    """Weights that are not trained (of a reference, under an adapter) are kept as they are computed with."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def _mesh(device: torch.device, config: FSDPConfig) -> dist.DeviceMesh:
    """All ranks in a row; or copies × the ranks that share one copy."""
    size, world = config.fsdp_size, world_size()
    if size <= 0 or size >= world:
        return dist.init_device_mesh(device.type, (world,))
    if world % size:
        near = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"fsdp_config.fsdp_size={size} does not divide {world} workers", f"set it to {' or '.join(map(str, near))}"
        )
    return dist.init_device_mesh(device.type, (world // size, size), mesh_dim_names=("copies", "shards"))


def decoder_layers(model: TokenModel) -> list[nn.Module]:
    """The repeated blocks of the Hugging Face model in `model`, by the class names it declares for this purpose."""
    declared = set(getattr(model.huggingface, "_no_split_modules", None) or ())
    # A sharded module has a class of its own, named after the one that it was.
    layers = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in declared]
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


def shard_number(tensor: Tensor) -> int:
    """Which part of a sharded tensor is this rank's: the same for all ranks that hold a copy of it. 0 for a plain tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    (dim,) = (dim for dim, placement in enumerate(tensor.placements) if placement.is_shard())
    return mesh.get_local_rank(dim)


def own_rows(tensor: Tensor) -> slice:
    """Which rows of a tensor that is sharded by rows are this rank's; of a plain tensor all."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return slice(None)
    count = local(tensor).shape[0]
    if not count:
        return slice(0, 0)
    (chunk,) = tensor.__create_chunk_list__()
    return slice(chunk.offsets[0], chunk.offsets[0] + count)


def like(tensor: Tensor, own: Tensor) -> Tensor:
    """`own` as this rank's part of a tensor that is sharded as `tensor` is; as it is, where that is a plain tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return own
    return DTensor.from_local(
        own, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; all ranks must call it. A plain tensor as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    # Of one rank, its part is the whole: nothing needs to be copied.
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """`tensor` added up over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def largest_over_ranks(tensor: Tensor) -> Tensor:
    """The largest of each element over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def smallest_over_ranks(tensor: Tensor) -> Tensor:
    """The smallest of each element over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return tensor


def max_over_ranks(number: int, device: torch.device) -> int:
    if world_size() == 1:
        return number
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def rows_of_all_ranks(columns: dict[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], slice]:
    """The rows of all ranks, in the order of the ranks, and which of them are this rank's. All ranks have equally many."""
    count = len(next(iter(columns.values())))
    if world_size() == 1:
        return columns, slice(0, count)
    whole = {}
    for name, column in columns.items():
        own = column.to(device).contiguous()
        parts = [torch.empty_like(own) for _ in range(world_size())]
        dist.all_gather(parts, own)
        whole[name] = torch.cat(parts)
    return whole, slice(rank() * count, (rank() + 1) * count)
