"""Per-slot tables on the GPU: besides what is sampled, where each running sample is and whether it has ended."""

from __future__ import annotations

import numpy as np
import torch

from quadriga.models.layout import to_device
from quadriga.rollout.native.sequence import Sequence
from quadriga.rollout.native.slots import SlotTable


class DeviceSlots(SlotTable):
    """A `SlotTable` that the kernels advance by themselves.

    Attributes:
        length: `[slots]` tokens of each sample in the cache.
        done: `[slots]` 0 while it runs, then the code of `SlotTable.append`; a sample that is done changes no more.
        scale: `[slots]` what logits are multiplied by: 1 / temperature, as the trainer computes it.
        blocks: `[slots, W]` int32 block ids, see `Scheduler.tables`.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        blocks_per_slot: int,
    ) -> None:
        super().__init__(slots, vocab_size, eos_token_ids, device)
        self.length, self.done = (torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2))
        self.scale = torch.ones(slots, dtype=torch.float32, device=device)
        self.blocks = torch.zeros(slots, blocks_per_slot, dtype=torch.int32, device=device)

    def load(self, sequences: list[Sequence]) -> None:
        super().load(sequences)
        slots = torch.tensor([s.slot for s in sequences]).to(self.device)
        self.length[slots] = self._row([len(s.request.prompt_ids) + len(s.tokens) for s in sequences], torch.int64)
        self.scale[slots] = self._row([1 / s.request.params.scale_temperature for s in sequences], torch.float32)
        self.done[slots] = 0

    def set_blocks(self, changes: list[tuple[int, int, int]]) -> None:
        """Note `(slot, column, block)` of every block that a sample got."""
        if changes:
            slot, column, block = to_device(torch.from_numpy(np.array(changes, np.int64).T.copy()), self.device)
            self.blocks[slot, column] = block.to(torch.int32)
