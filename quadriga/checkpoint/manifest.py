"""What a checkpoint consists of. No torch, so that the driver can ask too.

The manifest names every file with its size and SHA-256. It is written last: a folder without one is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from quadriga.errors import CheckpointError
from quadriga.version import __version__

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised when an older Quadriga could not read what a newer one writes."""

_THREADS = min(16, os.cpu_count() or 1)
_T = TypeVar("_T")
_R = TypeVar("_R")


class NewerFormat(CheckpointError):
    """The checkpoint is whole, but this version of Quadriga does not know its format."""


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: size in bytes and SHA-256 as hexadecimal text, as `sha256sum` prints it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    serial counts the checkpoints written into a store: the newest is the one with the highest, whatever its step, so a
    run that went back to an earlier step goes on from what it wrote last.
    """

    step: int
    serial: int
    files: dict[str, FileEntry]
    written: str
    versions: dict[str, str]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def make_manifest(folder: Path, step: int, serial: int) -> Manifest:
    """The manifest of what is in `folder` now. All files are read once, several at a time."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = in_threads(lambda path: FileEntry(path.stat().st_size, sha256(path)), paths)
    files = {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, entries)}
    return Manifest(step, serial, files, time.strftime("%Y-%m-%dT%H:%M:%S%z"), _versions())


def encode(manifest: Manifest) -> bytes:
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": manifest.step,
        "serial": manifest.serial,
        "written": manifest.written,
        "versions": manifest.versions,
        "total_bytes": manifest.total_bytes,
        "files": {name: {"bytes": e.bytes, "sha256": e.sha256} for name, e in manifest.files.items()},
    }
    return json.dumps(content | {"sha256": _own_digest(content)}, indent=1).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`.

    Raises:
        CheckpointError: there is none, or it is damaged.
        NewerFormat: it was written by a later version.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        if content["format"] > FORMAT:
            raise NewerFormat(
                f"{folder} has checkpoint format {content['format']}; Quadriga {__version__} knows formats up to {FORMAT}",
                f"use the version that wrote it: {content.get('versions', {}).get('quadriga', 'unknown')}",
            )
        if content.pop("sha256") != _own_digest(content):
            raise CheckpointError(f"{path} is damaged: it does not have the checksum it states", _TAKE_ANOTHER)
        files = {str(name): FileEntry(int(e["bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
        manifest = Manifest(
            int(content["step"]), int(content["serial"]), files, str(content["written"]), dict(content["versions"])
        )
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}", _TAKE_ANOTHER) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}", _TAKE_ANOTHER) from error
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{path} names a file outside of its folder: {name}", "do not use this checkpoint")
    return manifest


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every file and compare. CheckpointError names the first that is missing, too short, or changed."""
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} is missing ({error.strerror})", _TAKE_ANOTHER) from error
        if size != entry.bytes:
            raise CheckpointError(f"{folder}: {name} has {size} bytes instead of {entry.bytes}", _TAKE_ANOTHER)
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    try:
        digests = in_threads(lambda name: sha256(folder / name), largest_first)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}", _TAKE_ANOTHER) from error
    for name, digest in zip(largest_first, digests):
        if digest != manifest.files[name].sha256:
            raise CheckpointError(f"{folder}: the bytes of {name} have changed since it was written", _TAKE_ANOTHER)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def in_threads(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """`work` on every item, several at a time, in order. For work that waits for the disk or hashes."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, items))


_TAKE_ANOTHER = "resume from another checkpoint, or restore this one from a copy"


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    versions = {"quadriga": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


INDEX = "engine.json"
"""Written by rank 0: format, number of ranks, dtype and shape of every tensor, and all values that are no tensors."""

_SHARD = re.compile(r"rank_(\d{5})_(\d{4})\.safetensors")


def shard_name(rank: int, part: int) -> str:
    return f"rank_{rank:05d}_{part:04d}.safetensors"


def shard_paths(folder: Path) -> dict[int, list[Path]]:
    """Rank → its files."""
    paths: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _SHARD.fullmatch(path.name):
            paths.setdefault(int(match[1]), []).append(path)
    return paths


def read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if not isinstance(index, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no engine state: it has no {INDEX}", "give the folder of a role"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error}", "resume from another checkpoint") from error
    return index


def require_all_ranks(folder: Path) -> None:
    """CheckpointError if `folder` holds shards, but not those of every rank. Other folders pass."""
    ranks = set(shard_paths(folder))
    if not ranks and not (folder / INDEX).exists():
        return
    missing = set(range(int(read_index(folder)["world_size"]))) - ranks
    if missing:
        raise CheckpointError(
            f"{folder}: the shards of rank(s) {', '.join(map(str, sorted(missing)))} are not there",
            "set trainer.default_local_dir to a folder on a file system that all nodes share",
        )
