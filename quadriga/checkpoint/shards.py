"""A training engine's state as files that any number of ranks can read back.

Each rank writes what it holds into safetensors files, with the place of every piece in the whole tensor in the header
(in the words that `torch.distributed.checkpoint.HuggingFaceStorageReader` reads, too); rank 0 adds `engine.json`. Ranks
do not talk to each other while they write. There is no pickle anywhere: loading cannot run code.

Reading goes the other way round: a rank looks up which stored pieces overlap the part that it is to hold, checks that
they cover it, and copies them straight into the engine's tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from quadriga.checkpoint.disk import readable_disk_errors, sync
from quadriga.checkpoint.manifest import FORMAT, INDEX, NewerFormat, read_index, shard_name
from quadriga.checkpoint.shard_reader import OFFSETS, SHARDING_INFO, Piece, ShardReader, is_first_copy, piece_of
from quadriga.config.memory import OPTIMISER_BYTES
from quadriga.engine.sharding import rank, world_size
from quadriga.errors import CheckpointError

if TYPE_CHECKING:
    from quadriga.engine.engine import TrainingEngine

FILE_BYTES = 1 << 30
"""Files are cut at about this size: `save_engine` copies no more than that at a time, and several are hashed at once."""


def save_engine(engine: TrainingEngine, folder: str | os.PathLike[str]) -> None:
    """Write this rank's part of the engine's state. All ranks call it with the same folder, which must exist.

    Raises:
        CheckpointError: the folder is not there (for a rank on another node: not shared), or cannot be written to.
    """
    _part_of(engine).write(folder)


@dataclass(frozen=True)
class EnginePart:
    """What a rank writes of an engine's state."""

    rank: int
    pieces: list[Piece]
    index: dict[str, Any] | None
    is_copy: bool = False

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """See `save_engine`."""
        folder = _existing(folder)
        with readable_disk_errors("write the engine's state into", folder):
            for number, group in enumerate(_groups(self.pieces)):
                _write(folder / shard_name(self.rank, number), group, self.is_copy)
            if self.index is not None:
                (folder / INDEX).write_text(json.dumps(self.index, indent=1) + "\n", encoding="utf-8")
                sync(folder / INDEX)


def expected_bytes(engine: TrainingEngine, optimiser: str) -> int:
    """About what `save_engine` will write on this rank, told before the optimiser has any state. Never too much.

    Args:
        optimiser: `optim.name`.
    """
    weights = _own_pieces({"model": get_model_state_dict(engine.model)})
    trained = sum(piece_of("", p).tensor.numel() for p in engine.parameters if is_first_copy(p))
    return sum(piece.bytes for piece in weights) + int(OPTIMISER_BYTES[optimiser] * trained)


def copy_engine(engine: TrainingEngine) -> EnginePart:
    """What `save_engine` would write now, copied to host memory: training may go on before it is written."""
    part = _part_of(engine)
    pieces = [replace(piece, tensor=_host_copy(piece.tensor)) for piece in part.pieces]
    return replace(part, pieces=pieces, is_copy=True)


def _part_of(engine: TrainingEngine) -> EnginePart:
    state = engine.state_dict()
    pieces = _own_pieces(state)
    pieces += [piece_of(_random_name(rank(), kind), tensor) for kind, tensor in state["rng"].items()]
    return EnginePart(rank(), pieces, _index(state) if rank() == 0 else None)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def load_engine(engine: TrainingEngine, folder: str | os.PathLike[str]) -> None:
    """Read the state that any number of ranks wrote into `folder`. All ranks call it.

    With as many ranks as wrote it, random states come back exactly; a rank beyond those gets one derived from rank 0's.
    An engine without an optimiser takes the model alone. The optimiser's hyper-parameters remain as configured.

    Raises:
        CheckpointError: it is the state of another model, or a part of it is missing. The engine is unchanged then.
    """
    folder = _existing(folder)
    index = _checked_index(folder)
    state = engine.state_dict()  # its tensors are the engine's own: what is copied into them is in the engine
    leaves = list(_leaves(state))
    _check_names(leaves, index, folder, with_optimizer=engine.optimizer is not None)
    with ShardReader(folder) as reader:
        plans = []
        for leaf in leaves:
            if isinstance(leaf.value, Tensor):
                _check_shape(leaf, index, folder)
                piece = piece_of(leaf.name, leaf.value)
                plans.append((piece, reader.plan(piece, index["aliases"].get(leaf.name, leaf.name))))
            else:
                leaf.holder[leaf.key] = index["values"][leaf.name]
        state["rng"] = {kind: _random_state(reader, kind, like) for kind, like in state["rng"].items()}
        for piece, copies in plans:
            reader.fill(piece, copies)
    engine.load_state_dict(state)


# ---- the state as named leaves ----


class Leaf(NamedTuple):
    """A tensor or a plain value of the state, and where it hangs: `holder[key]`."""

    name: str
    holder: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        return self.holder[self.key]


def _leaves(state: dict[str, Any]) -> Iterator[Leaf]:
    """All but the random state, which belongs to a rank, and the optimiser's groups, which are configuration."""
    for part, content in state.items():
        if part != "rng":
            yield from _walk(content["state"] if part == "optimizer" else content, part)


def _walk(content: dict[str, Any], prefix: str) -> Iterator[Leaf]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}.{key}")
        else:
            yield Leaf(f"{prefix}.{key}", content, key)


def _own_pieces(state: dict[str, Any]) -> list[Piece]:
    """What this rank has to write: nothing empty, nothing that another rank writes, nothing twice."""
    aliases = _aliases(state)
    tensors = [leaf for leaf in _leaves(state) if isinstance(leaf.value, Tensor) and leaf.name not in aliases]
    pieces = [piece_of(leaf.name, leaf.value) for leaf in tensors if is_first_copy(leaf.value)]
    return [piece for piece in pieces if piece.bytes]


def _aliases(state: dict[str, Any]) -> dict[str, str]:
    """Name → the name under which the same memory is written: tied weights."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for leaf in _leaves(state):
        if isinstance(leaf.value, Tensor) and (piece := piece_of(leaf.name, leaf.value)).bytes:
            memory = (
                piece.tensor.data_ptr(),
                piece.sizes,
                piece.tensor.stride(),
                piece.tensor.dtype,
                piece.tensor.device,
            )
            if first.setdefault(memory, leaf.name) != leaf.name:
                aliases[leaf.name] = first[memory]
    return aliases


# ---- writing ----


def _groups(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """What goes into one file each. There is always one, so that every rank leaves a trace."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.bytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.bytes
    yield group


def _write(path: Path, pieces: list[Piece], is_copy: bool) -> None:
    from safetensors.torch import save_file

    places = {piece.name: {OFFSETS: piece.offsets} for piece in pieces}
    tensors = {piece.name: piece.tensor if is_copy else _host_copy(piece.tensor) for piece in pieces}
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # safetensors makes files that only their owner can read
    try:
        save_file(tensors, path, {"format": "pt", "DCP_VERSION": "1.0", SHARDING_INFO: json.dumps(places)})
    except SafetensorError as error:
        raise CheckpointError(f"Cannot write {path}: {error}", "free some space on that disk") from error
    path.chmod(mode)
    sync(path)


def _index(state: dict[str, Any]) -> dict[str, Any]:
    leaves = list(_leaves(state))
    return {
        "format": FORMAT,
        "world_size": world_size(),
        "values": {leaf.name: leaf.value for leaf in leaves if not isinstance(leaf.value, Tensor)},
        "aliases": _aliases(state),
        "tensors": {leaf.name: _description(leaf.value) for leaf in leaves if isinstance(leaf.value, Tensor)},
    }


def _description(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _existing(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"rank {rank()} on {socket.gethostname()} sees no folder {path}",
            "set trainer.default_local_dir to a folder on a file system that all nodes share",
        )
    return path


# ---- reading ----


def _checked_index(folder: Path) -> dict[str, Any]:
    index = read_index(folder)
    if isinstance(index.get("format"), int) and index["format"] > FORMAT:
        raise NewerFormat(f"{folder} has format {index['format']}, known are up to {FORMAT}", "use a later Quadriga")
    parts = [index.get(part) for part in ("values", "aliases", "tensors")]
    plain = all(isinstance(part, dict) for part in parts) and all(
        value is None or isinstance(value, (int, float, str)) for value in index["values"].values()
    )
    if not plain or not isinstance(index.get("format"), int):
        raise CheckpointError(f"{folder / INDEX} is not an index of shards", "resume from another checkpoint")
    return index


def _check_names(leaves: Iterable[Leaf], index: dict[str, Any], folder: Path, with_optimizer: bool) -> None:
    wanted = {leaf.name for leaf in leaves}
    stored = set(index["tensors"]) | set(index["values"])
    if not with_optimizer:
        stored = {name for name in stored if not name.startswith(("optimizer.", "schedule."))}
    problems = []
    for what, names in (("lacks", wanted - stored), ("has, unlike this run,", stored - wanted)):
        if names:
            examples = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(f"it {what} {examples}")
    if problems:
        raise CheckpointError(f"{folder} is the state of another model: {'; '.join(problems)}", _SAME_MODEL)


def _check_shape(leaf: Leaf, index: dict[str, Any], folder: Path) -> None:
    stored, wanted = index["tensors"].get(leaf.name), _description(leaf.value)
    if stored != wanted:
        raise CheckpointError(
            f"{folder}: {leaf.name} is {stored} in the checkpoint and {wanted} in this run", _SAME_MODEL
        )


_SAME_MODEL = "resume with the model, adapter and optimiser that the run was started with"


def _random_name(of_rank: int, kind: str) -> str:
    return f"rng.{of_rank:05d}.{kind}"


def _random_state(reader: ShardReader, kind: str, like: Tensor) -> Tensor:
    """This rank's saved random state; where there is none, one that depends on rank 0's and on the rank alone."""
    own = reader.whole(_random_name(rank(), kind))
    if own is not None and own.shape == like.shape and own.dtype == like.dtype:
        return own
    base = reader.whole(_random_name(0, "cpu"))
    seed = hashlib.sha256(b"" if base is None else base.numpy().tobytes())
    seed.update(f"{kind} {rank()}".encode())
    device = "cpu" if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    generator = torch.Generator(device).manual_seed(int.from_bytes(seed.digest()[:7], "big"))
    return generator.get_state()
