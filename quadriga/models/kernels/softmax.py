"""What a chunk of logits is needed for, each in one pass over it: its statistics, and its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


def statistics(
    raw: Tensor,
    targets: Tensor,
    scale: float | Tensor,
    softcap: float | None,
    normaliser: Tensor,
    target_logit: Tensor,
    entropy: Tensor,
) -> None:
    """Fill the `[R]` outputs with logsumexp(z), z of the target, and the entropy of softmax(z).

    `raw[R, V]` float32 are the lm_head's products; z = raw · scale, or softcap · tanh(raw · scale) with a softcap, which
    is then the cap over the temperature. `scale` is one for all rows, or `[R]`: either way it comes from memory, so that
    the very same machine code gives the log-probs of training and of exact generation.
    """
    if not isinstance(scale, Tensor):
        scale = torch.full((raw.shape[0],), scale, dtype=torch.float32, device=raw.device)
    _statistics_kernel[(raw.shape[0],)](
        raw,
        targets,
        normaliser,
        target_logit,
        entropy,
        raw.shape[1],
        raw.stride(0),
        scale,
        0.0 if softcap is None else softcap,
        CAPPED=softcap is not None,
        TILE=_TILE,
        num_warps=8,
    )


def gradient(
    raw: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    normaliser: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> Tensor:
    """`out[R, V]` (of any float dtype) becomes the gradient of the loss by `raw`; see `statistics`."""
    rows, vocab = raw.shape
    _gradient_kernel[(rows, triton.cdiv(vocab, _TILE))](
        raw,
        targets,
        normaliser,
        entropy,
        grad_log_prob,
        entropy if grad_entropy is None else grad_entropy,
        out,
        vocab,
        raw.stride(0),
        out.stride(0),
        scale,
        0.0 if softcap is None else softcap,
        CAPPED=softcap is not None,
        WITH_ENTROPY=grad_entropy is not None,
        TILE=_TILE,
        num_warps=8,
    )
    return out


@triton.jit
def _logits(raw, scale, softcap, CAPPED: tl.constexpr):
    """z, and tanh(raw · scale) where there is a cap."""
    z = raw * scale
    bent = z
    if CAPPED:
        bent = 2 * tl.sigmoid(2 * z) - 1
        z = bent * softcap
    return z, bent


@triton.jit
def _statistics_kernel(raw, targets, normaliser, target_logit, entropy, vocab, stride, scales, softcap,
                       CAPPED: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    line = raw + row * stride
    column = tl.arange(0, TILE)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        inside = start + column < vocab
        z, _ = _logits(tl.load(line + start + column, mask=inside, other=0.0), scale, softcap, CAPPED)
        new = tl.where(inside, tl.maximum(highest, z), highest)
        shrink = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - new))
        likelihood = tl.where(inside, tl.exp(z - new), 0.0)
        total = total * shrink + likelihood
        weighted = weighted * shrink + likelihood * z
        highest = new
    best = tl.max(highest)
    shrink = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - best))
    whole = tl.sum(total * shrink)
    logsumexp = best + tl.log(whole)
    tl.store(normaliser + row, logsumexp)
    tl.store(entropy + row, logsumexp - tl.sum(weighted * shrink) / whole)
    chosen, _ = _logits(tl.load(line + tl.load(targets + row)), scale, softcap, CAPPED)
    tl.store(target_logit + row, chosen)


@triton.jit
def _gradient_kernel(raw, targets, normaliser, entropy, grad_log_prob, grad_entropy, out, vocab, stride, out_stride,
                     scale, softcap, CAPPED: tl.constexpr, WITH_ENTROPY: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < vocab
    z, bent = _logits(tl.load(raw + row * stride + column, mask=inside, other=0.0), scale, softcap, CAPPED)
    log_prob = z - tl.load(normaliser + row)
    pull = tl.load(grad_log_prob + row)
    weight = -pull
    if WITH_ENTROPY:  # dH/dz = −p (log p + H)
        weight = weight - tl.load(grad_entropy + row) * (log_prob + tl.load(entropy + row))
    slope = tl.exp(log_prob) * weight + tl.where(column == tl.load(targets + row), pull, 0.0)
    if CAPPED:
        slope = slope * softcap * (1 - bent * bent)
    tl.store(out + row * out_stride + column, (slope * scale).to(out.dtype.element_ty), mask=inside)
