"""Log-probs and entropy of tokens from hidden states, a few rows of logits at a time.

The logits `[tokens, vocab]` of a batch are the largest tensor of a training step and are never held as a whole: the
forward pass keeps one chunk at a time and remembers two numbers a token; the backward pass computes each chunk again
and turns it into gradients in place. Logits are float32 whatever the model computes in (float64 stays float64).

    z = raw · scale;  z = softcap · tanh(z / softcap);  z = z / temperature
    log p = z_target − logsumexp(z);   H = logsumexp(z) − Σ p z;   Σπ² = Σ exp(2(z − logsumexp(z)))

This one function gives the log-probs of the trainer, the reference and the rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadriga.accelerator import device_module
from quadriga.models.exact import is_exact
from quadriga.models.kernels.cpu import operations
from quadriga.models.kernels.cpu.linear import add_weight_gradient, input_gradient, prefers_onednn, product
from quadriga.models.kernels.cpu.operations import fits

CHUNK_BYTES = {"cpu": 8 << 20, "accelerator": 2 << 30}
"""Largest chunk of logits by device: on a CPU it should stay in the cache; on a GPU every chunk adds a gradient of the
whole lm_head to the sum, which costs little only beside a large chunk."""
MEMORY_SHARE = 64
"""On a GPU a chunk is at most this part of its memory."""


@dataclass(frozen=True)
class LogitTransform:
    """What lies between the lm_head's product and the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


class TokenStatistics(NamedTuple):
    """What is known of each of N tokens, float32 (float64 for float64); None where it was not asked for."""

    log_probs: Tensor
    """`[N]`"""
    entropy: Tensor | None
    """`[N]`"""
    sum_pi_squared: Tensor | None
    """`[N]` Σ_v π_v² of the distribution that the token is drawn from: between 1/V and 1. Without gradient."""
    other_log_probs: Tensor | None
    """`[N, K]` of the ids that were asked for."""
    top_ids: Tensor | None
    """`[N, k]` the likeliest ids, and `top_log_probs` theirs. Without gradient."""
    top_log_probs: Tensor | None


@dataclass(frozen=True)
class _Wanted:
    """What `token_log_probs` was asked for."""

    entropy: bool
    squares: bool
    top_k: int
    top_of: int


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),  # noqa: B008  (frozen)
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    other_ids: Tensor | None = None,
    top_k: int = 0,
    top_of: int | None = None,
    chunk_rows: int | None = None,
) -> TokenStatistics:
    """Log-prob of `targets[N]`, and more if asked for, under softmax(transform(hidden[N, H] @ weight[V, H].T + bias[V])).

    Log-probs, of the targets and of `other_ids[N, K]`, and entropy are differentiable in hidden, weight and bias.
    The `top_k` likeliest are those of the first `top_of` ids. `chunk_rows` rows of logits exist at a time (default: by
    `CHUNK_BYTES`).
    """
    if chunk_rows is None:
        chunk_rows = max(16, _chunk_bytes(hidden.device) // (4 * weight.shape[0]))
    top_of = min(top_of or weight.shape[0], weight.shape[0])
    wanted = _Wanted(with_entropy, with_sum_pi_squared, min(top_k, top_of), top_of)
    log_probs, entropy, squares, others, top_ids, top_log_probs = _ChunkedLogProbs.apply(
        hidden, weight, bias, targets, other_ids, transform, wanted, chunk_rows
    )
    return TokenStatistics(
        log_probs,
        entropy if with_entropy else None,
        squares if with_sum_pi_squared else None,
        None if other_ids is None else others,
        top_ids if top_k else None,
        top_log_probs if top_k else None,
    )


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        other_ids: Tensor | None,
        transform: LogitTransform,
        wanted: _Wanted,
        chunk_rows: int,
    ) -> tuple[Tensor, ...]:
        rows = hidden.shape[0]
        exact = _logits_dtype(hidden)
        normaliser, target_logit, entropy, squares = (hidden.new_zeros(rows, dtype=exact) for _ in range(4))
        others = hidden.new_zeros(rows, 0 if other_ids is None else other_ids.shape[1], dtype=exact)
        top_log_probs = hidden.new_zeros(rows, wanted.top_k, dtype=exact)
        top_ids = torch.zeros_like(top_log_probs, dtype=torch.long)
        buffer = hidden.new_empty(min(chunk_rows, rows), weight.shape[0], dtype=exact)
        softmax = _kernels(hidden, transform) if other_ids is None else None
        # The entropy needs logits and probabilities at once; without it one buffer is turned into the other.
        scratch = torch.empty_like(buffer) if wanted.entropy and softmax is None else buffer
        for start in range(0, rows, chunk_rows):
            part = slice(start, min(start + chunk_rows, rows))
            if softmax is not None:
                raw = _raw_logits(hidden[part], weight, bias, buffer)
                outputs = normaliser[part], target_logit[part], entropy[part]
                softmax.statistics(raw, targets[part], *_kernel_scales(transform), *outputs)
                if wanted.squares or wanted.top_k:  # the kernels do not tell them; the chunk's logits are still there
                    logits = _transformed(raw, transform)
                    if wanted.top_k:
                        top_log_probs[part], top_ids[part] = logits[:, : wanted.top_of].topk(wanted.top_k)
                    if wanted.squares:
                        squares[part] = logits.sub_(normaliser[part, None]).mul_(2).exp_().sum(1)
                continue
            logits, _ = _logits(hidden[part], weight, bias, transform, buffer)
            target_logit[part] = logits.gather(1, targets[part, None]).squeeze(1)
            if other_ids is not None:
                others[part] = logits.gather(1, other_ids[part])
            if wanted.top_k:
                top_log_probs[part], top_ids[part] = logits[:, : wanted.top_of].topk(wanted.top_k)
            highest = logits.amax(dim=1, keepdim=True)
            likelihoods = torch.sub(logits, highest, out=scratch[: logits.shape[0]]).exp_()
            total = likelihoods.sum(1)
            normaliser[part] = total.log().add_(highest.squeeze(1))
            if wanted.entropy:
                entropy[part] = normaliser[part] - torch.linalg.vecdot(likelihoods, logits).div_(total)
            if wanted.squares:
                squares[part] = torch.linalg.vecdot(likelihoods, likelihoods).div_(total.square())
        ctx.save_for_backward(hidden, weight, bias, targets, other_ids, normaliser, entropy)
        ctx.transform, ctx.chunk_rows = transform, chunk_rows
        ctx.set_materialize_grads(False)
        constants = [squares, top_ids, top_log_probs.sub_(normaliser[:, None])]
        ctx.mark_non_differentiable(*constants, *([] if wanted.entropy else [entropy]))
        others.sub_(normaliser[:, None])
        return target_logit - normaliser, entropy, squares, others, top_ids, top_log_probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy, _, grad_others, _, _ = grads  # None where the loss does not depend on it
        hidden, weight, bias, targets, other_ids, normaliser, entropy = ctx.saved_tensors
        rows, exact = hidden.shape[0], _logits_dtype(hidden)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = weight.new_zeros(weight.shape, dtype=exact) if want_weight else None
        grad_bias = bias.new_zeros(bias.shape, dtype=exact) if want_bias else None
        buffer = hidden.new_empty(min(ctx.chunk_rows, rows), weight.shape[0], dtype=exact)
        softmax = _kernels(hidden, ctx.transform) if grad_others is None else None
        by_onednn = fits(hidden, weight) and prefers_onednn()
        narrow = buffer
        if softmax is not None and buffer.dtype != hidden.dtype:
            narrow = buffer.new_empty(buffer.shape, dtype=hidden.dtype)
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(normaliser)
        for start in range(0, rows, ctx.chunk_rows):
            part = slice(start, min(start + ctx.chunk_rows, rows))
            if softmax is not None:
                grad_logits = softmax.gradient(
                    _raw_logits(hidden[part], weight, bias, buffer),
                    targets[part],
                    *_kernel_scales(ctx.transform),
                    normaliser[part],
                    entropy[part],
                    grad_log_prob[part],
                    None if grad_entropy is None else grad_entropy[part],
                    narrow[: len(normaliser[part])],
                )
            else:
                grad_logits = _chunk_gradient(
                    *_logits(hidden[part], weight, bias, ctx.transform, buffer, with_slope=True),
                    targets[part, None],
                    normaliser[part, None],
                    entropy[part, None],
                    grad_log_prob[part, None],
                    None if grad_entropy is None else grad_entropy[part, None],
                    None if grad_others is None else (other_ids[part], grad_others[part]),
                )
            if grad_bias is not None:
                grad_bias.add_(grad_logits.sum(0, dtype=exact))
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                if by_onednn:
                    grad_hidden[part] = input_gradient(grad_logits, weight)
                else:
                    torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if by_onednn:
                    add_weight_gradient(grad_weight, grad_logits, hidden[part])
                else:
                    _add_product(grad_weight, grad_logits.t(), hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _chunk_gradient(
    logits: Tensor,
    slope: Tensor | float,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    others: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The gradient by the raw product `[R, V]`, in the place of `logits`; the others are `[R, 1]`.

    `others` are ids `[R, K]` beside the target, and the gradients by their log-probs.
    """
    logits.sub_(normaliser)  # log p of every token
    total = grad_log_prob if others is None else grad_log_prob + others[1].sum(1, keepdim=True)
    if grad_entropy is None:
        gradient = logits.exp_().mul_(-total)
    else:  # dH/dz = −p (log p + H)
        pull = (logits + entropy).mul_(-grad_entropy).sub_(total)
        gradient = logits.exp_().mul_(pull)
    gradient.scatter_add_(1, targets, grad_log_prob)
    if others is not None:
        gradient.scatter_add_(1, *others)
    if isinstance(slope, Tensor) or slope != 1:
        gradient.mul_(slope)
    return gradient


def _logits_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _kernels(hidden: Tensor, transform: LogitTransform) -> Any | None:
    """The module that computes a chunk's statistics and its gradient by one kernel each, where there is one."""
    if hidden.is_cuda and hidden.dtype != torch.float64:
        from quadriga.models.kernels import softmax

        return softmax
    if transform.softcap is None and fits(hidden):
        return operations
    return None


def _kernel_scales(transform: LogitTransform) -> tuple[float, float | None]:
    """`scale` and `softcap` as the kernels take them."""
    if transform.softcap is None:
        return transform.scale / transform.temperature, None
    return transform.scale / transform.softcap, transform.softcap / transform.temperature


def _chunk_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return CHUNK_BYTES["cpu"]
    return min(
        CHUNK_BYTES["accelerator"], device_module(device).get_device_properties(device).total_memory // MEMORY_SHARE
    )


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    buffer: Tensor,
    with_slope: bool = False,
) -> tuple[Tensor, Tensor | float]:
    """Logits of a chunk in `buffer`, and their slope, d logits / d raw product (a number where it is the same for all)."""
    logits = _raw_logits(hidden, weight, bias, buffer)
    slope: Tensor | float = transform.scale / transform.temperature
    if transform.softcap is None:
        if slope != 1:
            logits.mul_(slope)
        return logits, slope
    logits.mul_(transform.scale / transform.softcap).tanh_()
    if with_slope:
        slope = (1 - logits.square()).mul_(slope)
    logits.mul_(transform.softcap / transform.temperature)
    return logits, slope


def _transformed(raw: Tensor, transform: LogitTransform) -> Tensor:
    """The logits of a chunk of raw products, in their place."""
    if transform.softcap is None:
        return raw.mul_(transform.scale / transform.temperature)
    return raw.mul_(transform.scale / transform.softcap).tanh_().mul_(transform.softcap / transform.temperature)


def _raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """The lm_head's product of a chunk, in `buffer`'s precision, and in its place where the library can."""
    logits = buffer[: hidden.shape[0]]
    if fits(hidden, weight) and prefers_onednn():
        return product(hidden, weight, bias)
    if hidden.is_cuda and is_exact():
        from quadriga.models.kernels.linear import product as exact_product

        exact_product(hidden, weight, out=logits)
    elif hidden.dtype == logits.dtype:
        torch.mm(hidden, weight.t(), out=logits)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=logits.dtype, out=logits)
    else:
        torch.mm(hidden.to(logits.dtype), weight.t().to(logits.dtype), out=logits)
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in `total`'s precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
