"""`verl.utils` itself and its small modules: tokenizers, files, imports, dicts, tracking."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.compat.verl.configs import omega_conf_to_dataclass
from quadriga.models.load import load_tokenizer
from quadriga.protocol import list_of_dict_to_dict_of_list
from quadriga.trainer.before_start import auto_set_device

__all__ = [
    "LocalLogger",
    "NestedNamespace",
    "RolloutSkip",
    "Tracking",
    "ValidationGenerationsLogger",
    "append_to_dict",
    "as_torch_index",
    "auto_set_device",
    "compute_position_id_with_mask",
    "concat_dict_to_str",
    "convert_to_regular_types",
    "copy",
    "copy_local_path_from_hdfs",
    "copy_to_local",
    "create_random_mask",
    "deprecated",
    "exists",
    "find_latest_ckpt_path",
    "get_event_loop",
    "group_mean_std",
    "hf_processor",
    "hf_tokenizer",
    "import_external_libs",
    "list_of_dict_to_dict_of_list",
    "load_extern_object",
    "load_extern_type",
    "makedirs",
    "omega_conf_to_dataclass",
    "parallel_put",
    "print_model_size",
    "print_rank_0",
    "rename_dict",
    "rollout_trace_attr",
    "rollout_trace_op",
    "set_pad_token_id",
    "should_save_ckpt_esi",
    "union_two_dict",
    "update_dict_with_config",
    "update_model_config",
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


def append_to_dict(data: dict[str, list[Any]], new_data: dict[str, Any], prefix: str = "") -> None:
    """Each value of `new_data` at the end of the list that `data` has under its key."""
    for key, value in new_data.items():
        data.setdefault(f"{prefix}{key}", []).append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """`dict1` with what `dict2` has.

    Raises:
        AssertionError: both have a key, with different values.
    """
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise AssertionError(f"{key} in both, and not the same")
        dict1[key] = value
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every key with `prefix` before it, those of inner mappings joined by dots."""
    renamed: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            renamed |= rename_dict(value, f"{prefix}{key}.")
        else:
            renamed[f"{prefix}{key}"] = value
    return renamed


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf's mappings and lists as Python's own, at any depth."""
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, Iterable) and not isinstance(obj, (str, bytes, Tensor, np.ndarray)):
        return [convert_to_regular_types(value) for value in obj]
    return obj


class NestedNamespace(SimpleNamespace):
    """A mapping whose keys are attributes, at any depth."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        inner = {k: NestedNamespace(v) if isinstance(v, Mapping) else v for k, v in dictionary.items()}
        super().__init__(**inner, **kwargs)


def update_dict_with_config(dictionary: dict[str, Any], config: Any) -> None:
    """Each key of `dictionary` that `config` has too gets its value."""
    for key in dictionary:
        if hasattr(config, key):
            dictionary[key] = getattr(config, key)


def as_torch_index(index: Any, device: Any = None) -> Tensor:
    """Equal entries as equal integers from 0, `[B]`."""
    values = index.tolist() if isinstance(index, (Tensor, np.ndarray)) else list(index)
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([places[value] for value in values], dtype=torch.long, device=device)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, unbiased deviation, size) of each group; a group of one has mean 0 and deviation 1, as in verl."""
    from quadriga.algorithms.groups import PromptGroups

    groups = PromptGroups.of(gidx)
    first = torch.zeros_like(groups.counts).scatter_(0, groups.index, torch.arange(len(gidx), device=gidx.device))
    mean, deviation = (x[first].to(scores.dtype) for x in (groups.mean(scores.double()), groups.std(scores.double())))
    alone = groups.counts == 1
    return mean.masked_fill(alone, 0), deviation.masked_fill(alone, 1), groups.counts.to(scores.dtype)


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """A mask `[B, L]` with random padding on both sides, at least one token a row."""
    rows, length = input_ids.shape
    most, least = (int(length * ratio) for ratio in (max_ratio_of_valid_token, min_ratio_of_valid_token))
    begin = torch.from_numpy(np.random.randint(0, max(1, int(length * max_ratio_of_left_padding)), rows))
    tokens = torch.from_numpy(np.random.randint(max(1, least), max(2, most), rows))
    places = torch.arange(length)
    return ((places >= begin[:, None]) & (places < (begin + tokens)[:, None])).to(input_ids.dtype)


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    print(f"{name or type(model).__name__} contains {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set attributes of a model's configuration, at any depth."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions `[B, L]` of a mask's tokens, counted from the first one."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


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


def is_megatron_core_available() -> bool:
    return False


def is_sglang_available() -> bool:
    return importlib.util.find_spec("sglang") is not None


def is_nvtx_available() -> bool:
    return importlib.util.find_spec("nvtx") is not None


def deprecated(replacement: str = "") -> Callable[[Any], Any]:
    """Decorator: a call warns; a class is left as it is."""

    def mark(what: Any) -> Any:
        instead = f"; use {replacement}" if replacement else ""

        @functools.wraps(what, updated=())
        def warned(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(f"{what.__name__} is deprecated{instead}", FutureWarning, stacklevel=2)
            return what(*args, **kwargs)

        return what if isinstance(what, type) else warned

    return mark


# ---- Files


def _local(path: str) -> str:
    return copy_to_local(path)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    os.makedirs(_local(name), mode, exist_ok)


def exists(path: str, **kwargs: Any) -> bool:
    return os.path.exists(_local(path))


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """A file or a folder to another place."""
    source, target = _local(src), _local(dst)
    if os.path.isdir(source):
        shutil.copytree(source, target, **kwargs)
    else:
        shutil.copy(source, target)
    return True


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The newest checkpoint in a folder; None: there is none."""
    folders = {} if path is None else {int(f.name.rpartition("_")[2]): f for f in Path(path).glob("global_step_[0-9]*")}
    return str(folders[max(folders)]) if folders else None


def should_save_ckpt_esi(*args: Any, **kwargs: Any) -> bool:
    """False: a run can be killed at any moment and goes on from its last checkpoint."""
    return False


# ---- Ray


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> list[Any]:
    """Each entry in Ray's object store, as references in the same order."""
    import ray

    return [ray.put(data) for data in data_list]


def get_event_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


# ---- Logging


def print_rank_0(message: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(message, flush=True)


def concat_dict_to_str(dict: Mapping[str, Any], step: int) -> str:
    """`step:3 - loss:0.5`, numbers only."""
    parts = [f"{key}:{value:.3f}" for key, value in dict.items() if isinstance(value, (int, float, np.number))]
    return " - ".join([f"step:{step}", *parts])


class LocalLogger:
    """Prints a line a step."""

    def __init__(self, print_to_console: bool = True) -> None:
        self.print_to_console = print_to_console

    def flush(self) -> None: ...

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self.print_to_console:
            print(concat_dict_to_str(data, step), flush=True)


class ValidationGenerationsLogger:
    """Shows answers of the validation; samples of every validation are in the run directory anyway."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None: ...

    def log(self, loggers: Any, samples: Iterable[Any], step: int) -> None:
        for sample in samples:
            print(f"validation at step {step}: {sample}")


def rollout_trace_op(func: Any) -> Any:
    """Decorator: traces of samples are in the run directory; nothing else is written."""
    return func


class rollout_trace_attr:
    """Context of a trace: see `rollout_trace_op`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *args: Any) -> None: ...


class RolloutSkip:
    """Responses that are kept and read again are `episodes.write_to` and `episodes.read_from` here."""

    def __init__(self, config: Any, rollout_wg: Any) -> None: ...

    def wrap_generate_sequences(self) -> None:
        raise NotImplementedError(
            "rollout.skip_rollout: set episodes.write_to in one run and episodes.read_from in another"
        )


RECORDERS: dict[str, Callable[[int, dict[str, float]], None]] = {}
"""Run directory → who records the figures of its trainer, in this process."""


class Tracking:
    """verl's `Tracking(project_name, experiment_name, default_backend, config).log(data, step)`: among the figures of this
    process's trainer, or else into a run directory of its own."""

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: str | list[str] = "console", config: Any = None
    ) -> None:
        from quadriga.tracking.run_directory import RunDirectory

        named = ((config or {}).get("trainer") or {}).get("default_local_dir")
        folder = Path(named or f"outputs/{project_name}/{experiment_name}").expanduser().absolute()
        self.record = RECORDERS.get(str(folder)) or next(iter(RECORDERS.values()), None)
        self.backends = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        if self.record is None:
            self.directory = RunDirectory(folder)
            self.directory.begin()

    def log(self, data: dict[str, Any], step: int, backend: str | None = None) -> None:
        """Numbers of a step; with the console among the backends they are printed too."""
        numbers = {name: float(value) for name, value in data.items() if isinstance(value, (int, float, np.number))}
        if self.record is not None:
            self.record(step, numbers)
            return
        self.directory.append_metrics(step, numbers)
        if "console" in self.backends:
            print(f"step:{step} - " + " - ".join(f"{key}:{value:.4g}" for key, value in numbers.items()))
