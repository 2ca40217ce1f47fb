"""Take the policy out of a checkpoint: a copy of its Hugging Face folder that is known to load, or its adapter alone."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from quadriga.checkpoint.checkpoint import Checkpoint
from quadriga.checkpoint.disk import readable_disk_errors, require_room, sync, sync_tree
from quadriga.checkpoint.huggingface import PART, load_exported
from quadriga.checkpoint.manifest import sha256
from quadriga.data.files import progress_bar
from quadriga.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Exported:
    """A folder that `AutoModelForCausalLM.from_pretrained` has loaded, or for `PeftModel.from_pretrained` an adapter's."""

    folder: Path
    parameters: int
    dtype: str


def export_policy_of(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    lora: str = "merged",
) -> Exported:
    """Copy the policy of a verified checkpoint to `output`, load it there, and only then give the folder its name.

    Args:
        dtype: convert the weights; None: as they are.
        overwrite: replace a Hugging Face folder that is there already.
        lora: `merged`: the whole policy, an adapter added to its weights. `apart`: the adapter alone, as peft reads it.

    Raises:
        CheckpointError: the checkpoint holds no policy or no adapter, the output is in use, the disk is full, or the copy
            does not load. What was at `output` before is unchanged then.
    """
    target = Path(output).expanduser().absolute()
    require_free(target, overwrite)
    with readable_disk_errors("export to", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
        try:
            if lora == "apart":
                from quadriga.checkpoint.adapter import write_adapter

                exported = Exported(target, write_adapter(checkpoint, unfinished, dtype), dtype or "float32")
            else:
                _copy(checkpoint, unfinished)
                if dtype is not None:
                    _convert(unfinished, dtype)
                loaded = load_exported(unfinished, target)
                exported = Exported(target, loaded.parameters, loaded.dtype)
            sync_tree(unfinished)
            if target.exists():
                replaced = target.with_name(f".{target.name}.replaced-{secrets.token_hex(8)}")
                os.rename(target, replaced)
                os.rename(unfinished, target)
                shutil.rmtree(replaced)
            else:
                os.rename(unfinished, target)
            sync(target.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return exported


def _copy(checkpoint: Checkpoint, target: Path) -> None:
    """The policy's files, byte for byte."""
    source = checkpoint.folder(PART)
    files = {n: e for n, e in checkpoint.manifest.files.items() if n.startswith(f"{PART}/")}
    require_room(target.parent, sum(entry.bytes for entry in files.values()))
    with progress_bar("copying files", len(files)) as advance:
        for name, entry in files.items():
            copy = target / Path(name).relative_to(PART)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.path / name, copy)
            if sha256(copy) != entry.sha256:
                raise CheckpointError(f"the copy of {source / copy.name} differs from it", "check that disk")
            advance(1)


def require_free(target: Path, overwrite: bool) -> None:
    """CheckpointError if `target` holds something that must not be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already", "choose another --output, or add --overwrite")
    if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(
            f"{target} is not a Hugging Face folder, so it is not replaced", "choose another --output"
        )


def _convert(folder: Path, dtype: str) -> None:
    """All floating-point weights in `folder` to `dtype`, file by file."""
    from safetensors.torch import load_file, save_file

    wanted = getattr(torch, dtype)
    for path in sorted(folder.glob("*.safetensors")):
        weights = load_file(path)
        converted = {name: w.to(wanted) if w.is_floating_point() else w for name, w in weights.items()}
        mode = path.stat().st_mode
        save_file(converted, path, {"format": "pt"})
        path.chmod(mode)  # safetensors makes files that only their owner can read
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed.get("metadata", {}).pop("total_size", None)  # of the weights before
        index.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
