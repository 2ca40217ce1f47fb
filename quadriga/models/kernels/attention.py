"""Causal attention over segments of a packed stream, forward and backward, by kernels with one order of summation.

The keys of a segment are taken in tiles of `KEY_TILE`, counted from the segment's first key, one after the other, and
each step is `attend_tile`. Decoding over the paged cache (`quadriga.rollout.native.cuda.attention_kernels`) takes the same
tiles by the same steps, and a matrix instruction does not care what else is in its tile: so a query gets the same bits
while it is generated and while it is trained. The backward pass adds nothing by atomics: it is equal from run to run.

Sliding windows and capped scores (Gemma 2) are computed here too, which varlen flash attention does not offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

KEY_TILE = 64
"""Keys of a step."""


class Segments(NamedTuple):
    """Where segments of queries and of the keys they see lie, and the tiles that they are cut into.

    query_bounds, key_bounds: `[segments + 1]` int32.
    query_tiles, key_tiles: `[tiles, 2]` int32: segment and first token in it, those with the most work first.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    query_tiles: Tensor
    key_tiles: Tensor

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Segments:
        """Of segments with so many queries and keys each; a segment's last query sees all of its keys."""
        lengths, contexts = np.asarray(queries, np.int64), np.asarray(keys, np.int64)
        numbers = [
            np.concatenate([[0], lengths.cumsum()])[:, None],
            np.concatenate([[0], contexts.cumsum()])[:, None],
            _tiles(lengths, QUERY_TILE, lambda segment, start: -start - (contexts - lengths)[segment]),
            _tiles(contexts, KEY_TILE, lambda segment, start: start - contexts[segment]),
        ]
        # One transfer for all.
        sizes = [n.size for n in numbers]
        flat = torch.from_numpy(np.concatenate([n.ravel() for n in numbers]).astype(np.int32))
        if device.type == "cuda":
            flat = flat.pin_memory()
        bounds, key_bounds, tiles, key_tiles = flat.to(device, non_blocking=True).split(sizes)
        return cls(bounds, key_bounds, tiles.view(-1, 2), key_tiles.view(-1, 2))


_COUNTS = ["tokens"]
"""Numbers that differ from call to call: one kernel serves all, instead of one more for those divisible by 16."""
QUERY_TILE = 128
"""Queries of a program, forward and in the gradient of the queries."""


def _tiles(lengths: np.ndarray, size: int, order: Any) -> np.ndarray:
    """`[tiles, 2]` segment and start of the tiles of `size`, sorted by `order(segment, start)`."""
    counts = -(-lengths // size)
    segment = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * size
    return np.stack([segment, start], 1)[np.argsort(order(segment, start), kind="stable")]


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`query[T, heads, D]` over `key` and `value` `[S, kv_heads, D]`; `[T, heads, D]`. Differentiable.

    Args:
        window: a token sees this many, itself included.
        softcap: scores become softcap · tanh(score / softcap).
    """
    return _Attention.apply(query, key, value, segments, scaling, window, softcap)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        heads = query.shape[1]
        out = torch.empty_like(query)
        sums = torch.empty(heads, query.shape[0], dtype=torch.float32, device=query.device)
        settings = _settings(query, key, window, softcap)
        _forward_kernel[(len(segments.query_tiles), heads)](
            query,
            key,
            value,
            out,
            sums,
            *segments[:3],
            query.shape[0],
            scaling,
            softcap or 0.0,
            window or 0,
            QUERIES=QUERY_TILE,
            KEYS=KEY_TILE,
            **settings,
            num_warps=8 if settings["DIM_PAD"] >= 128 else 4,
            num_stages=3 if settings["DIM_PAD"] <= 64 else 2,
        )
        ctx.save_for_backward(query, key, value, out, sums, *segments)
        ctx.options = scaling, window, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, *rest = ctx.saved_tensors
        segments = Segments(*rest)
        scaling, window, softcap = ctx.options
        grad = grads[0].contiguous()
        tokens, heads, dim = query.shape
        settings = _settings(query, key, window, softcap)
        scalars = tokens, scaling, softcap or 0.0, window or 0
        dots = torch.empty_like(sums)
        _dots_kernel[(tokens,)](
            grad, out, dots, tokens, HEADS=heads, HEAD_DIM=dim, HEADS_PAD=triton.next_power_of_2(heads),
            DIM_PAD=settings["DIM_PAD"], num_warps=4,
        )  # fmt: skip
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        wide = settings["DIM_PAD"] > 128
        _query_gradient_kernel[(len(segments.query_tiles), heads)](
            query, key, value, grad, sums, dots, grad_query, *segments[:3], *scalars,
            QUERIES=QUERY_TILE, KEYS=32 if wide else KEY_TILE, **settings, num_warps=8, num_stages=1 if wide else 2,
        )  # fmt: skip
        _key_gradient_kernel[(len(segments.key_tiles), key.shape[1])](
            query, key, value, grad, sums, dots, grad_key, grad_value, *segments[:2], segments.key_tiles, *scalars,
            GROUP=heads // key.shape[1], QUERIES=32 if wide else 64, KEYS=KEY_TILE, **settings,
            num_warps=8 if wide else 4, num_stages=1 if wide else 2,
        )  # fmt: skip
        return grad_query, grad_key, grad_value, None, None, None, None


def _settings(query: Tensor, key: Tensor, window: int | None, softcap: float | None) -> dict[str, Any]:
    heads, dim = query.shape[1:]
    return {
        "HEADS": heads,
        "KV_HEADS": key.shape[1],
        "HEAD_DIM": dim,
        "DIM_PAD": max(16, triton.next_power_of_2(dim)),
        "WINDOWED": window is not None,
        "CAPPED": softcap is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


# ---- steps that kernels share ----------------------------------------------------------------------------------------


@triton.jit
def scores_of(query, key, visible, scaling, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a tile in units of log 2, −inf where a query does not see a key; and tanh(score / softcap)."""
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
    bent = score
    if CAPPED:
        bent = 2 * tl.sigmoid(2 * score / softcap) - 1
        score = softcap * bent
    # The choice stands between the product and what follows in every kernel: nothing can be contracted across it.
    return tl.where(visible, score * 1.4426950408889634, float("-inf")), bent


@triton.jit
def attend_tile(query, key, value, visible, highest, total, weighted, scaling, softcap,
                CAPPED: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """One step of the running softmax: `highest[M]`, `total[M, 16]` (equal columns) and `weighted[M, D]` with a tile more."""
    score, _ = scores_of(query, key, visible, scaling, softcap, CAPPED, PRECISION)
    # In powers of 2, which the hardware computes. Weights are relative to the highest score so far, and when a higher one
    # comes, what was summed is shrunk to it: no pass over the scores before the pass over the values.
    new = tl.maximum(highest, tl.max(score, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
    shrink = tl.exp2(highest - base)
    weight = tl.exp2(score - base[:, None]).to(value.dtype)
    # The sum is a matrix product too: how a kernel's threads would share a row out does not matter then.
    total = tl.dot(weight, tl.full([KEYS, 16], 1.0, value.dtype), total * shrink[:, None], input_precision=PRECISION)
    weighted = tl.dot(weight, value, weighted * shrink[:, None], input_precision=PRECISION)
    return new, total, weighted


@triton.jit
def attended(total, weighted):
    """`[M, D]` the result, `[M]` the sums that it was divided by."""
    whole = tl.max(total, 1)
    safe = tl.where(whole > 0, whole, 1.0)
    return weighted / safe[:, None], safe


@triton.jit
def _visible(query, key, queries, keys, window, WINDOWED: tl.constexpr):
    """`[M, N]` whether query (number in its segment) sees key."""
    position = query + (keys - queries)
    visible = (key[None, :] <= position[:, None]) & (key < keys)[None, :] & (query < queries)[:, None]
    if WINDOWED:
        visible = visible & (key[None, :] > position[:, None] - window)
    return visible


@triton.jit
def _rows(pointer, first, number, inside, heads, head, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Rows of `[tokens, heads, HEAD_DIM]`: addresses and mask."""
    column = tl.arange(0, DIM_PAD)
    at = ((first + number).to(tl.int64) * heads + head)[:, None] * HEAD_DIM + column[None, :]
    return pointer + at, inside[:, None] & (column < HEAD_DIM)[None, :]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def _forward_kernel(query, key, value, out, sums, query_bounds, key_bounds, tiles, tokens, scaling, softcap, window,
                    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
                    QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    segment, start = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    first, first_key = tl.load(query_bounds + segment), tl.load(key_bounds + segment)
    queries, keys = tl.load(query_bounds + segment + 1) - first, tl.load(key_bounds + segment + 1) - first_key
    row, within = start + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    kv_head = head // (HEADS // KV_HEADS)
    at, inside = _rows(query, first, row, row < queries, HEADS, head, HEAD_DIM, DIM_PAD)
    q = tl.load(at, mask=inside, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES, 16], tl.float32)
    weighted = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(start + keys - queries - window + 1, 0) // KEYS * KEYS
    end = tl.minimum(start + QUERIES, queries) + keys - queries
    for tile_start in range(begin, end, KEYS):
        number = tile_start + within
        from_key, seen = _rows(key, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
        from_value, _ = _rows(value, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
        k, v = tl.load(from_key, mask=seen, other=0.0), tl.load(from_value, mask=seen, other=0.0)
        visible = _visible(row, number, queries, keys, window, WINDOWED)
        highest, total, weighted = attend_tile(
            q, k, v, visible, highest, total, weighted, scaling, softcap, CAPPED, PRECISION, KEYS
        )
    result, whole = attended(total, weighted)
    to, inside = _rows(out, first, row, row < queries, HEADS, head, HEAD_DIM, DIM_PAD)
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)
    tl.store(sums + head * tokens + first + row, highest + tl.log2(whole), mask=row < queries)


@triton.jit(do_not_specialize=_COUNTS)
def _dots_kernel(grad, out, dots, tokens, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr):  # fmt: skip
    """grad · out of every query."""
    token = tl.program_id(0)
    head, column = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    at = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    inside = (head < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    pull = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    was = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dots + head * tokens + token, tl.sum(pull * was, 1), mask=head < HEADS)


@triton.jit
def _slopes(q, k, v, pull, log_sum, dot, visible, scaling, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Softmax weights of a tile, and the gradient by query · key."""
    score, bent = scores_of(q, k, visible, scaling, softcap, CAPPED, PRECISION)
    weight = tl.exp2(score - log_sum[:, None])
    slope = weight * (tl.dot(pull, tl.trans(v), input_precision=PRECISION) - dot[:, None]) * scaling
    if CAPPED:
        slope = slope * (1 - bent * bent)
    return weight, slope


@triton.jit(do_not_specialize=_COUNTS)
def _query_gradient_kernel(query, key, value, grad, sums, dots, grad_query, query_bounds, key_bounds, tiles, tokens,
                           scaling, softcap, window,
                           HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                           WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
                           QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    segment, start = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    first, first_key = tl.load(query_bounds + segment), tl.load(key_bounds + segment)
    queries, keys = tl.load(query_bounds + segment + 1) - first, tl.load(key_bounds + segment + 1) - first_key
    row, within = start + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    kv_head = head // (HEADS // KV_HEADS)
    at, inside = _rows(query, first, row, row < queries, HEADS, head, HEAD_DIM, DIM_PAD)
    q = tl.load(at, mask=inside, other=0.0)
    at, inside = _rows(grad, first, row, row < queries, HEADS, head, HEAD_DIM, DIM_PAD)
    pull = tl.load(at, mask=inside, other=0.0)
    log_sum = tl.load(sums + head * tokens + first + row, mask=row < queries, other=0.0)
    dot = tl.load(dots + head * tokens + first + row, mask=row < queries, other=0.0)
    total = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(start + keys - queries - window + 1, 0) // KEYS * KEYS
    end = tl.minimum(start + QUERIES, queries) + keys - queries
    for tile_start in range(begin, end, KEYS):
        number = tile_start + within
        from_key, seen = _rows(key, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
        from_value, _ = _rows(value, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
        k, v = tl.load(from_key, mask=seen, other=0.0), tl.load(from_value, mask=seen, other=0.0)
        visible = _visible(row, number, queries, keys, window, WINDOWED)
        _, slope = _slopes(q, k, v, pull, log_sum, dot, visible, scaling, softcap, CAPPED, PRECISION)
        total = tl.dot(slope.to(k.dtype), k, total, input_precision=PRECISION)
    to, inside = _rows(grad_query, first, row, row < queries, HEADS, head, HEAD_DIM, DIM_PAD)
    tl.store(to, total.to(grad_query.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _key_gradient_kernel(query, key, value, grad, sums, dots, grad_key, grad_value, query_bounds, key_bounds, tiles, tokens,
                         scaling, softcap, window,
                         HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                         WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
                         GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Keys and values of one key head: all queries of its group that see them, head by head, in order."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    segment, start = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    first, first_key = tl.load(query_bounds + segment), tl.load(key_bounds + segment)
    queries, keys = tl.load(query_bounds + segment + 1) - first, tl.load(key_bounds + segment + 1) - first_key
    number, within = start + tl.arange(0, KEYS), tl.arange(0, QUERIES)
    at, seen = _rows(key, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
    k = tl.load(at, mask=seen, other=0.0)
    at, seen = _rows(value, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
    v = tl.load(at, mask=seen, other=0.0)
    key_total = tl.zeros([KEYS, DIM_PAD], tl.float32)
    value_total = tl.zeros([KEYS, DIM_PAD], tl.float32)
    begin = tl.maximum(start - (keys - queries), 0) // QUERIES * QUERIES
    end = queries
    if WINDOWED:
        end = tl.minimum(end, start + KEYS + window - (keys - queries))
    steps = tl.cdiv(tl.maximum(end - begin, 0), QUERIES)
    for step in range(GROUP * steps):
        head = kv_head * GROUP + step // steps
        row = begin + step % steps * QUERIES + within
        from_query, inside = _rows(query, first, row, row < queries, HEADS, head, HEAD_DIM, DIM_PAD)
        from_grad, _ = _rows(grad, first, row, row < queries, HEADS, head, HEAD_DIM, DIM_PAD)
        q, pull = tl.load(from_query, mask=inside, other=0.0), tl.load(from_grad, mask=inside, other=0.0)
        log_sum = tl.load(sums + head * tokens + first + row, mask=row < queries, other=0.0)
        dot = tl.load(dots + head * tokens + first + row, mask=row < queries, other=0.0)
        visible = _visible(row, number, queries, keys, window, WINDOWED)
        weight, slope = _slopes(q, k, v, pull, log_sum, dot, visible, scaling, softcap, CAPPED, PRECISION)
        value_total = tl.dot(tl.trans(weight.to(q.dtype)), pull, value_total, input_precision=PRECISION)
        key_total = tl.dot(tl.trans(slope.to(q.dtype)), q, key_total, input_precision=PRECISION)
    to, seen = _rows(grad_key, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
    tl.store(to, key_total.to(grad_key.dtype.element_ty), mask=seen)
    to, seen = _rows(grad_value, first_key, number, number < keys, KV_HEADS, kv_head, HEAD_DIM, DIM_PAD)
    tl.store(to, value_total.to(grad_value.dtype.element_ty), mask=seen)
