"""Keys and values of all layers in one CUDA allocation, which can be given back and taken anew between two replays."""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.rollout.native.kv_cache import CacheShape, KVCache


class CudaKVCache(KVCache):
    """`memory` is `[layers, 2, blocks, kv_heads, block_size, head_dim]`; kernels find it through `anchor` and `offset`.

    A captured graph keeps the addresses it was captured with. So kernels are given the address of `anchor`, which stays,
    and read from `offset` where the cache lies from there: after `release` and `allocate` old graphs find the new cache.
    """

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        self.shape, self.num_blocks = shape, num_blocks
        self.anchor = torch.zeros(64, dtype=shape.dtype, device=shape.device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=shape.device)
        self.memory: Tensor | None = None
        self.keys, self.values = [], []
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; what is in it is undefined."""
        shape = self.shape
        size = (shape.layers, 2, self.num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        self.memory = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.keys, self.values = list(self.memory[:, 0].unbind(0)), list(self.memory[:, 1].unbind(0))
        self.offset.fill_((self.memory.data_ptr() - self.anchor.data_ptr()) // shape.dtype.itemsize)

    def release(self) -> None:
        """Give the memory back."""
        self.memory = None
        self.keys, self.values = [], []

    @property
    def half_layer(self) -> int:
        """Elements of the keys, or of the values, of one layer."""
        shape = self.shape
        return self.num_blocks * shape.kv_heads * shape.block_size * shape.head_dim

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy block to block, for all `(source, target)` at once, in every layer."""
        if pairs and self.memory is not None:
            source, target = torch.tensor(pairs).to(self.shape.device, non_blocking=True).unbind(1)
            for layer in self.memory:  # layer by layer: the copies of all at once could take gigabytes
                layer.index_copy_(1, target, layer.index_select(1, source))
