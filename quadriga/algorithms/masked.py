"""Statistics over the tokens that a mask selects.

Shapes: `x[B, T]` and `mask[B, T]` (bool, integer or float; non-zero selects). What lies under a zero of the mask is
never read: padding may hold NaN. A mask without any token is an error; a single token has variance 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quadriga.errors import DataError

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this: exp(±20) spans 2e-9 to 5e8, whose squares are still finite in float32."""

GSPO_LOG_RATIO_BOUND = 10.0
"""Upper bound of a row's mean log-ratio in losses that have no dual clip: exp(10) ≈ 22,000."""

KL_BOUND = 10.0
"""The k3 estimate of one token is at most this."""


WHITEN_EPS = 1e-8
_BLOCK_ELEMENTS = 1 << 21  # 8 MiB of float32: temporaries of this size stay in cache and are recycled by the allocator


def as_bool(mask: Tensor) -> Tensor:
    """The mask as booleans, without a copy where it already is."""
    return mask if mask.dtype == torch.bool else mask != 0


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Slices over dim 0 of `x[B, T]` that keep the temporaries of elementwise work in cache."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, x.shape[-1]))
    for start in range(0, x.shape[0], rows):
        yield slice(start, start + rows)


def token_counts(mask: Tensor) -> Tensor:
    """Number of selected tokens of every row: `mask[B, T]` → int64 `[B]`."""
    mask = as_bool(mask)
    counts = torch.empty(mask.shape[0], dtype=torch.int64, device=mask.device)
    for rows in row_blocks(mask):
        # Summing float32 is several times faster than summing bool, and exact below 2^24 tokens a row.
        counts[rows] = mask[rows].float().sum(-1).long()
    return counts


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ of the selected elements, over everything or over `dim`; 0 where nothing is selected."""
    kept = torch.where(as_bool(mask), x, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the selected elements, over everything or over `dim`.

    Raises:
        DataError: nothing is selected; with `dim`, the message names the rows.
    """
    mask = as_bool(mask)
    counts = mask.sum() if dim is None else mask.sum(dim)
    _require_tokens(counts, mask)
    return masked_sum(x, mask, dim) / counts


def masked_var(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Unbiased (n − 1) variance of the selected elements; 0 for a single one.

    Raises:
        DataError: nothing is selected; with `dim`, the message names the rows.
    """
    mask = as_bool(mask)
    mean = masked_mean(x, mask, dim)
    counts = mask.sum() if dim is None else mask.sum(dim)
    centred = x - (mean if dim is None else mean.unsqueeze(dim))
    return masked_sum(centred.square(), mask, dim) / (counts - 1).clamp(min=1)


@torch.no_grad()
def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / sqrt(var + 1e-8) over the selected tokens of `x[B, T]`, 0 elsewhere. Carries no gradient.

    Raises:
        DataError: the mask selects nothing.
    """
    mask = as_bool(mask)
    count = token_counts(mask).sum()
    _require_tokens(count, mask)
    out = torch.where(mask, x, 0)
    mean = out.sum(-1).double().sum() / count
    squares = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in row_blocks(out):
        centred = out[rows].sub_(mean).masked_fill_(~mask[rows], 0)
        squares += centred.square().sum(-1).double().sum()
    return out.mul_(torch.rsqrt(squares / (count - 1).clamp(min=1) + WHITEN_EPS))


def _require_tokens(counts: Tensor, mask: Tensor) -> None:
    empty = counts == 0
    if not bool(empty.any()):
        return
    if counts.dim() == 0:
        where = f"none of the {mask.shape[0] if mask.dim() else 1} rows (shape {tuple(mask.shape)}) has a token"
    else:
        rows = empty.nonzero().flatten().tolist()
        where = f"row {rows[0]} has no token" + (f" (nor have {len(rows) - 1} others)" if len(rows) > 1 else "")
    raise DataError(
        f"The mean of no tokens is undefined: in this mask {where}.",
        "drop such rows, or look at why the response mask is empty (no generated token, or every one rejected)",
    )
