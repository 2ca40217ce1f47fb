"""Random numbers that depend on what is sampled, not on when or beside what.

Every sequence has a 64-bit key made of (seed, step, uid, sample index, call); token number i of it draws the i-th number of
the key's splitmix64 stream. So batch composition, slots, order of arrival and number of workers cannot change a draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def stream_key(seed: int, step: int, uid: tuple[int, int], sample_index: int, call: int = 0) -> int:
    """Key of a sequence's stream, as a signed 64-bit integer. The first call of an episode adds nothing to it."""
    key = 0
    for part in (seed, step, *uid, sample_index, *((call,) if call else ())):
        key = _mix_int((key ^ (part & _MASK)) + _GOLDEN)
    return _signed(key)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Number `positions[i]` of stream `keys[i]`: float32 in [0, 1), multiples of 2^-24. Both arguments `[R]` int64."""
    x = keys + (positions + 1) * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX[1])
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).to(torch.float32) * 2.0**-24


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 seen as uint64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
