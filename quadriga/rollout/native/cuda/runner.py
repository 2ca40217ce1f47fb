"""Runs the module on CUDA: prompts eagerly, new tokens through graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.models.exact import is_exact
from quadriga.models.kernels.linear import product
from quadriga.models.layout import to_device
from quadriga.models.token_model import logit_transform
from quadriga.rollout.native.cuda.attention_kernels import splits_for
from quadriga.rollout.native.cuda.graphs import DecodeGraphs
from quadriga.rollout.native.cuda.merged import merge_projections
from quadriga.rollout.native.cuda.plan import DecodePass, PrefillPass, register_cuda_attention
from quadriga.rollout.native.kv_cache import CudaKVCache
from quadriga.rollout.native.plan import Chunk
from quadriga.rollout.native.runner import Work, borrowed
from quadriga.rollout.native.scheduler import Chunks, Scheduler
from quadriga.rollout.native.sequence import Prefill
from quadriga.rollout.native.slots import DeviceSlots


class CudaRunner:
    """Turns rows into float32 logits, by the trunk of `module` and the lm_head's product in float32.

    The module is borrowed for each pass only, see `Runner`. It is one that is not trained: its projections are merged.
    """

    def __init__(
        self, module: Any, cache: CudaKVCache, scheduler: Scheduler, table: DeviceSlots, work: Work, eager: bool
    ) -> None:
        self.module, self.cache, self.scheduler, self.table, self.work = module, cache, scheduler, table, work
        merge_projections(module)
        self._attention = register_cuda_attention()
        self._transform = logit_transform(module.config)
        self._processors = torch.cuda.get_device_properties(cache.shape.device).multi_processor_count
        self._logits: Tensor | None = None
        self.windows: set[int | None] = set()
        self.graphs = DecodeGraphs(self._decode, len(table.key), cache.shape.device, eager)

    def sleep(self) -> None:
        self.cache.release()

    def wake(self) -> None:
        if self.cache.memory is None:
            self.cache.allocate()

    # ---- prompts -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, pieces: Chunks) -> Tensor:
        """Run pieces of prompts; logits `[prompts that are complete now, V]`."""
        device, size = self.cache.shape.device, self.cache.shape.block_size
        ids, positions, places, chunks, ends = [], [], [], [], []
        tokens = 0
        for prefill, start, length in pieces:
            blocks = self.scheduler.blocks_of(prefill.members[0])
            position = np.arange(start, start + length)
            ids.append(prefill.ids[start : start + length])
            positions.append(position)
            places.append(blocks[position // size] * size + position % size)
            chunks.append(Chunk(start, length, torch.from_numpy(blocks.copy()).to(device)))
            tokens += length
            if start + length == prefill.ids.size:
                ends.append(tokens - 1)
        self.work.rows += tokens
        together = torch.from_numpy(np.stack([np.concatenate(x) for x in (ids, positions, places)])).to(device)
        with borrowed(self.module, self._attention):
            hidden = self._trunk(together[0], together[1], PrefillPass.of(self.cache, chunks, together[2]))
            return self._head(hidden[torch.tensor(ends, dtype=torch.int64).to(device)], None)

    def share_tails(self, prompts: list[Prefill]) -> None:
        """Copy the last, not yet full block of each complete prompt to all of its samples, who write into it."""
        pairs = []
        for prefill in prompts:
            if prefill.ids.size % self.cache.shape.block_size:
                first, *others = (int(self.scheduler.blocks_of(s)[-1]) for s in prefill.members)
                pairs += [(first, other) for other in others]
        self.cache.copy_blocks(pairs)

    # ---- new tokens --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, slots: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """`(slots[B], logits[B, V])` in as many parts as it takes; −1 among the slots is padding."""
        while not all(self.graphs.prepare(self.graphs.padded(rows)) for _, rows in self.graphs.parts(len(slots))):
            continue
        for start, rows in self.graphs.parts(len(slots)):
            bucket = self.graphs.padded(rows)
            padded = np.full(bucket, -1, np.int64)
            padded[:rows] = slots[start : start + rows]
            self.work.rows += bucket
            self.work.padding += bucket - rows
            part = to_device(torch.from_numpy(padded), self.cache.shape.device)
            yield part, self.graphs.run(part)

    def _decode(self, slots: Tensor) -> Tensor:
        """The step that graphs capture: all it needs to know of the rows it reads on the device, by their slots."""
        table, size = self.table, self.cache.shape.block_size
        rows = slots.clamp(min=0)
        position = table.length[rows]
        block = table.blocks[rows, position // size].to(torch.int64)
        places = torch.where(slots < 0, -1, block * size + position % size)
        # How many programs attention starts is fixed in a graph, so it goes by the longest row that there could be.
        max_tokens = table.blocks.shape[1] * size
        # Where a row is cut decides in which order its shares are added: the trainer does not cut.
        splits = 1 if is_exact() else splits_for(len(slots), self.cache.shape.kv_heads, max_tokens, self._processors)
        plan = DecodePass(self.cache, table, slots, places, splits)
        # One tensor for the logits of all graphs, made in the run before a capture and so in none of their pools. A larger one
        # takes its place when a larger batch comes; graphs captured before keep the old one.
        if self._logits is None or self._logits.shape[0] < len(slots):
            self._logits = torch.empty(len(slots), table.vocab_size, dtype=torch.float32, device=slots.device)
        with borrowed(self.module, self._attention):
            hidden = self._trunk(table.last_token[rows], position, plan)
            logits = self._head(hidden, self._logits[: len(slots)])
        self.windows |= plan.windows
        return logits

    # ---- the module --------------------------------------------------------------------------------------------------

    def _trunk(self, ids: Tensor, positions: Tensor, plan: DecodePass | PrefillPass) -> Tensor:
        output = self.module.base_model(
            input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, plan=plan
        )
        return output.last_hidden_state.squeeze(0)

    def _head(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        """Logits in float32, as the trainer computes them."""
        head, transform = self.module.get_output_embeddings(), self._transform
        sharded = getattr(self.module, "sharded", None)
        if out is None or sharded is not None:
            out = torch.empty(len(hidden), head.weight.shape[0], dtype=torch.float32, device=hidden.device)
        if is_exact():
            product(hidden, head.weight, out=out)
        elif hidden.dtype == torch.float32:
            torch.mm(hidden, head.weight.t(), out=out)
        else:
            torch.mm(hidden, head.weight.t(), out_dtype=torch.float32, out=out)
        if getattr(head, "bias", None) is not None:
            out.add_(head.bias)
        if sharded is not None:
            out = sharded.whole_logits(out)
        if transform.scale != 1:
            out.mul_(transform.scale)
        if transform.softcap is not None:
            out.div_(transform.softcap).tanh_().mul_(transform.softcap)
        return out
