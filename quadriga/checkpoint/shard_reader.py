"""Look pieces up in the files of all ranks, and copy what is needed of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quadriga.checkpoint.manifest import shard_paths
from quadriga.engine.sharding import local, rank
from quadriga.errors import CheckpointError


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


SHARDING_INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Where in a file's header the offsets of its pieces are: the words of torch.distributed.checkpoint."""


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor in an open file."""

    file: Any
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Part of a stored piece that belongs into part of a rank's piece."""

    file: Any
    name: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]


class ShardReader:
    """The shard files of one role, open for reading. Use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._pieces: dict[str, list[StoredPiece]] = {}

    def __enter__(self) -> ShardReader:
        with ExitStack() as opened:
            for paths in shard_paths(self.folder).values():
                for path in paths:
                    self._open(path, opened)
            self._files = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def _open(self, path: Path, opened: ExitStack) -> None:
        try:
            file = opened.enter_context(safe_open(path, framework="pt"))
            places = json.loads((file.metadata() or {})[SHARDING_INFO])
            for name in file.keys():  # noqa: SIM118  (not a dict)
                sizes = tuple(file.get_slice(name).get_shape())
                offsets = tuple(int(offset) for offset in places[name][OFFSETS])
                if len(offsets) != len(sizes):
                    raise ValueError(f"{name} has {len(sizes)} dimensions and {len(offsets)} offsets")
                self._pieces.setdefault(name, []).append(StoredPiece(file, offsets, sizes))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is not a readable shard: {type(error).__name__}: {error}", "resume from another checkpoint"
            ) from error

    def plan(self, piece: Piece, stored_name: str) -> list[Copy]:
        """The copies that fill `piece` from what is stored under `stored_name`. CheckpointError if some of it is missing."""
        copies, covered = [], 0
        for stored in self._pieces.get(stored_name, []):
            overlap = _overlap(piece, stored)
            if overlap is not None:
                copies.append(Copy(stored.file, stored_name, _within(overlap, stored), _within(overlap, piece)))
                covered += prod(end - start for start, end in overlap)
        if covered != piece.tensor.numel():
            raise CheckpointError(
                f"{self.folder} holds {covered} of the {piece.tensor.numel()} numbers of {piece.name} that this rank needs",
                "a shard is missing: resume from another checkpoint",
            )
        return copies

    def whole(self, name: str) -> Tensor | None:
        """A tensor that was written in one piece; None if there is none."""
        stored = self._pieces.get(name)
        return None if stored is None else stored[0].file.get_tensor(name)

    @staticmethod
    @torch.no_grad()
    def fill(piece: Piece, copies: list[Copy]) -> None:
        for copy in copies:
            if copy.source:
                piece.tensor[copy.target].copy_(copy.file.get_slice(copy.name)[copy.source])
            else:
                piece.tensor.copy_(copy.file.get_tensor(copy.name))


def _overlap(piece: Piece, stored: StoredPiece) -> list[tuple[int, int]] | None:
    """Begin and end of the common box in each dimension; None if there is none."""
    if len(piece.offsets) != len(stored.offsets):
        return None
    common = [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(piece.offsets, piece.sizes, stored.offsets, stored.sizes, strict=True)
    ]
    return common if all(start < end for start, end in common) else None


def _within(box: Sequence[tuple[int, int]], owner: Piece | StoredPiece) -> tuple[slice, ...]:
    return tuple(slice(start - offset, end - offset) for (start, end), offset in zip(box, owner.offsets, strict=True))
