"""Which block of the cache belongs to whom. Host-side only: no tensors here.

A block is in one of three states: *owned* by one or more samples; *kept*, owned by nobody, but known by what it holds
(`KnownPrefixes`), so that a later prompt with the same beginning can take it; or *empty*. Kept blocks count as free: they are
given up, the one that was let go first before the others, as soon as there is no empty one. So what is kept never costs anybody
a block, let alone a preemption.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from quadriga.rollout.native.prefixes import KnownPrefixes


class BlockPool:
    """Counts the owners of `num_blocks` blocks.

    Blocks of one owner are taken from the low end and blocks to be shared from the high end, so that the former stay
    together: attention then reads them where they lie.

    Args:
        known: what blocks hold; None: nothing is kept.
    """

    def __init__(self, num_blocks: int, known: KnownPrefixes | None = None) -> None:
        self.num_blocks, self.known = num_blocks, known
        self.owners = np.zeros(num_blocks, dtype=np.int32)
        self.changes = 0
        """Grows whenever a block changes hands; whoever caches something made from block ids compares it."""
        # Every empty block is in both heaps. One that is taken through the one stays in the other, because finding it there
        # would cost a search; `take` passes over it, and when it is empty again it counts again without being put in twice.
        self._low, self._in_low = list(range(num_blocks)), [True] * num_blocks
        self._high, self._in_high = [-b for b in reversed(range(num_blocks))], [True] * num_blocks
        self._empty = num_blocks
        # The one that was let go first comes first. A sequence lets its blocks go from the last to the first: nobody finds a
        # block without the ones before it, so these must be the last to be given up.
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: those that are empty and those that are kept."""
        return self._empty + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self, from_high_end: bool = False) -> int:
        """A free block, now with one owner. The caller has checked `num_free`."""
        if not self._empty and self.known is not None:
            oldest, _ = self._kept.popitem(last=False)
            self.known.forget(oldest)
            self._put_back(oldest)
        heap, listed = (self._high, self._in_high) if from_high_end else (self._low, self._in_low)
        while True:
            block = abs(heapq.heappop(heap))
            listed[block] = False
            if self.owners[block] == 0 and block not in self._kept:
                break
        self.owners[block] = 1
        self._empty -= 1
        self.changes += 1
        return block

    def share(self, block: int) -> int:
        """One more owner for `block`, which is owned or kept."""
        if self.owners[block] == 0:
            del self._kept[block]
        self.owners[block] += 1
        self.changes += 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each of `blocks`, in this order; those without owners are kept if they are known, else empty."""
        for block in blocks:
            self.owners[block] -= 1
            if self.owners[block] == 0:
                if self.known is not None and block in self.known:
                    self._kept[block] = None
                else:
                    self._put_back(block)
        self.changes += 1

    def forget(self) -> None:
        """Nothing that any block holds is worth finding any more: kept blocks are empty, owned ones keep their owners."""
        if self.known is not None:
            self.known.clear()
            for block in self._kept:
                self._put_back(block)
            self._kept.clear()

    def move(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Give the owners of each source the free block `target` instead; returns what must be copied, all at once.

        A kept target changes places with its source, so that what it holds stays known.
        """
        copies = list(pairs)
        for source, target in pairs:
            self.owners[target], self.owners[source] = self.owners[source], 0
            if target in self._kept:
                copies.append((target, source))
            else:
                self._empty -= 1
                self._put_back(source)
        moved = dict(copies)
        if len(copies) > len(pairs):
            self._kept = OrderedDict((moved.get(block, block), None) for block in self._kept)
        if self.known is not None:
            self.known.rename(moved)
        self.changes += 1
        return copies

    def _put_back(self, block: int) -> None:
        for heap, listed, entry in ((self._low, self._in_low, block), (self._high, self._in_high, -block)):
            if not listed[block]:
                heapq.heappush(heap, entry)
                listed[block] = True
        self._empty += 1
