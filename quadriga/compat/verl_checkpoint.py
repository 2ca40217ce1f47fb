"""verl's FSDP checkpoints as Hugging Face folders, without running what is in them.

verl writes `global_step_N/actor/model_world_size_W_rank_R.pt` with pickle, and beside them `huggingface/` with config and
tokenizer. The shards are read with torch's `weights_only`, which makes tensors and sharded tensors and nothing else; a
file that asks for more is refused. Covered: weights sharded in one dimension, also replicated (HSDP), and LoRA adapters
whose scale is written down. Not covered: Megatron's shards, optimiser states, models that bring their own code.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.checkpoint.export import Exported, require_free
from quadriga.errors import CheckpointError

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
DESCRIPTION = "huggingface"
PEFT_PREFIX = "base_model.model."


def convert(folder: Path, output: str | Path, dtype: str | None = None, overwrite: bool = False) -> Exported:
    """Write the policy in `folder` (with verl's shards) to `output`, in `dtype` or as it was trained.

    Raises:
        CheckpointError: shards are missing, damaged or ask for code, or do not fit the model that the folder describes.
    """
    target = Path(output).expanduser().absolute()
    require_free(target, overwrite)
    described = folder / DESCRIPTION
    if not (described / "config.json").is_file():
        raise CheckpointError(f"{described} has no config.json", "copy config and tokenizer of the trained model there")
    weights = merged(folder)
    if dtype is not None:
        weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    model = _empty_model(described)
    _require_fit(model, weights, folder)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if overwrite and target.exists():
        shutil.rmtree(target)
    model.save_pretrained(target)
    for file in described.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".py") and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)
    kinds = {str(weight.dtype).removeprefix("torch.") for weight in weights.values()}
    return Exported(target, sum(weight.numel() for weight in weights.values()), " and ".join(sorted(kinds)))


def merged(folder: Path) -> dict[str, Tensor]:
    """Every weight whole, under its Hugging Face name."""
    shards = [_load(file) for file in _files(folder)]
    whole = {name: _whole(name, [shard.get(name) for shard in shards], folder) for name in shards[0]}
    return _without_adapter(whole, folder) if any(".lora_" in name for name in whole) else whole


def _files(folder: Path) -> list[Path]:
    """The files of all ranks, in order."""
    found = {(int(match[1]), int(match[2])): file for file in folder.iterdir() if (match := SHARD.fullmatch(file.name))}
    worlds = {world for world, _ in found}
    if len(worlds) != 1:
        raise CheckpointError(f"{folder} has shards of several runs: {sorted(worlds)} ranks", "keep those of one run")
    (world,) = worlds
    if missing := [rank for rank in range(world) if (world, rank) not in found]:
        raise CheckpointError(
            f"{folder} lacks the shards of {len(missing)} of {world} ranks, first rank {missing[0]}",
            "verl writes each node's shards to that node's disk: copy them together",
        )
    return [found[world, rank] for rank in range(world)]


def _load(file: Path) -> dict[str, Any]:
    import torch.distributed.tensor

    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds more than weights and is not opened: {str(error).splitlines()[0]}",
            "export it with the verl that wrote it (python -m verl.model_merger merge …), where you trust the file",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}", "take another checkpoint") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file} is no state of a model", "give the folder of the actor")
    return content


def _whole(name: str, parts: list[Any], folder: Path) -> Tensor:
    """One weight from the parts of all ranks."""
    from torch.distributed.tensor import DTensor

    first = parts[0]
    if any(part is None or type(part) is not type(first) for part in parts):
        raise CheckpointError(f"{name} is not in all shards of {folder}", "take another checkpoint")
    if not isinstance(first, DTensor):
        if len(parts) > 1 and not all(torch.equal(first, part) for part in parts[1:]):
            raise CheckpointError(f"{name}: {folder} has a sharding that is not known here", "export it with verl")
        return first
    sharded = [i for i, placement in enumerate(first.placements) if placement.is_shard()]
    if len(sharded) > 1 or any(placement.is_partial() for placement in first.placements):
        raise CheckpointError(f"{name} is sharded in {len(sharded)} ways", "export it with verl")
    if not sharded:
        return first._local_tensor
    ranks = first.device_mesh.mesh.movedim(sharded[0], -1).reshape(-1, first.device_mesh.mesh.shape[sharded[0]])[0]
    dimension = first.placements[sharded[0]].dim  # type: ignore[attr-defined]
    weight = torch.cat([parts[int(rank)]._local_tensor for rank in ranks], dimension)
    if weight.shape != first.shape:
        raise CheckpointError(
            f"the parts of {name} make {tuple(weight.shape)}, not {tuple(first.shape)}", "take another checkpoint"
        )
    return weight


def _without_adapter(whole: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """A LoRA adapter added to the weights that it adapts, and peft's names taken off."""
    scale = _adapter_scale(folder)
    plain: dict[str, Tensor] = {}
    for name, weight in whole.items():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            module = name.removesuffix(".base_layer.weight")
            a, b = (whole[f"{module}.lora_{side}.default.weight"].float() for side in "AB")
            weight = (weight.float() + scale * (b @ a)).to(weight.dtype)
        plain[name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")] = weight
    return plain


def _adapter_scale(folder: Path) -> float:
    for file in (folder / "lora_adapter" / "adapter_config.json", folder / "lora_train_meta.json"):
        if file.is_file():
            described = json.loads(file.read_text(encoding="utf-8"))
            return float(described["lora_alpha"]) / float(described["r"])
    raise CheckpointError(
        f"{folder} holds a LoRA adapter, and nothing says its scale",
        'write {"r": <lora_rank>, "lora_alpha": <lora_alpha>} of the run to lora_train_meta.json beside the shards',
    )


def _empty_model(described: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(described)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(
            f"{described} describes no language model known here: {error}", "export it with verl"
        ) from None


def _require_fit(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Every weight of the model is there with its shape, but for those that are another's by design; and no other is."""
    wanted = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    missing = [name for name in wanted if name not in weights and name not in tied]
    unknown = [name for name in weights if name not in wanted]
    wrong = [name for name in wanted if name in weights and tuple(weights[name].shape) != wanted[name]]
    if missing or unknown or wrong:
        found = {"missing": missing, "unknown": unknown, "of another shape": wrong}
        said = [f"{len(names)} {word}, such as {names[0]}" for word, names in found.items() if names]
        raise CheckpointError(
            f"the weights in {folder} do not fit its {DESCRIPTION}/config.json: {'; '.join(said)}",
            "give the folder of the actor (a critic has another head), with the config of the trained model",
        )
