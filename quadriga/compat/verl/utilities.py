"""`verl.utils` itself and its small modules: tokenizers, files, devices, imports, tracking."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from quadriga.compat.verl.configs import omega_conf_to_dataclass
from quadriga.models.load import load_tokenizer
from quadriga.trainer.device import auto_set_device

__all__ = [
    "Tracking",
    "append_to_dict",
    "auto_set_device",
    "compute_position_id_with_mask",
    "copy_local_path_from_hdfs",
    "copy_to_local",
    "get_device_name",
    "hf_processor",
    "hf_tokenizer",
    "import_external_libs",
    "load_extern_object",
    "load_extern_type",
    "marked_timer",
    "omega_conf_to_dataclass",
    "set_pad_token_id",
    "simple_timer",
]


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any) -> Any:
    """The tokenizer of a model; it has a padding token in any case."""
    return load_tokenizer(name_or_path, bool(kwargs.get("trust_remote_code", False)))


def hf_processor(name_or_path: str, **kwargs: Any) -> None:
    """None: Quadriga trains on text."""
    return


def set_pad_token_id(tokenizer: Any) -> None:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """`src` itself: files and models are read where they lie.

    Raises:
        NotImplementedError: it lies on HDFS.
    """
    if str(src).startswith("hdfs:"):
        raise NotImplementedError(f"{src}: Quadriga reads file systems only; mount it, or copy it first")
    return os.path.expanduser(src)


copy_local_path_from_hdfs = copy_to_local


def get_device_name() -> str:
    from quadriga.config.local_device import detect_local_device

    return detect_local_device()


def append_to_dict(data: dict[str, list[Any]], new_data: dict[str, Any], prefix: str = "") -> None:
    """Each value of `new_data` at the end of the list that `data` has under its key."""
    for key, value in new_data.items():
        data.setdefault(f"{prefix}{key}", []).append(value)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions `[B, L]` of a mask's tokens, counted from the first one."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Adds the seconds that its body takes to `timing_raw[name]`."""
    begin = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - begin


simple_timer = marked_timer


def load_extern_object(module_path: str, object_name: str) -> Any:
    """`object_name` of a file, of a module (`pkg://a.b` or `a.b`) or of `file://path.py`.

    Raises:
        FileNotFoundError: there is no such file.
        AttributeError: the module has no such name.
    """
    from quadriga.registry import import_place

    place = module_path.removeprefix("file://").removeprefix("pkg://")
    is_file = place.endswith(".py") or os.sep in place
    if is_file:
        place = str(Path(place).expanduser().resolve())
        if not Path(place).is_file():
            raise FileNotFoundError(f"there is no file {place}")
    found = getattr(import_place(place, module_path), object_name, None)
    if found is None:
        raise AttributeError(f"there is no {object_name!r} in {module_path}")
    return found


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    return None if not file_path else load_extern_object(file_path, str(type_name))


def import_external_libs(external_libs: str | list[str] | None = None) -> None:
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or []:
        importlib.import_module(name)


def is_vllm_available() -> bool:
    return importlib.util.find_spec("vllm") is not None


class Tracking:
    """verl's `Tracking(project_name, experiment_name, default_backend, config).log(data, step)`, into a run directory."""

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: str | list[str] = "console", config: Any = None
    ) -> None:
        from quadriga.tracking.run_directory import RunDirectory

        self.directory = RunDirectory(Path("outputs") / project_name / experiment_name)
        self.directory.begin()
        self.backends = [default_backend] if isinstance(default_backend, str) else list(default_backend)

    def log(self, data: dict[str, Any], step: int, backend: str | None = None) -> None:
        """Append to metrics.jsonl; with the console among the backends, print it too."""
        self.directory.append_metrics(step, {name: float(value) for name, value in data.items()})
        if "console" in self.backends:
            print(f"step:{step} - " + " - ".join(f"{key}:{value:.4g}" for key, value in data.items()))
