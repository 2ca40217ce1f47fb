"""Which part of a tensor a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quadriga.engine.sharding import local, rank


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: a box of the whole.

    tensor is the memory that holds it; offsets is where the box begins in the whole tensor, whose shape is whole.
    """

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def piece_of(name: str, tensor: Tensor) -> Piece:
    """What this rank holds of `tensor`; all of it, if it is not sharded."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Piece(name, tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks a DTensor for
    return Piece(name, local(tensor.detach()), tuple(chunk.offsets), tuple(tensor.shape))


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the one that writes what several ranks hold alike."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return rank() == 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(place == 0 for place, kind in zip(coordinate, tensor.placements) if kind.is_replicate())
