"""Attention of the native engine, called by the Hugging Face module itself.

Registered with transformers as `quadriga_paged`; the module is called with `plan=StepPlan`, which transformers hands
through to here. Decoding reads the cache block by block: scores and weighted values of every (block, query) are two
batched matrix products, and the parts of a row are put together by their maxima and sums, as in split-KV flash
attention. So ragged rows cost what they hold, and the blocks of a shared prompt are read once for all its samples.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import WorkerError
from quadriga.models.kernels.cpu.library import kernels
from quadriga.models.kernels.cpu.operations import pointers
from quadriga.rollout.native.geometry import UNSUPPORTED_FIX
from quadriga.rollout.native.kv_cache import KVCache
from quadriga.rollout.native.plan import MASKED, Chunk, DecodeIndex, DecodeTables, StepPlan

PAGED_ATTENTION = "quadriga_paged"
"""Name of this attention in transformers."""


def register_paged_attention() -> str:
    """Make `PAGED_ATTENTION` known to transformers; returns the name."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED_ATTENTION, paged_attention)
    return PAGED_ATTENTION


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: StepPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to the cache and attend as `plan` says.

    Args:
        query: `[1, heads, T, D]`; key and value `[1, kv_heads, T, D]`, rows in the order of `plan`.
        sliding_window: a token sees this many, itself included.

    Returns:
        `[1, T, heads, D]` (rows of padding: zeros), and None where transformers expects attention weights.
    """
    if plan is None or attention_mask is not None or kwargs.get("s_aux") is not None:
        raise WorkerError(
            f"{type(module).__name__} called {PAGED_ATTENTION} without a plan, or with a mask or attention sinks",
            UNSUPPORTED_FIX,
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    plan.cache.write(layer, k[: plan.num_tokens], v[: plan.num_tokens], plan.write_blocks, plan.write_places)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    out[plan.num_tokens :] = 0
    if plan.num_decode:
        rows = slice(plan.num_decode)
        if isinstance(plan.decode, DecodeTables):
            _decode_by_kernel(plan, plan.decode, layer, q[rows], scaling, sliding_window, softcap, out)
        else:
            out[rows] = _decode(plan, layer, q[rows] * scaling, sliding_window, softcap)
    start = plan.num_decode
    for chunk in plan.chunks:
        rows = slice(start, start + chunk.length)
        out[rows] = prefill_attention(
            plan.cache, layer, chunk, q[rows], k[rows], v[rows], scaling, sliding_window, softcap
        )
        start += chunk.length
    return out.unsqueeze(0), None


def _decode_by_kernel(
    plan: StepPlan,
    tables: DecodeTables,
    layer: int,
    q: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    """One query `[B, heads, D]` a row, over all its keys; into the first rows of `out`."""
    shape, rows = plan.cache.shape, q.shape[0]
    plan.windows.add(window)
    room = kernels().paged_decode_room(tables.longest, shape.block_size)
    q, scores = q.contiguous(), q.new_empty(rows, room)
    kernels().paged_decode(
        ctypes.byref(plan.cache.structures[layer]),
        *pointers(q, tables.blocks),
        tables.blocks.shape[1],
        plan.decode_positions.data_ptr(),
        *(rows, shape.heads, window or 0, scaling, softcap or 0.0),
        *(scores.data_ptr(), room, out.data_ptr()),
    )


def _decode(plan: StepPlan, layer: int, q: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """One scaled query `[B, heads, D]` a row, over all its keys."""
    index, shape = plan.decode, plan.cache.shape
    assert isinstance(index, DecodeIndex)
    q = q.reshape(-1, shape.kv_heads, shape.group, shape.head_dim)
    keys, values = plan.cache.keys[layer], plan.cache.values[layer]
    own = slice(index.num_private)
    products = [(q.index_select(0, index.private_row), keys[own], values[own])]
    if index.shared_blocks.numel():
        key, value = (pool.index_select(0, index.shared_blocks) for pool in (keys, values))
        for rows in index.shared_rows:
            queries = q.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2).flatten(2, 3)
            products.append((queries, key, value))
    # Each product fills its own run of parts: queries [X, kv, M, D] over keys and values [X, kv, block, D].
    scores, weighted = (
        x.split([p[0].shape[:3].numel() for p in products]) for x in (index.scores, index.weighted[:-1])
    )
    for (queries, key, _), out in zip(products, scores, strict=True):
        key = key.flatten(0, 1).transpose(1, 2)
        torch.bmm(queries.flatten(0, 1), key, out=out.view(key.shape[0], queries.shape[2], -1))
    _weigh(index, *plan.mask(window), softcap)
    for (queries, _, value), weights, out in zip(products, scores, weighted, strict=True):
        size = (-1, queries.shape[2], shape.block_size)
        torch.bmm(weights.view(size), value.flatten(0, 1), out=out.view(*size[:2], shape.head_dim))
    return _merge(index).view(-1, shape.heads, shape.head_dim)


def _weigh(index: DecodeIndex, private_mask: Tensor, shared_mask: Tensor | None, softcap: float | None) -> None:
    """Turn the scores of each part into weights relative to its maximum; note maximum and sum."""
    scores, maxima, sums = index.scores, index.maxima[:-1], index.sums[:-1]
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    own, shared = scores.split([index.num_private_parts, len(scores) - index.num_private_parts])
    own.view(index.num_private, -1, scores.shape[1]).add_(private_mask)
    if shared_mask is not None and shared.numel():
        turns, blocks, at_once = index.shared_rows.shape
        shape = (turns, blocks, -1, at_once, index.group, scores.shape[1])
        shared.view(shape).add_(shared_mask)
    torch.amax(scores, -1, out=maxima)
    # e^-80 beside e^0 changes no bit, and exponents that underflow are slow to compute.
    scores.sub_(maxima[:, None]).clamp_(min=-80).exp_()
    torch.sum(scores, -1, out=sums)


def _merge(index: DecodeIndex) -> Tensor:
    """`[B * heads, D]`: the parts of each row and head put together, in order of position."""
    flat = index.parts.flatten()
    highest = index.maxima.index_select(0, flat).view(index.parts.shape)
    weights = (highest - highest.amax(-1, keepdim=True)).exp_()
    total = (weights * index.sums.index_select(0, flat).view(index.parts.shape)).sum(-1, keepdim=True)
    return F.embedding_bag(index.parts, index.weighted, mode="sum", per_sample_weights=weights / total)


def prefill_attention(
    cache: KVCache,
    layer: int,
    chunk: Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """A chunk of a prompt `[length, heads, D]` over itself and what came before it."""
    end = chunk.start + chunk.length
    query = q.transpose(0, 1)
    if chunk.start == 0:
        key, value = k.transpose(0, 1), v.transpose(0, 1)
    else:
        key, value = cache.read(layer, chunk.blocks, end)
    windowed = window is not None and end > window
    plain = chunk.start == 0 and not windowed and softcap is None
    visible = None if plain else _visible(chunk.start, end, window if windowed else None, q.device)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], visible, is_causal=plain, scale=scaling, enable_gqa=True
        ).squeeze(0)
    else:
        assert visible is not None
        group = query.shape[0] // key.shape[0]
        key, value = (x.repeat_interleave(group, dim=0) for x in (key, value))
        scores = softcap * torch.tanh(query @ key.transpose(1, 2) * (scaling / softcap))
        out = scores.masked_fill(~visible, MASKED).softmax(-1) @ value
    return out.transpose(0, 1)


def _visible(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """`[end - start, end]`, True where the row's token sees the column's."""
    mask = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
    return mask if window is None else mask.triu(start + 1 - window)
