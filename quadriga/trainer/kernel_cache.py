"""The cache of Triton's kernels on a GPU: of the user's own, apart for every kind of machine, and checked.

Triton keeps what it compiles under a name made of source and settings, and trusts what it finds there. Here the cache is a folder
whose name is made of GPU, driver and versions, so that a home shared by several machines gives none of them another's kernels.
What a run leaves in it is listed with checksums; a folder that does not match its list is emptied, and that is said.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from quadriga.config.schema import Config

LIST = "quadriga.json"
"""File in a cache folder: name → SHA-256 of the others."""
TRITON_CACHE = "TRITON_CACHE_DIR"


@contextmanager
def kernel_cache(config: Config) -> Iterator[None]:
    """Around a run: its processes on this machine use the cache, after a check; what it holds in the end is listed."""
    elsewhere = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    folder = cache_folder() if config.trainer.device == "cuda" and not elsewhere else None
    if folder is None:
        yield
        return
    check(folder)
    before = os.environ.get(TRITON_CACHE)
    os.environ[TRITON_CACHE] = str(folder)
    try:
        yield
    finally:
        write_list(folder)
        if before is None:
            os.environ.pop(TRITON_CACHE)
        else:
            os.environ[TRITON_CACHE] = before


def cache_folder(gpu: str | None = None) -> Path | None:
    """The folder for the kernels of this machine; None where nothing can be kept.

    Args:
        gpu: device and driver, in words; None: those of this machine.
    """
    versions = (f"{name} {_version(name)}" for name in ("torch", "triton"))
    parts = [_gpu() if gpu is None else gpu, platform.python_version(), *versions]
    name = hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]
    root = os.environ.get(TRITON_CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quadriga"
    folder = Path(root) / f"cuda-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid() else None


def check(folder: Path) -> None:
    """Empty `folder` if something that its list names is missing or changed. Without a list it is used as it is: the run
    before did not end by itself, and Triton puts only whole files there."""
    try:
        listed = json.loads((folder / LIST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        listed = {LIST: "no list"}
    if all(_digest(folder / name) == digest for name, digest in listed.items()):
        return
    logging.getLogger(__name__).warning("the kernel cache %s is damaged: its kernels are compiled anew", folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def write_list(folder: Path) -> None:
    """List what is in the cache now."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LIST)
    listed = {str(path.relative_to(folder)): _digest(path) for path in files}
    with tempfile.NamedTemporaryFile("w", dir=folder.parent, delete=False) as target:
        json.dump(listed, target, indent=1)
    os.replace(target.name, folder / LIST)


def _gpu() -> str:
    """Device and driver, told without loading the driver's library."""
    files = [Path("/proc/driver/nvidia/version"), *sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    lines = [line for file in files if file.is_file() for line in file.read_text(errors="replace").splitlines()]
    return "\n".join(line for line in lines if line.startswith(("NVRM", "Model")))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"
