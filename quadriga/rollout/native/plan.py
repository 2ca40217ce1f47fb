"""What one pass through the model computes, as index tensors that are the same for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quadriga.rollout.native.kv_cache import CacheShape, KVCache

_MIN_ROWS, _ROWS = 16, 4


def padded(rows: int) -> int:
    """Rows of a pass, or of logits, with padding: from there on a matrix product gives a row the same bits whatever
    rows are beside it (tests/rollout/test_invariance.py)."""
    return max(_MIN_ROWS, -(-rows // _ROWS) * _ROWS)


WIDE_GROUP = 4
"""The same for the batched products of attention: with at least this many query heads to a key head, all samples of a
prompt are multiplied with its keys at once; with fewer one sample after the other, in the very product that a sample
alone would use."""
MASKED = -1e30
"""Score of a key that must not be seen; finite, so that a block with no visible key does no harm."""


@dataclass(eq=False)
class DecodeIndex:
    """Where the decoding rows find their keys. It changes only when blocks change hands.

    Rows have different numbers of keys. One product over all of them would pad every row to the longest, and one product a row
    would be many small ones. So the unit is the block: all blocks have one shape, and scores and weighted values of all of
    them are one batched product each, however the blocks are spread over rows.

    Private blocks are read in place: the first `num_private` blocks of the cache, each with the row that owns it
    (blocks of nobody are computed and ignored). Shared blocks are gathered, each with the rows of all its owners.
    A *part* is one (block, query head, owner); `parts` lists, for every row and head, its parts in order of position.
    The sums, maxima and weighted values of parts are kept in memory of the index, one layer after the other.
    """

    num_private: int
    private_row: Tensor
    """`[num_private]`"""
    private_first: Tensor
    """`[num_private]` position of the block's first token"""
    last_block: Tensor
    """`[B]` the block that the row's new token goes to"""
    shared_blocks: Tensor
    """`[S]`"""
    shared_rows: Tensor
    """`[O / W, S, W]` rows of the owners, padded with row 0; W owners are multiplied at once"""
    shared_first: Tensor
    """`[S]`"""
    parts: Tensor
    """`[B * heads, N]` indices of parts, padded with the last one, which always weighs nothing"""
    num_private_parts: int
    group: int
    """Query heads that read the same key and value head"""
    scores: Tensor
    """`[parts - 1, block]`"""
    maxima: Tensor
    """`[parts]`"""
    sums: Tensor
    """`[parts]`"""
    weighted: Tensor
    """`[parts, D]`"""


@dataclass(eq=False)
class DecodeTables:
    """Where the decoding rows find their keys, for the kernel that reads the cache through block tables."""

    blocks: Tensor
    """`[B, W]`"""
    longest: int
    """Most tokens of a row"""


@dataclass(eq=False)
class Chunk:
    """A piece of a prompt in this pass: tokens `start … start + length` of it, the whole of it being `blocks`."""

    start: int
    length: int
    blocks: Tensor


@dataclass(eq=False)
class StepPlan:
    """One pass: first the decoding rows, one token each, then the chunks of prompts, then padding."""

    cache: KVCache
    input_ids: Tensor
    """`[1, T]`"""
    position_ids: Tensor
    """`[1, T]`"""
    write_blocks: Tensor
    """`[num_tokens]` blocks that the keys of the tokens go to, and their places in these"""
    write_places: Tensor
    num_decode: int
    num_tokens: int
    chunks: list[Chunk]
    decode: DecodeIndex | DecodeTables | None
    decode_positions: Tensor
    """`[num_decode]`"""
    logit_rows: Tensor
    """Rows whose logits are wanted, see `padded`"""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that decoding was asked for; None: no window"""
    masks: dict[int | None, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """By sliding window: scores to add for private `[num_private, 1, block]` and shared `[O / W, S, 1, W, 1, block]` keys"""

    def mask(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        self.windows.add(window)
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        index, size = self.decode, self.cache.shape.block_size
        assert isinstance(index, DecodeIndex)
        within = torch.arange(size, device=self.input_ids.device)
        dtype = self.cache.shape.dtype
        if window is None:
            # Every block but a row's last is full of keys that come before its token: only the last one hides anything, and
            # blocks of a shared prompt hide nothing.
            private = torch.zeros(index.num_private, size, dtype=dtype, device=within.device)
            hidden = within > (self.decode_positions % size)[:, None]
            private.index_copy_(0, index.last_block, hidden.to(dtype) * MASKED)
            return private[:, None, :], None
        position = self.decode_positions.index_select(0, index.private_row)[:, None]
        key = index.private_first[:, None] + within
        private = ((key > position) | (key <= position - window)).to(dtype) * MASKED
        position = self.decode_positions[index.shared_rows][..., None]
        key = (index.shared_first[:, None] + within)[:, None, :]
        shared = (key <= position - window).to(dtype) * MASKED
        return private[:, None, :], shared[:, :, None, :, None, :]


def decode_index(shape: CacheShape, tables: np.ndarray, num_blocks: np.ndarray, num_shared: np.ndarray) -> DecodeIndex:
    """Index of decoding rows with block `tables[B, W]`, of which `num_blocks[B]` count, `num_shared[B]` of them shared."""
    rows, columns = tables.shape
    column = np.arange(columns)
    shared = column < num_shared[:, None]
    private = (column < num_blocks[:, None]) & ~shared
    row_of = np.broadcast_to(np.arange(rows)[:, None], tables.shape)
    column_of = np.broadcast_to(column, tables.shape)

    # The pool hands out private blocks from the low end, so the range from 0 to the highest of them is mostly theirs and is
    # read as one slice of the cache. Blocks in it that are no decoding row's are computed for row 0, and no part refers to them.
    ids = tables[private]
    num_private = int(ids.max()) + 1
    private_row, private_first = np.zeros(num_private, np.int64), np.zeros(num_private, np.int64)
    private_row[ids], private_first[ids] = row_of[private], column_of[private] * shape.block_size

    # A shared block is gathered once and meets the queries of all its owners: `at_once` of them in one product, see WIDE_GROUP.
    shared_blocks, block_of, owner_of = _owners(tables[shared])
    owners = int(owner_of.max()) + 1 if owner_of.size else 0
    at_once = owners if shape.group >= WIDE_GROUP else 1
    turn, place = np.divmod(owner_of, max(1, at_once))
    shared_rows = np.zeros((owners // max(1, at_once), shared_blocks.size, at_once), np.int64)
    shared_first = np.zeros(shared_blocks.size, np.int64)
    shared_rows[turn, block_of, place] = row_of[shared]
    shared_first[block_of] = column_of[shared] * shape.block_size

    # Parts are numbered as the products of attention lay them out: [private, kv, group], then [O / W, S, kv, W, group].
    kv, member = np.divmod(np.arange(shape.heads), shape.group)
    first_shared = num_private * shape.heads
    num_parts = first_shared + shared_rows.size * shape.heads + 1
    parts = np.full((rows, columns, shape.heads), num_parts - 1, np.int64)
    parts[private] = ids[:, None] * shape.heads + np.arange(shape.heads)
    product = ((turn * shared_blocks.size + block_of)[:, None] * shape.kv_heads + kv) * at_once + place[:, None]
    parts[shared] = first_shared + product * shape.group + member

    last = np.take_along_axis(tables, num_blocks[:, None] - 1, axis=1).squeeze(1)
    put = lambda x: torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)).to(shape.device)  # noqa: E731
    return DecodeIndex(
        num_private=num_private,
        private_row=put(private_row),
        private_first=put(private_first),
        last_block=put(last),
        shared_blocks=put(shared_blocks),
        shared_rows=put(shared_rows),
        shared_first=put(shared_first),
        parts=put(parts.transpose(0, 2, 1).reshape(rows * shape.heads, columns)),
        num_private_parts=first_shared,
        group=shape.group,
        scores=torch.zeros(num_parts - 1, shape.block_size, dtype=shape.dtype, device=shape.device),
        maxima=torch.full((num_parts,), MASKED, dtype=shape.dtype, device=shape.device),
        sums=torch.zeros(num_parts, dtype=shape.dtype, device=shape.device),
        weighted=torch.zeros(num_parts, shape.head_dim, dtype=shape.dtype, device=shape.device),
    )


def _owners(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For block ids with repetitions: the distinct ones, and for each entry which of them it is and how many entries before it
    name the same block: its owner's number."""
    distinct, block_of, count = np.unique(blocks, return_inverse=True, return_counts=True)
    order = np.argsort(block_of, kind="stable")
    first = np.cumsum(count) - count
    owner_of = np.empty_like(block_of)
    owner_of[order] = np.arange(blocks.size) - np.repeat(first, count)
    return distinct, block_of, owner_of
