"""The memory of keys and values, in blocks of `block_size` tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.models.kernels.cpu.library import kernels
from quadriga.models.kernels.cpu.operations import fits, pointers


@dataclass(frozen=True)
class CacheShape:
    """Geometry of a model's cache; the same for every layer."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize

    @property
    def group(self) -> int:
        """Query heads that read the same key and value head."""
        return self.heads // self.kv_heads


class KVCache:
    """Keys and values of all layers: `keys[layer]` and `values[layer]` are `[blocks, kv_heads, block_size, head_dim]`.

    Allocated once and never grown. Zeros, because what was never written is multiplied by a weight of 0; on Linux
    a block that was never written takes no memory.
    """

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        self.shape = shape
        size = (num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        self.keys, self.values = (
            [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.layers)] for _ in range(2)
        )
        self.by_kernel = fits(self.keys[0])
        """Whether the kernels for CPUs can read and write it."""

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Put `key` and `value` `[T, kv_heads, head_dim]` at `rows` `[T * kv_heads]`, see `row_index`."""
        if self.by_kernel and key.stride(2) == value.stride(2) == 1:
            for x, pool in ((key, self.keys[layer]), (value, self.values[layer])):
                kernels().write_cache(*pointers(x, rows), *x.shape, *x.stride()[:2], pool.data_ptr())
            return
        width = self.shape.head_dim
        self.keys[layer].view(-1, width).index_copy_(0, rows, key.reshape(-1, width))
        self.values[layer].view(-1, width).index_copy_(0, rows, value.reshape(-1, width))

    def row_index(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Rows of `write` for tokens at `offsets[T]` of `blocks[T]`."""
        heads = torch.arange(self.shape.kv_heads, device=blocks.device)
        rows = (blocks[:, None] * self.shape.kv_heads + heads) * self.shape.block_size + offsets[:, None]
        return rows.flatten()

    def read(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of a sequence that has `blocks`: `[kv_heads, length, head_dim]` each."""
        pair = (pool[layer].index_select(0, blocks) for pool in (self.keys, self.values))
        key, value = (x.transpose(0, 1).flatten(1, 2)[:, :length] for x in pair)
        return key, value

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy block to block, for all `(source, target)` at once, in every layer."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.shape.device).unbind(1)
            for pool in (*self.keys, *self.values):
                pool.index_copy_(0, target, pool.index_select(0, source))
