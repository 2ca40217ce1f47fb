"""Take the policy out of a checkpoint: a copy of its Hugging Face folder that is known to load, or its adapter alone."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.checkpoint.checkpoint import Checkpoint
from quadriga.checkpoint.disk import readable_disk_errors, require_room, sync, sync_tree
from quadriga.checkpoint.manifest import sha256
from quadriga.data.progress import progress_bar
from quadriga.errors import CheckpointError

PART = "huggingface"
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
    _require_free(target, overwrite)
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
                exported = _load(unfinished, target)
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


def _require_free(target: Path, overwrite: bool) -> None:
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
    import torch
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


def _load(folder: Path, target: Path) -> Exported:
    """Load model and tokenizer with transformers, never from a pickle, never with code from the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scores = str(config.get("architectures")).endswith("ForSequenceClassification']")  # a reward model
    auto_class: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    trust: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        AutoTokenizer.from_pretrained(folder, **trust)
        loaded: Any = auto_class.from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **trust
        )
        model, info = loaded
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CheckpointError(
            f"transformers cannot load the policy for {target}: {type(error).__name__}: {error}",
            "export another checkpoint, or check that this version of transformers knows the model",
        ) from error
    wrong = {kind: sorted(map(str, info[kind])) for kind in info if kind.endswith("_keys") and info[kind]}
    if wrong:
        raise CheckpointError(
            f"the policy for {target} does not fit its config.json: {wrong}", "export another checkpoint"
        )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"the policy for {target} has numbers in {name} that are not finite",
                "export an earlier checkpoint, or another --dtype if float16 is too narrow for it",
            )
    return Exported(target, sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch."))
