"""Rotary position embedding of queries and keys in one kernel, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x · cos + rotate_half(x) · sin for `query[T, heads, D]` and `key[T, kv_heads, D]`; cos and sin are `[T, D]`.

    Computed in float32 and rounded once. Differentiable in query and key.
    """
    return _Rotate.apply(query, key, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch(query, key, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_launch(grads[0], grads[1], cos, sin, backward=True), None, None


def _launch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    cos, sin = cos.contiguous(), sin.contiguous()
    tokens, heads, dim = query.shape
    turned = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    if tokens:
        _rotate_kernel[(tokens,)](
            query,
            key,
            *turned,
            cos,
            sin,
            *query.stride()[:2],
            *key.stride()[:2],
            heads,
            key.shape[1],
            dim // 2,
            BACKWARD=backward,
            HEADS=triton.next_power_of_2(heads),
            KV_HEADS=triton.next_power_of_2(key.shape[1]),
            HALF=triton.next_power_of_2(dim // 2),
            num_warps=2,
        )
    return turned[0], turned[1]


@triton.jit
def _rotate_kernel(
    query,
    key,
    query_out,
    key_out,
    cos,
    sin,
    query_token,
    query_head,
    key_token,
    key_head,
    heads,
    kv_heads,
    half,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    inside = column < half
    angles = token * 2 * half + column
    cos1 = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + angles + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + angles + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    _turn(query + token * query_token, query_out + token * heads * 2 * half, query_head, heads, half,
          cos1, cos2, sin1, sin2, BACKWARD, HEADS, HALF)  # fmt: skip
    _turn(key + token * key_token, key_out + token * kv_heads * 2 * half, key_head, kv_heads, half,
          cos1, cos2, sin1, sin2, BACKWARD, KV_HEADS, HALF)  # fmt: skip


@triton.jit
def _turn(x, out, x_head, heads, half, cos1, cos2, sin1, sin2,
          BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """All heads of one token: the two halves of a head are turned against each other."""
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    source = x + head * x_head + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        turned1 = first * cos1 + second * sin2
        turned2 = second * cos2 - first * sin1
    else:
        turned1 = first * cos1 - second * sin1
        turned2 = second * cos2 + first * sin2
    target = out + head * 2 * half + column
    tl.store(target, turned1.to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, turned2.to(out.dtype.element_ty), mask=inside)
