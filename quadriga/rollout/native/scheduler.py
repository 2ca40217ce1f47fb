"""Who runs next, and in which blocks: continuous batching on the host, without tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from quadriga.rollout.native.blocks import BlockPool
from quadriga.rollout.native.sequence import Prefill, Sequence


@dataclass(eq=False)
class Batch:
    """Work of one pass: the slots that decode one token each, and the chunks `(prefill, start, length)` of prompts."""

    slots: np.ndarray
    chunks: list[tuple[Prefill, int, int]] = field(default_factory=list)

    @property
    def starting(self) -> list[Prefill]:
        """The prompts that are complete after this pass; their samples get a first token."""
        return [prefill for prefill, start, length in self.chunks if start + length == prefill.ids.size]


class Scheduler:
    """Admits prompts while slots and blocks last, gives running samples their next block, preempts when there is none.

    A prompt of at most `max_batched_tokens` is never cut and a longer one is cut at multiples of it, so where a prompt
    is cut does not depend on what else is waiting. The last to come is the first to be preempted; a preempted sample
    goes to the head of the queue and computes its prompt and its own tokens again.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_slots: int,
        max_tokens: int,
        max_batched_tokens: int,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_batched_tokens = max_batched_tokens
        self.on_preempt = on_preempt
        self.waiting: deque[Prefill] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        width = self.blocks_for(max_tokens)
        self.tables = np.zeros((max_slots, width), np.int64)
        self.num_blocks, self.num_shared, self.lengths = (np.zeros(max_slots, np.int64) for _ in range(3))
        self._free_slots = list(range(max_slots))[::-1]
        self._slots: np.ndarray | None = None

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a sequence that holds `tokens` and is about to write one more."""
        return tokens // self.block_size + 1

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def submit(self, ids: np.ndarray, members: list[Sequence]) -> None:
        """Queue a prompt for its samples, in as few parts as slots and blocks allow."""
        room = min(len(self.tables), self.pool.num_blocks - ids.size // self.block_size)
        self.waiting.extend(Prefill(ids, members[i : i + room]) for i in range(0, len(members), room))

    def schedule(self) -> Batch:
        self._extend_running()
        chunks = self._continue_prefills()
        self._admit(chunks)
        if self._slots is None:
            self._slots = np.array([s.slot for s in self.running], np.int64)
        return Batch(self._slots, chunks)

    def advance(self, batch: Batch) -> None:
        """Note that `batch` is in the cache now; samples of finished prompts run from here on."""
        self.lengths[batch.slots] += 1
        for prefill, start, length in batch.chunks:
            prefill.done = start + length
        for prefill in batch.starting:
            self.prefilling.remove(prefill)
            self.running.extend(prefill.members)
            self._slots = None

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Take running samples out and free what they hold."""
        gone = set(map(id, sequences))
        for sequence in self.running:
            if id(sequence) in gone:
                self._free(sequence)
        self.running = [s for s in self.running if id(s) not in gone]
        self._slots = None

    def withdraw(self, is_over: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out every sample, in whatever state, of which `is_over` holds; the caller saves running ones first."""
        out = [s for s in self.running if is_over(s)]
        self.finish(out)
        for queue in (self.prefilling, self.waiting):
            for prefill in list(queue):
                leaving = [s for s in prefill.members if is_over(s)]
                if not leaving:
                    continue
                out += leaving
                if len(leaving) == len(prefill.members):
                    queue.remove(prefill)
                elif prefill.members[0] in leaving and prefill in self.prefilling:
                    # The first member holds the block with the prompt's tail: start over with the others.
                    self._requeue(prefill, [s for s in prefill.members if s not in leaving])
                    leaving = prefill.members
                else:
                    prefill.members = [s for s in prefill.members if s not in leaving]
                for sequence in leaving:
                    if sequence.slot >= 0:
                        self._free(sequence)
        return out

    # ---- parts of schedule -------------------------------------------------------------------------------------------

    def _extend_running(self) -> None:
        """A block for every running sample whose next token needs one."""
        if self._slots is None:
            self._slots = np.array([s.slot for s in self.running], np.int64)
        full = self.lengths[self._slots] == self.num_blocks[self._slots] * self.block_size
        for sequence in [self.running[i] for i in np.flatnonzero(full)]:
            while sequence.slot >= 0 and not self.pool.num_free:
                self._preempt_last()
            if sequence.slot >= 0:
                self._append(sequence, self.pool.take())

    def _continue_prefills(self) -> list[tuple[Prefill, int, int]]:
        chunks: list[tuple[Prefill, int, int]] = []
        for prefill in self.prefilling:
            self._add_chunk(chunks, prefill)
        return chunks

    def _admit(self, chunks: list[tuple[Prefill, int, int]]) -> None:
        reserve = len(self.running) // 8  # a block for some of those who need one soon: fewer preemptions
        while self.waiting:
            prefill = self.waiting[0]
            full, members = prefill.ids.size // self.block_size, len(prefill.members)
            idle = not (self.running or self.prefilling)
            needed = full + members + (0 if idle else reserve)
            if members > len(self._free_slots) or needed > self.pool.num_free or not self._add_chunk(chunks, prefill):
                return
            self.waiting.popleft()
            self.prefilling.append(prefill)
            shared = [self.pool.take(from_high_end=members > 1) for _ in range(full)]
            for i, sequence in enumerate(prefill.members):
                sequence.slot = self._free_slots.pop()
                sequence.blocks = []
                sequence.num_shared = full if members > 1 else 0
                self.num_shared[sequence.slot] = sequence.num_shared
                self.num_blocks[sequence.slot] = 0
                self.lengths[sequence.slot] = prefill.ids.size
                for block in shared:
                    self._append(sequence, self.pool.share(block) if i else block)
                self._append(sequence, self.pool.take())

    def _add_chunk(self, chunks: list[tuple[Prefill, int, int]], prefill: Prefill) -> bool:
        """Put the next chunk of `prefill` into `chunks` if the pass has room for it."""
        length = min(prefill.ids.size - prefill.done, self.max_batched_tokens)
        if chunks and sum(c[2] for c in chunks) + length > self.max_batched_tokens:
            return False
        chunks.append((prefill, prefill.done, length))
        return True

    # ---- changes of state --------------------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, block: int) -> None:
        self.tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)
        self.num_blocks[sequence.slot] += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.num_shared, sequence.slot = [], 0, -1

    def _preempt_last(self) -> None:
        self.preemptions += 1
        if self.prefilling:
            prefill = self.prefilling[-1]
            members = list(prefill.members)
            self._requeue(prefill, members)
            for sequence in members:
                self._free(sequence)
            return
        sequence = self.running.pop()
        self._slots = None
        self.on_preempt(sequence)
        self._free(sequence)
        ids = np.concatenate([np.asarray(sequence.request.prompt_ids, np.int64), np.array(sequence.tokens, np.int64)])
        self.waiting.appendleft(Prefill(ids, [sequence]))

    def _requeue(self, prefill: Prefill, members: list[Sequence]) -> None:
        self.prefilling.remove(prefill)
        self.waiting.appendleft(Prefill(prefill.ids, members))
