"""What blocks of the cache hold, found by their tokens.

The key of a token depends on all tokens before it. So a block is known by its own tokens *and* by the block before it: a chain
from the first block of a sequence to its last, and all chains together are a tree. A link is an entry of one dictionary,
`(node of the block before, tokens of this block) → node`, compared token by token: no two contents are ever taken for one.

The last block of a chain may hold fewer tokens than a block has places. It is a *tail*: whoever takes it goes on writing behind
them, so it can have one owner only, while full blocks are never written again and may have many.

Nodes have numbers that are never used again. When a block is given up, its children stay in the dictionary, but nobody finds
them any more; they are the next to be given up (see `BlockPool`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROOT = 0
_BYTES = np.dtype(np.int64).itemsize


class Beginning(NamedTuple):
    """The longest known beginning of some tokens."""

    blocks: list[int]
    """Full blocks, in order."""
    tail: int | None
    """The block of the tokens that follow them, if it is known."""
    tokens: int
    """Tokens in all of these."""


class KnownPrefixes:
    """The tree. It names blocks and knows nothing of their owners.

    Args:
        block_size: tokens of a full block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size * _BYTES
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._blocks: dict[int, int] = {}
        self._names: dict[int, tuple[int, bytes]] = {}
        """Block → its key in `_nodes`."""
        self._tails: dict[int, dict[int, int]] = {}
        """Node → bytes of a tail behind it → how many there are of that length."""
        self._next = ROOT + 1

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)

    def find(self, ids: np.ndarray) -> Beginning:
        """The longest known beginning of `ids`, but never all of them: somebody must compute the last for its logits."""
        data, node, blocks, at = ids.tobytes(), ROOT, [], 0
        end = len(data) - _BYTES
        while at + self._size <= end and (child := self._nodes.get((node, data[at : at + self._size]))) is not None:
            node, at = child, at + self._size
            blocks.append(self._blocks[node])
        for length in sorted(self._tails.get(node, ()), reverse=True):
            if at + length <= end and (child := self._nodes.get((node, data[at : at + length]))) is not None:
                return Beginning(blocks, self._blocks[child], (at + length) // _BYTES)
        return Beginning(blocks, None, at // _BYTES)

    def learn(self, ids: np.ndarray, blocks: list[int], with_tail: bool) -> None:
        """Note that `blocks` hold `ids`. What is known already keeps the block that it has; this one's stay unknown."""
        data, node = ids.tobytes(), ROOT
        for i, at in enumerate(range(0, len(data), self._size)):
            name = (node, data[at : at + self._size])
            if len(name[1]) < self._size and not with_tail:
                return
            known = self._nodes.get(name)
            if known is None:
                if blocks[i] in self._names:
                    self.forget(blocks[i])  # known behind another copy of the block before it, which has been given up
                known = self._add(name, blocks[i])
            node = known

    def forget(self, block: int) -> None:
        """The block will hold something else."""
        name = self._names.pop(block)
        del self._blocks[self._nodes.pop(name)]
        parent, length = name[0], len(name[1])
        if length < self._size:
            lengths = self._tails[parent]
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self._tails[parent]

    def rename(self, moved: dict[int, int]) -> None:
        """What block `a` held is in block `moved[a]` now, for all at once."""
        names = {moved[block]: self._names.pop(block) for block in moved if block in self._names}
        self._names |= names
        for block, name in names.items():
            self._blocks[self._nodes[name]] = block

    def clear(self) -> None:
        """Nothing is known any more."""
        for table in (self._nodes, self._blocks, self._names, self._tails):
            table.clear()

    def _add(self, name: tuple[int, bytes], block: int) -> int:
        node, self._next = self._next, self._next + 1
        self._nodes[name], self._blocks[node], self._names[block] = node, block, name
        if len(name[1]) < self._size:
            lengths = self._tails.setdefault(name[0], {})
            lengths[len(name[1])] = lengths.get(len(name[1]), 0) + 1
        return node
