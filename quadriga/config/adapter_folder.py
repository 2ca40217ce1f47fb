"""A LoRA adapter that a run starts from: what its folder says about rank, scale and modules holds for the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quadriga.config.typed import Problems

DESCRIPTION, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def take_adapter(model: Any, section: str, problems: Problems) -> None:
    """Let the keys of `model` say what the adapter at its `lora_adapter_path` is; a problem if there is none.

    Args:
        model: the section of a policy's model.
        section: its dotted name, for the messages.
    """
    key = f"{section}.lora_adapter_path"
    folder = Path(model.lora_adapter_path).expanduser()
    missing = [name for name in (DESCRIPTION, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        problems.add(
            f"{key}={model.lora_adapter_path}: there is no {' and no '.join(missing)} in that folder",
            "give a local folder that peft's save_pretrained, or `quadriga export --lora apart`, has written",
        )
        return
    try:
        described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        rank, alpha = int(described["r"]), int(described["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        problems.add(f"{folder / DESCRIPTION} cannot be read: {error!r}", "write the adapter anew")
        return
    if described.get("peft_type", "LORA") != "LORA" or rank < 1:
        problems.add(f"{key}: the adapter in {folder} is no LoRA adapter", "give a LoRA adapter")
        return
    if model.lora_rank not in (0, rank):
        problems.add(
            f"{section}.lora_rank={model.lora_rank}, but the adapter in {folder} has rank {rank}",
            f"remove {section}.lora_rank, or set {section}.lora_rank={rank}",
        )
    if model.exclude_modules:
        problems.add(f"{section}.exclude_modules has no effect: the adapter in {folder} has its modules", "remove it")
    model.lora_rank, model.lora_alpha = rank, alpha
    model.target_modules = described.get("target_modules") or model.target_modules
    model.lora_adapter_path = str(folder.resolve())
