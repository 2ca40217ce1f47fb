"""Runs the training module itself, with paged attention, on the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.rollout.native.attention import register_paged_attention
from quadriga.rollout.native.kv_cache import KVCache
from quadriga.rollout.native.plan import ROWS, Chunk, DecodeIndex, StepPlan, decode_index
from quadriga.rollout.native.scheduler import Batch, Scheduler
from quadriga.rollout.native.slots import SlotTable


class Runner:
    """Turns a batch into a plan and the plan into logits.

    The module is borrowed for each pass only: its attention and its training mode are put back at once, so the trainer
    may use it between two passes.
    """

    def __init__(self, module: Any, cache: KVCache, scheduler: Scheduler, table: SlotTable) -> None:
        self.module, self.cache, self.scheduler, self.table = module, cache, scheduler, table
        self._attention = register_paged_attention()
        self._index: DecodeIndex | None = None
        self._index_of: tuple[int, np.ndarray] | None = None

    @torch.no_grad()
    def run(self, batch: Batch) -> tuple[Tensor, np.ndarray]:
        """Logits `[R, V]` float32 for the samples that get a token, and their slots `[R]`.

        The decoding slots come first, then the samples of the prompts that are complete.
        """
        plan = self._plan(batch)
        with self._borrowed():
            output = self.module(
                input_ids=plan.input_ids,
                position_ids=plan.position_ids,
                use_cache=False,
                logits_to_keep=plan.logit_rows,
                plan=plan,
            )
        self._share_tails(batch)
        logits = output.logits[0].float()
        started = [[s.slot for s in p.members] for p in batch.starting]
        decoding = len(batch.slots)
        if not started:
            return logits[:decoding], batch.slots
        of_prompt = np.repeat(np.arange(decoding, decoding + len(started)), [len(s) for s in started])
        rows = np.concatenate([np.arange(decoding), of_prompt])
        return logits[torch.from_numpy(rows).to(logits.device)], np.concatenate([batch.slots, *started])

    def _share_tails(self, batch: Batch) -> None:
        """Copy the last, not yet full block of each complete prompt to all of its samples, who write into it."""
        sources, targets = [], []
        for prefill in batch.starting:
            if prefill.ids.size % self.cache.shape.block_size:
                first, *others = (s.blocks[-1] for s in prefill.members)
                sources += [first] * len(others)
                targets += others
        if targets:
            self.cache.copy_blocks(sources, targets)

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        config, was_training = self.module.config, self.module.training
        before = config._attn_implementation
        config._attn_implementation = self._attention
        if was_training:
            self.module.eval()
        try:
            yield
        finally:
            config._attn_implementation = before
            if was_training:
                self.module.train()

    def _plan(self, batch: Batch) -> StepPlan:
        scheduler, size, device = self.scheduler, self.cache.shape.block_size, self.cache.shape.device
        decoding = len(batch.slots)
        positions = [scheduler.lengths[batch.slots]]
        tables = [scheduler.tables[batch.slots, positions[0] // size]]
        ids, chunks, ends = [], [], []
        tokens = decoding
        for prefill, start, length in batch.chunks:
            ids.append(prefill.ids[start : start + length])
            positions.append(np.arange(start, start + length))
            blocks = np.array(prefill.members[0].blocks, np.int64)
            tables.append(blocks[positions[-1] // size])
            chunks.append(Chunk(start, length, torch.from_numpy(blocks).to(device)))
            tokens += length
            if start + length == prefill.ids.size:
                ends.append(tokens - 1)
        padding = -tokens % ROWS
        position = torch.from_numpy(np.concatenate([*positions, np.zeros(padding, np.int64)])).to(device)
        new = torch.from_numpy(np.concatenate([*ids, np.zeros(padding, np.int64)])).to(device)
        blocks_of = torch.from_numpy(np.concatenate(tables)).to(device)
        kept = np.concatenate([np.arange(decoding), np.array(ends, np.int64)])
        kept = np.concatenate([kept, np.zeros(-len(kept) % ROWS, np.int64)])
        slots = torch.from_numpy(batch.slots).to(device)
        return StepPlan(
            cache=self.cache,
            input_ids=torch.cat([self.table.last_token[slots], new])[None],
            position_ids=position[None],
            write_rows=self.cache.row_index(blocks_of, position[:tokens] % size),
            num_decode=decoding,
            num_tokens=tokens,
            chunks=chunks,
            decode=self._decode_index(batch.slots) if decoding else None,
            decode_positions=position[:decoding],
            logit_rows=torch.from_numpy(kept).to(device),
        )

    def _decode_index(self, slots: np.ndarray) -> DecodeIndex:
        """The index of the last pass, if no block changed hands and the same rows decode."""
        scheduler = self.scheduler
        changes = scheduler.pool.changes
        if (
            self._index is None
            or self._index_of is None
            or self._index_of[0] != changes
            or self._index_of[1] is not slots
        ):
            counts = scheduler.num_blocks[slots]
            tables = scheduler.tables[slots, : counts.max()]
            self._index = decode_index(self.cache.shape, tables, counts, scheduler.num_shared[slots])
            self._index_of = (changes, slots)
        return self._index
