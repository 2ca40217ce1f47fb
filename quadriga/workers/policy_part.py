"""The policy as a Hugging Face folder: the part of a checkpoint that other programs read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quadriga.checkpoint.disk import readable_disk_errors
from quadriga.errors import CheckpointError


@dataclass(frozen=True)
class PolicyPart:
    """Whole weights in host memory, an adapter merged into them, and what `from_pretrained` needs beside them."""

    module: Any
    tokenizer: Any
    weights: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.weights.values())

    def write(self, folder: str) -> None:
        """CheckpointError where the disk does not take it."""
        from safetensors import SafetensorError

        with readable_disk_errors("write the policy into", Path(folder)):
            try:
                self.module.save_pretrained(folder, state_dict=self.weights)
            except SafetensorError as error:
                raise CheckpointError(f"Cannot write {folder}: {error}", "free some space on that disk") from error
            self.tokenizer.save_pretrained(folder)
