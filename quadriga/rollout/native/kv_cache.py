"""The memory of keys and values, in blocks of `block_size` tokens."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.models.kernels.cpu.library import COLUMNS, Cache, huge_zeros, kernels
from quadriga.models.kernels.cpu.operations import pointers


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

    @functools.cached_property
    def by_kernel(self) -> bool:
        """Whether the kernels for CPUs read and write it."""
        return self.device.type == "cpu" and self.dtype == torch.float32 and kernels() is not None

    @property
    def group(self) -> int:
        """Query heads that read the same key and value head."""
        return self.heads // self.kv_heads


class KVCache:
    """Keys and values of all layers: `keys[layer]` and `values[layer]` are `[blocks, kv_heads, block_size, head_dim]`.

    Where the kernels for CPUs read them, a block's keys are `[kv_heads, head_dim, block_size]` instead, with room for a
    multiple of the kernels' vectors: neighbouring keys are neighbours in memory, so one vector instruction adds a
    dimension's share to the scores of many keys, and no sum runs across a vector.

    Allocated once and never grown. Zeros, because what was never written is multiplied by a weight of 0.
    """

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        self.shape = shape
        blocks, size, width = (num_blocks, shape.kv_heads), shape.block_size, shape.head_dim
        if shape.by_kernel:
            columns = -(-size // COLUMNS) * COLUMNS
            self.keys = list(huge_zeros(shape.layers, *blocks, width, columns))
            self.values = list(huge_zeros(shape.layers, *blocks, size, width))
            geometry = shape.kv_heads, width, size, columns
            self.structures = [Cache(*pointers(*pair), *geometry) for pair in zip(self.keys, self.values, strict=True)]
        else:
            zeros = lambda: torch.zeros(*blocks, size, width, dtype=shape.dtype, device=shape.device)  # noqa: E731
            self.keys, self.values = ([zeros() for _ in range(shape.layers)] for _ in range(2))

    def write(self, layer: int, key: Tensor, value: Tensor, blocks: Tensor, places: Tensor) -> None:
        """Put `key` and `value` `[T, kv_heads, head_dim]` at `places[T]` of `blocks[T]`."""
        if self.shape.by_kernel:
            key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
            strides = *key.stride()[:2], *value.stride()[:2]
            cache = ctypes.byref(self.structures[layer])
            kernels().write_cache(cache, *pointers(key, value, blocks, places), len(key), *strides)
            return
        for pool, x in ((self.keys[layer], key), (self.values[layer], value)):
            pool[blocks, :, places] = x

    def read(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of a sequence that has `blocks`: `[kv_heads, length, head_dim]` each."""
        key, value = (pool[layer].index_select(0, blocks) for pool in (self.keys, self.values))
        if self.shape.by_kernel:
            key = key[..., : self.shape.block_size].transpose(2, 3)
        key, value = (x.transpose(0, 1).flatten(1, 2)[:, :length] for x in (key, value))
        return key, value

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy block to block, for all `(source, target)` at once, in every layer."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.shape.device).unbind(1)
            for pool in (*self.keys, *self.values):
                pool.index_copy_(0, target, pool.index_select(0, source))


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
