"""Paged attention for one new token a row, and the writing of new keys and values.

A program handles the query heads of one key head of one row, over a share of the row's tokens (split-KV); a second kernel
puts the shares together. The cache is found through `anchor` and `offset`, see `CudaKVCache`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quadriga.models.kernels.attention import KEY_TILE, attend_tile, attended
from quadriga.rollout.native.kv_cache import CudaKVCache

MAX_SPLITS = 64


def write_cache(cache: CudaKVCache, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Put `key` and `value` `[T, kv_heads, D]` at `places[T]` (block · block_size + offset; −1: nowhere)."""
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    shape = cache.shape
    _write_kernel[(key.shape[0],)](
        key,
        value,
        places,
        cache.anchor,
        cache.offset,
        2 * layer * cache.half_layer,
        cache.half_layer,
        *key.stride()[:2],
        *value.stride()[:2],
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_SIZE=shape.block_size,
        HEADS_PAD=triton.next_power_of_2(shape.kv_heads),
        DIM_PAD=triton.next_power_of_2(shape.head_dim),
        num_warps=1,
    )


def decode_attention(
    cache: CudaKVCache,
    layer: int,
    query: Tensor,
    slots: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    splits: int,
) -> Tensor:
    """`query[B, heads, D]` over all tokens of each row, the new one (already written) included; `[B, heads, D]`.

    Args:
        slots: `[B]` the rows' places in `tables` and `lengths`; −1: padding, whose result is 0.
        tables: `[slots, W]` int32 block ids.
        lengths: `[slots]` tokens in the cache before the new one.
        splits: shares into which each row's tokens are cut, a power of two.
    """
    shape, rows = cache.shape, query.shape[0]
    query = query.contiguous()
    out = torch.empty_like(query)
    parts, sums = out, out  # not used with one split
    if splits > 1:
        parts = torch.empty(rows, shape.heads, splits, shape.head_dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(rows, shape.heads, splits, dtype=torch.float32, device=query.device)
    dim_pad = max(16, triton.next_power_of_2(shape.head_dim))
    _decode_kernel[(rows, shape.kv_heads, splits)](
        query,
        out,
        parts,
        sums,
        cache.anchor,
        cache.offset,
        slots,
        tables,
        lengths,
        2 * layer * cache.half_layer,
        cache.half_layer,
        tables.stride(0),
        scaling,
        0.0 if softcap is None else softcap,
        0 if window is None else window,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        BLOCK_SIZE=shape.block_size,
        SPLITS=splits,
        CAPPED=softcap is not None,
        WINDOWED=window is not None,
        EXACT="ieee" if query.dtype == torch.float32 else "tf32",
        GROUP_PAD=max(16, triton.next_power_of_2(shape.group)),  # the least that a matrix instruction takes
        DIM_PAD=dim_pad,
        TILE=KEY_TILE,
        num_warps=2 if dim_pad <= 64 else 4,
        num_stages=1 if query.dtype == torch.float32 else 3 if dim_pad <= 128 else 2,
    )
    if splits > 1:
        _merge_kernel[(rows * shape.heads,)](
            parts, sums, out, HEAD_DIM=shape.head_dim, DIM_PAD=dim_pad, SPLITS=splits, num_warps=1
        )
    return out


def splits_for(rows: int, kv_heads: int, max_tokens: int, processors: int) -> int:
    """How often to cut each row so that `rows · kv_heads` programs keep the chip's `processors` busy.

    Four programs a processor, since one alone waits for memory most of the time; no share of less than a tile of 64 tokens.
    """
    wanted = 4 * processors / (rows * kv_heads)
    splits = 1
    while splits < wanted and splits < MAX_SPLITS and splits * 64 < max_tokens:
        splits *= 2
    return splits


@triton.jit
def _write_kernel(key, value, places, anchor, offset, layer_start: tl.int64, half_layer: tl.int64, key_token, key_head,
                  value_token, value_head,
                  KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                  HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    if place >= 0:
        head, column = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
        inside = (head < KV_HEADS) & (column < HEAD_DIM)
        new_key = tl.load(key + token * key_token + head * key_head + column, mask=inside)
        new_value = tl.load(value + token * value_token + head * value_head + column, mask=inside)
        row = ((place // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + place % BLOCK_SIZE
        target = anchor + (tl.load(offset) + layer_start) + row * HEAD_DIM + column
        tl.store(target, new_key, mask=inside)
        tl.store(target + half_layer, new_value, mask=inside)


@triton.jit
def _decode_kernel(query, out, parts, sums, anchor, offset, slots, tables, lengths, layer_start: tl.int64,
                   half_layer: tl.int64, table_width, scaling, softcap, window,
                   HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
                   EXACT: tl.constexpr, GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    # Padding has 0 tokens: the loop below does not run, and nothing weighs anything.
    count = tl.load(lengths + slot, mask=slot >= 0, other=-1).to(tl.int32) + 1
    first = 0
    if WINDOWED:  # tiles begin where they begin in training: at multiples of their size
        first = tl.maximum(count - window, 0) // TILE * TILE
    share = tl.cdiv(tl.cdiv(count - first, TILE), SPLITS) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, count)

    member, column, within = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD), tl.arange(0, TILE)
    head = kv_head * GROUP + member
    q_inside = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    q_at = (row * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(query + q_at, mask=q_inside, other=0.0)
    keys = anchor + tl.multiple_of(tl.load(offset) + layer_start, 16)
    values = keys + tl.multiple_of(half_layer, 16)
    table = tables + slot.to(tl.int64) * table_width

    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD, 16], tl.float32)
    weighted = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(begin, end, TILE):
        token = start + within
        inside_row = token < end
        block = tl.load(table + token // BLOCK_SIZE, mask=inside_row, other=0).to(tl.int64)
        line = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM
        at = line[:, None] + column[None, :]
        inside = inside_row[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(keys + at, mask=inside, other=0.0)
        value = tl.load(values + at, mask=inside, other=0.0)
        visible = inside_row
        if WINDOWED:
            visible = visible & (token >= count - window)
        visible = visible[None, :] & (member >= 0)[:, None]
        highest, total, weighted = attend_tile(
            q, key, value, visible, highest, total, weighted, scaling, softcap, CAPPED, EXACT, TILE
        )
    result, whole = attended(total, weighted)
    if SPLITS == 1:
        tl.store(out + q_at, result.to(out.dtype.element_ty), mask=q_inside)
    else:
        place = (row * HEADS + head) * SPLITS + split
        log_sum = highest + tl.log2(whole)  # −inf where the share is empty
        tl.store(sums + place, log_sum, mask=member < GROUP)
        tl.store(parts + place[:, None] * HEAD_DIM + column[None, :], result, mask=q_inside)


@triton.jit
def _merge_kernel(parts, sums, out, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr):
    line = tl.program_id(0)
    split, column = tl.arange(0, SPLITS), tl.arange(0, DIM_PAD)
    log_sum = tl.load(sums + line * SPLITS + split)
    highest = tl.max(log_sum)
    weight = tl.where(log_sum == float("-inf"), 0.0, tl.exp2(log_sum - highest))
    whole = tl.sum(weight)
    at = (line * SPLITS + split)[:, None] * HEAD_DIM + column[None, :]
    inside = (weight > 0)[:, None] & (column < HEAD_DIM)[None, :]
    part = tl.load(parts + at, mask=inside, other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + line * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)
