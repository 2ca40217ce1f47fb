"""Logits to tokens and log-probs in one kernel, and the noting of the new tokens in another.

The kernel reads the logits once: it keeps maximum and sum of every tile of the vocabulary, finds the tile in which the
running sum passes the row's random number, and reads that tile again to find the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quadriga.models.kernels.softmax import statistics
from quadriga.rollout.native.slots import DeviceSlots, Sampled

_TILE = 4096


def sample_rows(logits: Tensor, rows: Tensor, slots: Tensor, table: DeviceSlots) -> Sampled:
    """One token for each of `slots[R]` (−1: none) from row `rows[R]` of `logits[·, V]` float32, untruncated.

    Greedy rows get their likeliest token; the log-prob is that of softmax(logits / temperature).
    """
    count, vocab = slots.shape[0], logits.shape[1]
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(count, dtype=torch.float32, device=logits.device)
    _sample_kernel[(count,)](
        logits,
        rows,
        slots,
        table.key,
        table.count,
        table.temperature,
        table.greedy,
        tokens,
        log_probs,
        vocab,
        logits.stride(0),
        TILE=_TILE,
        TILES=triton.next_power_of_2(triton.cdiv(vocab, _TILE)),
        num_warps=8,
    )
    return Sampled(tokens, log_probs, log_probs)


def trainer_log_probs(logits: Tensor, slots: Tensor, tokens: Tensor, table: DeviceSlots) -> Tensor:
    """Log-prob of `tokens[R]` under `logits[R, V]` of `slots[R]`, by the kernel that the trainer computes them with."""
    normaliser, chosen, entropy = (torch.empty_like(logits[:, 0]) for _ in range(3))
    statistics(logits, tokens, table.scale[slots.clamp(min=0)], None, normaliser, chosen, entropy)
    return chosen - normaliser


def note_tokens(slots: Tensor, sampled: Sampled, table: DeviceSlots, decoding: bool) -> None:
    """Append a token to each of `slots[R]` (−1: none) that is not done, and say in `table.done` which are done now.

    `decoding`: the pass has also written a token to the cache, so `table.length` grows.
    """
    _note_kernel[(slots.shape[0],)](
        slots,
        sampled.tokens,
        sampled.log_probs,
        sampled.full_log_probs,
        table.tokens,
        table.log_probs,
        table.full_log_probs,
        table.last_token,
        table.count,
        table.length,
        table.done,
        table.max_new,
        table.stop_ids,
        table.tokens.shape[1],
        table.stop_ids.shape[1],
        DECODING=decoding,
        STOPS=triton.next_power_of_2(table.stop_ids.shape[1]),
        num_warps=1,
    )


@triton.jit
def _uniform(key, position):
    """See `randomness.uniforms`."""
    x = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _sample_kernel(logits, rows, slots, keys, counts, temperatures, greedy, tokens, log_probs, vocab, stride,
                   TILE: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    place = tl.program_id(0)
    slot = tl.load(slots + place)
    if slot >= 0:
        line = logits + tl.load(rows + place).to(tl.int64) * stride
        temperature = tl.load(temperatures + slot)
        column, tile = tl.arange(0, TILE), tl.arange(0, TILES)
        maxima = tl.full([TILES], float("-inf"), tl.float32)
        sums = tl.zeros([TILES], tl.float32)
        for number in range(tl.cdiv(vocab, TILE)):
            at = number * TILE + column
            z = tl.load(line + at, mask=at < vocab, other=float("-inf")) / temperature
            highest = tl.max(z)
            total = tl.sum(tl.exp(z - highest))
            maxima = tl.where(tile == number, highest, maxima)
            sums = tl.where(tile == number, total, sums)
        highest = tl.max(maxima)
        weights = tl.where(maxima == float("-inf"), 0.0, sums * tl.exp(maxima - highest))
        whole = tl.sum(weights)
        is_greedy = tl.load(greedy + slot) != 0
        goal = _uniform(tl.load(keys + slot), tl.load(counts + slot)) * whole
        last = tl.max(tl.where(weights > 0, tile, 0))
        chosen = tl.minimum(tl.sum((tl.cumsum(weights) <= goal).to(tl.int32)), last)
        chosen = tl.where(is_greedy, tl.argmax(maxima, 0), chosen)
        before = tl.sum(tl.where(tile < chosen, weights, 0.0))
        at = chosen * TILE + column
        z = tl.load(line + at, mask=at < vocab, other=float("-inf")) / temperature
        inner = tl.exp(z - highest)
        # The tile's sum and the running sum inside it round differently: stay on a token that has weight.
        last = tl.max(tl.where(inner > 0, column, 0))
        token = tl.minimum(tl.sum((before + tl.cumsum(inner) <= goal).to(tl.int32)), last)
        token = tl.where(is_greedy, tl.argmax(z, 0), token)
        z = tl.sum(tl.where(column == token, z, 0.0))
        tl.store(tokens + place, (chosen * TILE + token).to(tl.int64))
        tl.store(log_probs + place, z - highest - tl.log(whole))
    else:
        tl.store(tokens + place, tl.zeros([], tl.int64))
        tl.store(log_probs + place, 0.0)


@triton.jit
def _note_kernel(slots, tokens, log_probs, full_log_probs, all_tokens, all_log_probs, all_full_log_probs, last_token, count,
                 length, done, max_new, stop_ids, width, num_stops, DECODING: tl.constexpr, STOPS: tl.constexpr):  # fmt: skip
    place = tl.program_id(0)
    slot = tl.load(slots + place)
    is_done = tl.load(done + slot, mask=slot >= 0, other=1)
    if is_done == 0:
        token = tl.load(tokens + place)
        full_log_prob = tl.load(full_log_probs + place)
        number = tl.load(count + slot)
        at = slot * width + number
        tl.store(all_tokens + at, token)
        tl.store(all_log_probs + at, tl.load(log_probs + place))
        tl.store(all_full_log_probs + at, full_log_prob)
        tl.store(last_token + slot, token)
        tl.store(count + slot, number + 1)
        if DECODING:
            tl.store(length + slot, tl.load(length + slot) + 1)
        stop = tl.arange(0, STOPS)
        stops = tl.load(stop_ids + slot * num_stops + stop, mask=stop < num_stops, other=-1)
        code = tl.where(number + 1 >= tl.load(max_new + slot), 2, 0)
        code = tl.where(tl.sum((stops == token).to(tl.int32)) > 0, 1, code)
        finite = (full_log_prob == full_log_prob) & (tl.abs(full_log_prob) < float("inf"))
        tl.store(done + slot, tl.where(finite, code, 3))
