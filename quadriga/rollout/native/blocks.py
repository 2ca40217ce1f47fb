"""Which block of the cache belongs to whom. Host-side only: no tensors here."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np


class BlockPool:
    """Counts the owners of `num_blocks` blocks.

    Blocks of one owner are taken from the low end and blocks to be shared from the high end, so that the former stay
    together: attention then reads them where they lie.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners = np.zeros(num_blocks, dtype=np.int32)
        self.changes = 0
        """Grows whenever a block changes hands; whoever caches something made from block ids compares it."""
        self._low = list(range(num_blocks))
        self._high = [-b for b in reversed(range(num_blocks))]
        self._free = num_blocks

    @property
    def num_free(self) -> int:
        return self._free

    def take(self, from_high_end: bool = False) -> int:
        """A free block, now with one owner. The caller has checked `num_free`."""
        heap = self._high if from_high_end else self._low
        while True:  # a block in both heaps may have been taken through the other one
            block = abs(heapq.heappop(heap))
            if self.owners[block] == 0:
                break
        self.owners[block] = 1
        self._free -= 1
        self.changes += 1
        return block

    def share(self, block: int) -> int:
        """One more owner for `block`."""
        self.owners[block] += 1
        self.changes += 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each of `blocks`; those without owners are free again."""
        for block in blocks:
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self._put_back(block)
        self.changes += 1

    def move(self, source: int, target: int) -> None:
        """Give the owners of `source` the free block `target` instead."""
        self.owners[target], self.owners[source] = self.owners[source], 0
        self._free -= 1
        self._put_back(source)
        self.changes += 1

    def _put_back(self, block: int) -> None:
        heapq.heappush(self._low, block)
        heapq.heappush(self._high, -block)
        self._free += 1
