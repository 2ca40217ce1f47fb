"""Who runs next, and in which blocks: continuous batching on the host, without tensors.

To find one's way: a *prompt* (`Prefill`) waits with the samples that start from it, is admitted when it gets slots and blocks
(`_admit`), computed in one or more chunks (`_add_chunk`), and then its samples run, a token a pass, taking a block whenever the last
one is full (`_extend_running`). The block table of a slot says where its tokens are: entry i is the block of the tokens from
i · `block_size` on. Whatever is computed stays known after its owner has gone (`prefixes.py`, `blocks.py`), so a prompt that begins
with known tokens gets their blocks, and its computation starts behind them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from quadriga.rollout.native.blocks import BlockPool
from quadriga.rollout.native.prefixes import Beginning, KnownPrefixes
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
        reuses: blocks of those who have gone stay known, and prompts that begin with what they hold take them. What a sample
            wrote is learnt only where the host knows it when the sample leaves, so not with `on_device`: there prompts are.
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
        reuses: bool = True,
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.known = pool.known = KnownPrefixes(block_size) if reuses else None
        self.same_bits = True
        """Whether a token has the same bits however it is computed. Where it has not, only later calls of an episode take what
        is known, and only what an episode may ask for again is kept: single turns do not depend on what was before them."""
        self._era = 0
        self.max_batched_tokens = max_batched_tokens
        self.on_preempt, self.on_device, self.closes_gaps = on_preempt, on_device, closes_gaps and not on_device
        self._changes: list[tuple[int, int, int]] = []
        self.waiting: deque[Prefill] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.preemptions = self.prompt_tokens = self.cached_tokens = 0
        # By slot: block ids, how many there are, how many of the first are shared, and tokens in the cache. Decoding by batched
        # products reads blocks that are not shared in place, each with the one row that owns it. A block may be shared in the
        # tables of those who came later and not in that of the one who computed it: for him it lies where it lies.
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
        # A part is admitted as a whole, so it must be one that an empty engine has room for: the full blocks of the prompt
        # once, and for each sample a block of its own.
        room = min(len(self.tables), self.pool.num_blocks - ids.size // self.block_size)
        self.waiting.extend(Prefill(ids, members[i : i + room]) for i in range(0, len(members), room))

    def schedule(self) -> Batch:
        # Those who run come first: a block that a new prompt took from them would cost a preemption at once.
        self._extend_running()
        chunks: Chunks = []
        for prefill in self.prefilling:
            if self._add_chunk(chunks, prefill):
                self._learn_chunk(prefill, chunks[-1][2])
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
                self._learn_from(sequence)
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

    def forget(self) -> None:
        """The weights change: what was computed so far is of no use for those who come now.

        It begins a new era. Who has blocks of an older one goes on with them, but leaves nothing behind that anybody could find.
        """
        self.pool.forget()
        self._era += 1

    def preempt_all(self) -> None:
        """Every sample that has blocks gives them up and waits to compute its tokens anew, in the order it has now."""
        while self.prefilling or self.running:
            self._preempt_last()

    # ---- parts of schedule -------------------------------------------------------------------------------------------

    def _extend_running(self) -> None:
        """A block for every running sample whose next token needs one."""
        full = self.lengths[self._slots] == self.num_blocks[self._slots] * self.block_size
        for sequence in [self.running[i] for i in np.flatnonzero(full)]:
            # The last to come gives way, which may be this very sample. So the oldest never loses its blocks, and however
            # small the cache is, somebody always gets to the end.
            while sequence.slot >= 0 and not self.pool.num_free:
                self._preempt_last()
            if sequence.slot >= 0:
                self._append(sequence, self.pool.take())

    def _admit(self, chunks: Chunks) -> None:
        reserve = len(self.running) // 8  # a block for some of those who need one soon: fewer preemptions
        computed = {p.ids.tobytes(): p for p in self.prefilling} if self.waiting else {}
        while self.waiting:
            prefill, to_spare = self.waiting[0], reserve if self.running or self.prefilling else 0
            if len(prefill.members) > len(self._free_slots):
                return
            # Who asks for a prompt that is being computed just now joins those who wait for it.
            name = prefill.ids.tobytes()
            twin = computed.get(name) if self.known is not None else None
            if twin is not None and twin.members[0].era == self._era:
                if len(prefill.members) + to_spare > self.pool.num_free:
                    return
                self._join(self.waiting.popleft(), twin)
                continue
            found = self._find(prefill)
            full = prefill.ids.size // self.block_size
            taken = [*found.blocks, *([found.tail] if found.tail is not None else [])]
            of_others = sum(
                self.pool.owners[block] > 0 for block in taken
            )  # kept ones count as free until they are taken
            needed = full + len(prefill.members) - of_others + to_spare
            prefill.done = found.tokens
            # Strictly in order: if small prompts could overtake, a large one might wait for ever.
            if needed > self.pool.num_free or not self._add_chunk(chunks, prefill):
                prefill.done = 0
                return
            self.prefilling.append(self.waiting.popleft())
            self._give_blocks(prefill, found)
            self._learn_chunk(prefill, chunks[-1][2])
            computed[name] = prefill

    def _find(self, prefill: Prefill) -> Beginning:
        """What is known of the prompt and may be taken."""
        if self.known is None or not (self.same_bits or prefill.members[0].request.call):
            return Beginning([], None, 0)
        return self.known.find(prefill.ids)

    def _give_blocks(self, prefill: Prefill, found: Beginning) -> None:
        """Slots for the samples of a prompt, and the blocks that its tokens go to.

        The full blocks of a prompt are never written again, so its samples share them. What does not fill a block goes to a block
        that each sample has to itself, since there it goes on writing.
        """
        full, many = prefill.ids.size // self.block_size, len(prefill.members) > 1
        prompt = [self.pool.share(block) for block in found.blocks]
        # A block can be read in place for one row only. Whoever else has one of these may be that row, so for this one it counts
        # as shared; what nobody else has is its own. Others have the beginning of a chain at least as often as its end.
        shared = full if many else sum(int(self.pool.owners[block]) > 1 for block in prompt)
        tail = found.tail
        if (
            tail is not None
        ):  # it becomes this prompt's own, who goes on writing in it, so it is nobody else's beginning any more
            assert self.known is not None
            self.pool.share(tail)
            self.known.forget(tail)
            if len(prompt) < full:
                prompt.append(tail)
                tail = None
        prompt += [self.pool.take(from_high_end=many) for _ in range(full - len(prompt))]
        for i, sequence in enumerate(prefill.members):
            own = tail if i == 0 and tail is not None else self.pool.take()
            self._seat(sequence, prefill, [self.pool.share(b) for b in prompt] if i else prompt, own, shared)

    def _join(self, late: Prefill, prefill: Prefill) -> None:
        """Let the samples of `late` start from `prefill`, which has the same tokens, is admitted, and is not complete yet."""
        late.done = late.ids.size
        prompt = self.blocks_of(prefill.members[0])[:-1].tolist()
        for sequence in late.members:
            self._seat(sequence, late, [self.pool.share(b) for b in prompt], self.pool.take(), len(prompt))
            prefill.members.append(sequence)

    def _seat(self, sequence: Sequence, prefill: Prefill, prompt: list[int], own: int, shared: int) -> None:
        """Give a sample a slot, and in its table the blocks of the prompt and one of its own."""
        sequence.slot, sequence.era = self._free_slots.pop(), self._era
        if sequence.from_cache is None:
            sequence.from_cache = prefill.done
            self.prompt_tokens += prefill.ids.size
            self.cached_tokens += prefill.done
        self.num_blocks[sequence.slot] = 0
        self.num_shared[sequence.slot] = shared
        self.lengths[sequence.slot] = prefill.ids.size
        for block in prompt:
            self._append(sequence, block)
        self._append(sequence, own)

    def _add_chunk(self, chunks: Chunks, prefill: Prefill) -> bool:
        """Put the next chunk of `prefill` into `chunks` if the pass has room for it."""
        length = min(prefill.ids.size - prefill.done, self.max_batched_tokens)
        # Never a smaller piece to fill the pass: then where a prompt is cut, and so its last bits, would depend on its company.
        if chunks and sum(c[2] for c in chunks) + length > self.max_batched_tokens:
            return False
        chunks.append((prefill, prefill.done, length))
        return True

    def _learn_chunk(self, prefill: Prefill, length: int) -> None:
        """Note which blocks will be full of the prompt after this pass.

        Before the pass has run: in every layer it writes all keys before it reads any, so a prompt of the same pass may already
        begin with them.
        """
        sequence = prefill.members[0]
        if self.known is not None and sequence.era == self._era and self._keeps(sequence):
            done = prefill.done + length
            self.known.learn(prefill.ids[:done], self.blocks_of(sequence).tolist(), with_tail=False)

    def _learn_from(self, sequence: Sequence) -> None:
        """Note what a running sample leaves behind, its last block too, though it is not full."""
        if self.known is None or self.on_device or sequence.era != self._era or not self._keeps(sequence):
            return
        ids = sequence.ids(int(self.lengths[sequence.slot]))
        self.known.learn(ids, self.blocks_of(sequence).tolist(), with_tail=True)

    def _keeps(self, sequence: Sequence) -> bool:
        return self.same_bits or sequence.request.affinity is not None

    def _close_gaps(self) -> list[tuple[int, int]]:
        """Move blocks down when over a fifth of the range that decoding reads belongs to nobody; `(from, to)` of each.

        Decoding by batched products reads the cache from block 0 to the highest block of a running sample, in one run and
        without gathering. Samples that end leave gaps in it, which are multiplied like the rest and thrown away. Copying a block
        costs about as much as reading it a few times, so it is worth it when the gaps are many, and then from the top: the
        highest blocks go to the lowest gaps, which shortens the range with the fewest copies. A gap may be a block that is kept
        for what it holds: it changes places with the one that moves.
        """
        tables, column = self.tables[self._slots], np.arange(self.tables.shape[1])
        own = (column >= self.num_shared[self._slots, None]) & (column < self.num_blocks[self._slots, None])
        own &= self.pool.owners[tables] == 1  # others may have come to share it since: their tables name it too
        blocks = np.sort(tables[own])[::-1]
        if not blocks.size or blocks[0] + 1 <= 1.25 * blocks.size + 8:
            return []
        gaps = np.flatnonzero(self.pool.owners[: blocks[0]] == 0)
        count = min(gaps.size, blocks.size)
        moves = [(int(a), int(b)) for a, b in zip(blocks[:count], gaps[:count]) if b < a]
        if not moves:
            return []
        copies = self.pool.move(moves)
        moved = np.arange(self.pool.num_blocks)
        moved[[a for a, _ in moves]] = [b for _, b in moves]
        self.tables[self._slots] = moved[tables]  # only blocks of one owner have moved: no other table names them
        return copies

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
        self.pool.release(self.blocks_of(sequence)[::-1].tolist())  # see BlockPool: the first must be given up last
        self.num_blocks[sequence.slot] = 0
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _preempt_last(self) -> None:
        self.preemptions += 1
        if self.prefilling:  # has not begun to sample: the least to compute again
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
