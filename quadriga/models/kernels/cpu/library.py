"""Compiles the C files beside it for the machine it runs on, once, and loads it.

The compiled file lies in the user's cache under a name made of everything it depends on, so processes that start
together, other versions and other kinds of machines never meet the wrong one. Where there is no C compiler, or the
compiled kernels do not load, `kernels()` is None and the callers compute the same with PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import mmap
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

COLUMNS = 16
"""The keys of a cache block have room for a multiple of this: of the vectors of every machine, see attention.h."""


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Cache(Structure):
    _fields_: ClassVar = [*_fields(c_void_p, "keys values"), *_fields(c_int64, "kv_heads size block_size columns")]


class Weight(Structure):
    _fields_: ClassVar = [("panels", c_void_p), *_fields(c_int64, "inner outer")]


class Member(Structure):
    _fields_: ClassVar = _fields(c_int64, "rank size")


class Layer(Structure):
    _fields_: ClassVar = [
        *_fields(c_void_p, "norm q_norm k_norm mlp_norm"),
        *_fields(Weight, "qkv out gate_up down"),
        *_fields(c_void_p, "keys values"),
        ("window", c_int64),
        ("scale", c_float),
    ]


class Model(Structure):
    _fields_: ClassVar = [
        *_fields(c_void_p, "embedding cos sin norm"),
        ("layers", POINTER(Layer)),
        ("head", Weight),
        *_fields(c_int64, "num_layers width heads kv_heads size block_size columns"),
        ("eps", c_float),
    ]


class Step(Structure):
    _fields_: ClassVar = [
        *_fields(c_void_p, "tokens positions sequences outputs tables"),
        *_fields(c_int64, "rows num_outputs table_width longest mixed"),
        *_fields(c_void_p, "scratch logits"),
    ]


_FOLDER = Path(__file__).parent
SOURCES = sorted(_FOLDER.glob("*.c"))
SWITCH = "QUADRIGA_CPU_KERNELS"
"""Environment variable: 0 means do without."""
_FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-fopenmp", "-std=gnu11"),
    # Nothing that lets the compiler compute an element one way in a vector and another way in what is left over.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "rms_norm": (_POINTER, _POINTER, _REAL, _COUNT, _COUNT, _POINTER, _POINTER),
    "rms_norm_gradient": (*(_POINTER,) * 4, *(_COUNT,) * 3, _POINTER, _POINTER),
    "swiglu": (_POINTER, _POINTER, _COUNT, _POINTER),
    "swiglu_gradient": (*(_POINTER,) * 3, _COUNT, _POINTER, _POINTER),
    "rotate": (*(_POINTER,) * 3, *(_COUNT,) * 3, ctypes.c_int, _POINTER),
    "softmax_statistics": (_POINTER, _POINTER, _REAL, _COUNT, _COUNT, *(_POINTER,) * 3),
    "softmax_gradient": (_POINTER, _POINTER, _REAL, *(_POINTER,) * 4, _COUNT, _COUNT),
    "sample_tokens": (*(_POINTER,) * 4, _COUNT, _COUNT, *(_POINTER,) * 3),
    "write_cache": (*(_POINTER,) * 5, *(_COUNT,) * 5),
    "paged_decode": (*(_POINTER,) * 3, _COUNT, _POINTER, *(_COUNT,) * 3, _REAL, _REAL, _POINTER, _COUNT, _POINTER),
    "paged_decode_room": (_COUNT, _COUNT),
    "panel_width": (),
    "pack_weight": (_POINTER, _POINTER, *(_COUNT,) * 5, _POINTER),
    "packed_product": (_POINTER, _COUNT, _COUNT, Weight, Member, ctypes.c_int, _POINTER, _COUNT),
    "weight_gradient_room": (_COUNT, _COUNT),
    "weight_gradient": (_POINTER, _POINTER, *(_COUNT,) * 3, _POINTER, _POINTER),
    "program_room": (_POINTER, _COUNT, _COUNT),
    "run_program": (_POINTER, _POINTER),
}
_COUNTING = ("panel_width", "program_room", "paged_decode_room", "weight_gradient_room")
"""Functions that return a number; the others return nothing."""


@functools.cache
def kernels() -> Any:
    """The loaded library, its functions by name; or None, see above."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        return load()
    except (OSError, subprocess.SubprocessError) as error:
        logging.getLogger(__name__).warning("no CPU kernels, PyTorch computes instead, more slowly: %s", error)
        return None


def load() -> Any:
    """Compile if need be, and load. OSError or SubprocessError where that fails."""
    compiler = _compiler()
    flags = [*_FLAGS, "-shared", *map(str, SOURCES), *_torch_threads(), "-lm"]
    folder = _cache_folder()
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True).stdout
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, *sorted(_FOLDER.glob("*.h")))]
    parts = [*texts, compiler, version.decode(errors="replace"), " ".join(flags), _processor(), torch.__version__]
    path = folder / f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    if not _is_ours(path):  # made anew if somebody else could have written it
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as target:
            fresh = Path(target.name)
        try:
            done = subprocess.run([compiler, *flags, "-o", fresh], capture_output=True, timeout=120)
            if done.returncode:
                raise OSError(
                    f"{compiler} could not compile the kernels: {done.stderr.decode(errors='replace').strip()[-400:]}"
                )
            fresh.chmod(0o700)  # nobody else may change what is loaded into processes
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _COUNT if name in _COUNTING else None
    return library


def _cache_folder() -> Path:
    """The user's own; where there is none, a fresh one, since others could have put files into one of a known name."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quadriga"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK):
            folder.chmod(folder.stat().st_mode & ~0o022)
            return folder
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        pass
    return Path(tempfile.mkdtemp(prefix="quadriga-kernels-"))


def _is_ours(path: Path) -> bool:
    """A file of this user that nobody else can write: it is safe to load as code."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise OSError("no C compiler found: install gcc or clang")


def _torch_threads() -> list[str]:
    """PyTorch's own OpenMP runtime, so that one pool of threads serves both; nothing where it cannot be told."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        loaded = {line.split()[-1] for line in maps.splitlines() if "omp" in line}
    except OSError:
        return []
    runtimes = sorted(p for p in loaded if Path(p).name.startswith(("libgomp", "libiomp", "libomp")))
    return runtimes[:1]


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    about = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.machine()} {sorted(set(about))}"


_HUGE = 2 << 20


def huge_zeros(*size: int) -> Tensor:
    """Float32 zeros in pages of 2 MiB where the system has them; what is never written takes no memory.

    The tables of small pages halve the speed of reading on a virtual machine.
    """
    count = math.prod(size)
    if 4 * count < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size)
    # One page more than needed, to begin at the start of one.
    memory = mmap.mmap(-1, 4 * count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    start = -whole.data_ptr() % _HUGE // 4
    return whole[start : start + count].view(size)
