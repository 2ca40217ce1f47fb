"""Runs the training module itself, with paged attention, on the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.rollout.native.attention import register_paged_attention
from quadriga.rollout.native.kv_cache import KVCache
from quadriga.rollout.native.plan import Chunk, DecodeIndex, DecodeTables, StepPlan, decode_index, padded
from quadriga.rollout.native.program import Program, Rows
from quadriga.rollout.native.program_parts import UnknownPartError
from quadriga.rollout.native.scheduler import Batch, Scheduler
from quadriga.rollout.native.slots import SlotTable


@dataclass
class Work:
    """What was computed since the engine was made, and how much of it for nobody."""

    rows: int = 0
    padding: int = 0
    blocks: int = 0
    """Cache blocks read in place by decoding."""
    gaps: int = 0
    """Those of them that belonged to no decoding row."""


class Runner:
    """Turns a batch into a plan and the plan into logits.

    The module is borrowed for each pass only: its attention and its training mode are put back at once, so the trainer
    may use it between two passes.
    """

    def __init__(self, module: Any, cache: KVCache, scheduler: Scheduler, table: SlotTable, work: Work) -> None:
        self.module, self.cache, self.scheduler, self.table, self.work = module, cache, scheduler, table, work
        self._attention = register_paged_attention()
        self._index: DecodeIndex | None = None
        self._index_of: tuple[int, np.ndarray] | None = None
        self.windows: set[int | None] = set()
        """Sliding windows that decoding was asked for so far; None: no window."""
        self.program: Program | None = None
        """Computes in the module's place where it can, see `begin`."""

    def begin(self, updates: int, use_program: bool) -> None:
        """Before a generation: let the program compute with the module's weights of now, if it can and may.

        `updates` counts how often the engine was told of new weights.
        """
        try:
            if not (use_program and self.cache.shape.by_kernel):
                self.program = None
            elif self.program is None or not self.program.refresh(updates):
                slots, blocks = self.scheduler.tables.shape
                self.program = Program(self.module, self.cache, slots, blocks * self.cache.shape.block_size)
                self.program.refresh(updates)
        except UnknownPartError:
            self.program = None

    @torch.no_grad()
    def run(self, batch: Batch) -> tuple[Tensor, np.ndarray]:
        """Logits `[R, V]` float32 for the samples that get a token, and their slots `[R]`.

        The decoding slots come first, then the samples of the prompts that are complete.
        """
        self.cache.copy_blocks(batch.moves)
        started = [[s.slot for s in p.members] for p in batch.starting]
        slots = np.concatenate([batch.slots, *started]) if started else batch.slots
        decoding = len(batch.slots)
        logits = self._by_module(batch) if self.program is None else self._by_program(self.program, batch)
        self._share_tails(batch)
        if not started:
            return logits[:decoding], slots
        # All samples of a prompt draw their first token from the one row of logits that its last token gave.
        of_prompt = np.repeat(np.arange(decoding, decoding + len(started)), [len(s) for s in started])
        rows = np.concatenate([np.arange(decoding), of_prompt])
        return logits[torch.from_numpy(rows).to(logits.device)], slots

    def _by_program(self, program: Program, batch: Batch) -> Tensor:
        scheduler, slots, decoding = self.scheduler, batch.slots, len(batch.slots)
        tokens, positions = [self.table.last_token.numpy()[slots]], [scheduler.lengths[slots]]
        owners, lengths, ends = slots.tolist(), [1] * decoding, list(range(decoding))
        for prefill, start, length in batch.chunks:
            tokens.append(prefill.ids[start : start + length])
            positions.append(np.arange(start, start + length))
            owners.append(prefill.members[0].slot)
            lengths.append(length)
            if start + length == prefill.ids.size:
                ends.append(sum(lengths) - 1)
        counts = scheduler.num_blocks[owners]
        rows = Rows(
            tokens=np.concatenate(tokens),
            positions=np.concatenate(positions),
            sequences=np.repeat(np.arange(len(owners)), lengths),
            outputs=np.array(ends, np.int64),
            tables=scheduler.tables[owners, : counts.max()],
        )
        self.work.rows += len(rows.tokens)
        self.work.blocks += int(counts[:decoding].sum())
        self.windows |= program.windows
        return program.run(rows, waits=bool(batch.chunks))

    def _by_module(self, batch: Batch) -> Tensor:
        plan = self._plan(batch)
        with borrowed(self.module, self._attention):
            output = self.module(
                input_ids=plan.input_ids,
                position_ids=plan.position_ids,
                use_cache=False,
                logits_to_keep=plan.logit_rows,
                plan=plan,
            )
        self.windows |= plan.windows
        return output.logits[0].float()

    def _share_tails(self, batch: Batch) -> None:
        """Copy the last, not yet full block of each complete prompt to all of its samples, who write into it."""
        pairs = []
        for prefill in batch.starting:
            if prefill.ids.size % self.cache.shape.block_size:
                first, *others = (int(self.scheduler.blocks_of(s)[-1]) for s in prefill.members)
                pairs += [(first, other) for other in others]
        self.cache.copy_blocks(pairs)

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
            blocks = scheduler.blocks_of(prefill.members[0])
            tables.append(blocks[positions[-1] // size])
            chunks.append(Chunk(start, length, torch.from_numpy(blocks).to(device)))
            tokens += length
            if start + length == prefill.ids.size:
                ends.append(tokens - 1)
        padding = padded(tokens) - tokens
        self.work.rows += tokens + padding
        self.work.padding += padding
        position = torch.from_numpy(np.concatenate([*positions, np.zeros(padding, np.int64)])).to(device)
        new = torch.from_numpy(np.concatenate([*ids, np.zeros(padding, np.int64)])).to(device)
        blocks_of = torch.from_numpy(np.concatenate(tables)).to(device)
        kept = np.concatenate([np.arange(decoding), np.array(ends, np.int64)])
        kept = np.concatenate([kept, np.zeros(padded(len(kept)) - len(kept), np.int64)])
        slots = torch.from_numpy(batch.slots).to(device)
        return StepPlan(
            cache=self.cache,
            input_ids=torch.cat([self.table.last_token[slots], new])[None],
            position_ids=position[None],
            write_blocks=blocks_of,
            write_places=position[:tokens] % size,
            num_decode=decoding,
            num_tokens=tokens,
            chunks=chunks,
            decode=self._decode_index(batch.slots) if decoding else None,
            decode_positions=position[:decoding],
            logit_rows=torch.from_numpy(kept).to(device),
        )

    def _decode_index(self, slots: np.ndarray) -> DecodeIndex | DecodeTables:
        """The index of the last pass, if no block changed hands and the same rows decode."""
        scheduler, known = self.scheduler, self._index_of
        counts = scheduler.num_blocks[slots]
        if self.cache.shape.by_kernel:
            self.work.blocks += int(counts.sum())
            blocks = torch.from_numpy(scheduler.tables[slots, : counts.max()])
            return DecodeTables(blocks, int(scheduler.lengths[slots].max()) + 1)
        shared = scheduler.num_shared[slots]
        # A row gets a block once in `block_size` tokens; in between, and while nobody comes or goes, the index is the same.
        # The scheduler makes a new array of slots when somebody does, so it is enough to compare which array it is.
        if self._index is None or known is None or known[0] != scheduler.pool.changes or known[1] is not slots:
            self._index = decode_index(self.cache.shape, scheduler.tables[slots, : counts.max()], counts, shared)
            self._index_of = (scheduler.pool.changes, slots)
        self.work.blocks += self._index.num_private
        self.work.gaps += self._index.num_private - int((counts - shared).sum())
        return self._index


@contextmanager
def borrowed(module: Any, attention: str) -> Iterator[None]:
    """`module` in evaluation mode, with the attention of that name; afterwards it is as it was."""
    config, was_training = module.config, module.training
    before = config._attn_implementation
    config._attn_implementation = attention
    if was_training:
        module.eval()
    try:
        yield
    finally:
        config._attn_implementation = before
        if was_training:
            module.train()
