"""Who runs next, and in which blocks: continuous batching on the host, without tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from quadriga.rollout.native.blocks import BlockPool
from quadriga.rollout.native.sequence import Prefill, Sequence

Chunks = list[tuple[Prefill, int, int]]
"""Pieces of prompts: of which, from which token on, how many tokens."""


@dataclass(eq=False)
class Batch:
    """Work of one pass: the slots that decode one token each, and the chunks of prompts."""

    slots: np.ndarray
    chunks: Chunks
    moves: list[tuple[int, int]]
    """Blocks to copy before the pass."""

    @property
    def starting(self) -> list[Prefill]:
        """The prompts that are complete after this pass; their samples get a first token."""
        return [prefill for prefill, start, length in self.chunks if start + length == prefill.ids.size]


class Scheduler:
    """Admits prompts while slots and blocks last, gives running samples their next block, preempts when there is none.

    A prompt of at most `max_batched_tokens` is never cut and a longer one is cut at multiples of it, so where a prompt
    is cut does not depend on what else is waiting. The last to come is the first to be preempted; a preempted sample
    goes to the head of the queue and computes its prompt and its own tokens again.

    Args:
        max_tokens: of the longest sequence.
        on_preempt: called with a running sample that is about to lose its slot.
        on_device: the block tables live on a device: what changes in them is kept for `take_changes`, and prompts wait
            until a sixteenth of the slots is free, since a pass over prompts is dear.
        closes_gaps: blocks are moved to where decoding reads them in one run; kernels that read block tables need it not.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_slots: int,
        max_tokens: int,
        max_batched_tokens: int,
        on_preempt: Callable[[Sequence], None],
        on_device: bool = False,
        closes_gaps: bool = True,
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_batched_tokens = max_batched_tokens
        self.on_preempt, self.on_device, self.closes_gaps = on_preempt, on_device, closes_gaps and not on_device
        self._changes: list[tuple[int, int, int]] = []
        self.waiting: deque[Prefill] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        # By slot: block ids, how many there are, how many of the first are shared, and tokens in the cache.
        self.tables = np.zeros((max_slots, self.blocks_for(max_tokens)), np.int64)
        self.num_blocks, self.num_shared, self.lengths = (np.zeros(max_slots, np.int64) for _ in range(3))
        self._free_slots = list(range(max_slots))[::-1]
        self._slots = np.zeros(0, np.int64)

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a sequence that holds `tokens` and is about to write one more."""
        return tokens // self.block_size + 1

    def blocks_of(self, sequence: Sequence) -> np.ndarray:
        return self.tables[sequence.slot, : self.num_blocks[sequence.slot]]

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def next_deadline(self) -> float:
        """The first moment when a sample is to be given up."""
        queued = (s for prefill in (*self.prefilling, *self.waiting) for s in prefill.members)
        return min((s.deadline for s in (*self.running, *queued)), default=math.inf)

    def submit(self, ids: np.ndarray, members: list[Sequence]) -> None:
        """Queue a prompt for its samples, in as few parts as slots and blocks allow."""
        room = min(len(self.tables), self.pool.num_blocks - ids.size // self.block_size)
        self.waiting.extend(Prefill(ids, members[i : i + room]) for i in range(0, len(members), room))

    def schedule(self) -> Batch:
        self._extend_running()
        chunks: Chunks = []
        for prefill in self.prefilling:
            self._add_chunk(chunks, prefill)
        if not (self.on_device and self.running and len(self._free_slots) * 16 < len(self.tables)):
            self._admit(chunks)
        return Batch(self._slots, chunks, self._close_gaps() if self.closes_gaps else [])

    @property
    def blocks_due(self) -> int:
        """Running samples whose next token needs a new block."""
        return int((self.lengths[self._slots] == self.num_blocks[self._slots] * self.block_size).sum())

    def take_changes(self) -> list[tuple[int, int, int]]:
        """`(slot, column, block)` of every entry of the tables that is new since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def advance(self, batch: Batch) -> None:
        """Note that `batch` is in the cache now; samples of finished prompts run from here on."""
        self.lengths[batch.slots] += 1
        for prefill, start, length in batch.chunks:
            prefill.done = start + length
        for prefill in batch.starting:
            self.prefilling.remove(prefill)
            self._set_running([*self.running, *prefill.members])

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Take running samples out and free what they hold."""
        gone = set(map(id, sequences))
        if gone:
            leaving = [s for s in self.running if id(s) in gone]
            self._set_running([s for s in self.running if id(s) not in gone])
            for sequence in leaving:
                self._free(sequence)

    def withdraw(self, is_over: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out every sample, in whatever state, of which `is_over` holds; returns them."""
        out = [s for s in self.running if is_over(s)]
        self.finish(out)
        for prefill in [*self.prefilling, *self.waiting]:
            leaving = [s for s in prefill.members if is_over(s)]
            if leaving:
                out += leaving
                self._take_out(prefill, [s for s in prefill.members if s not in leaving])
        return out

    # ---- parts of schedule -------------------------------------------------------------------------------------------

    def _extend_running(self) -> None:
        """A block for every running sample whose next token needs one."""
        full = self.lengths[self._slots] == self.num_blocks[self._slots] * self.block_size
        for sequence in [self.running[i] for i in np.flatnonzero(full)]:
            while sequence.slot >= 0 and not self.pool.num_free:
                self._preempt_last()
            if sequence.slot >= 0:
                self._append(sequence, self.pool.take())

    def _admit(self, chunks: Chunks) -> None:
        reserve = len(self.running) // 8  # a block for some of those who need one soon: fewer preemptions
        while self.waiting:
            prefill = self.waiting[0]
            full, members = prefill.ids.size // self.block_size, len(prefill.members)
            needed = full + members + (reserve if self.running or self.prefilling else 0)
            if members > len(self._free_slots) or needed > self.pool.num_free or not self._add_chunk(chunks, prefill):
                return
            self.prefilling.append(self.waiting.popleft())
            prompt = [self.pool.take(from_high_end=members > 1) for _ in range(full)]
            for i, sequence in enumerate(prefill.members):
                sequence.slot = self._free_slots.pop()
                self.num_blocks[sequence.slot] = 0
                self.num_shared[sequence.slot] = full if members > 1 else 0
                self.lengths[sequence.slot] = prefill.ids.size
                for block in prompt:
                    self._append(sequence, self.pool.share(block) if i else block)
                self._append(sequence, self.pool.take())

    def _add_chunk(self, chunks: Chunks, prefill: Prefill) -> bool:
        """Put the next chunk of `prefill` into `chunks` if the pass has room for it."""
        length = min(prefill.ids.size - prefill.done, self.max_batched_tokens)
        if chunks and sum(c[2] for c in chunks) + length > self.max_batched_tokens:
            return False
        chunks.append((prefill, prefill.done, length))
        return True

    def _close_gaps(self) -> list[tuple[int, int]]:
        """Move blocks down when over a fifth of the range that decoding reads belongs to nobody; `(from, to)` of each."""
        tables, column = self.tables[self._slots], np.arange(self.tables.shape[1])
        own = (column >= self.num_shared[self._slots, None]) & (column < self.num_blocks[self._slots, None])
        blocks = np.sort(tables[own])[::-1]
        if not blocks.size or blocks[0] + 1 <= 1.25 * blocks.size + 8:
            return []
        gaps = np.flatnonzero(self.pool.owners[: blocks[0]] == 0)
        count = min(gaps.size, blocks.size)
        moves = [(int(a), int(b)) for a, b in zip(blocks[:count], gaps[:count]) if b < a]
        moved = np.arange(self.pool.num_blocks)
        for source, target in moves:
            self.pool.move(source, target)
            moved[source] = target
        self.tables[self._slots] = moved[tables]
        return moves

    # ---- changes of state --------------------------------------------------------------------------------------------

    def _set_running(self, sequences: list[Sequence]) -> None:
        self.running = sequences
        self._slots = np.array([s.slot for s in sequences], np.int64)

    def _append(self, sequence: Sequence, block: int) -> None:
        if self.on_device:
            self._changes.append((sequence.slot, int(self.num_blocks[sequence.slot]), block))
        self.tables[sequence.slot, self.num_blocks[sequence.slot]] = block
        self.num_blocks[sequence.slot] += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(self.blocks_of(sequence).tolist())
        self.num_blocks[sequence.slot] = 0
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _preempt_last(self) -> None:
        self.preemptions += 1
        if self.prefilling:
            self._take_out(self.prefilling[-1], self.prefilling[-1].members)
            return
        sequence = self.running[-1]
        self.on_preempt(sequence)
        self.finish([sequence])
        ids = np.array([*sequence.request.prompt_ids, *sequence.tokens], np.int64)
        self.waiting.appendleft(Prefill(ids, [sequence]))

    def _take_out(self, prefill: Prefill, staying: list[Sequence]) -> None:
        """Free a prompt that is waiting or being computed; those of its samples who stay wait for it anew."""
        queue = self.prefilling if prefill in self.prefilling else self.waiting
        place = queue.index(prefill)
        queue.remove(prefill)
        for sequence in prefill.members:
            if sequence.slot >= 0:
                self._free(sequence)
        if staying:
            again = Prefill(prefill.ids, list(staying))
            self.waiting.insert(place if queue is self.waiting else 0, again)
