"""From logits to tokens and their log-probs, many rows at once and one random number a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.models.kernels.cpu.library import kernels
from quadriga.models.kernels.cpu.operations import fits, pointers
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native.randomness import uniforms
from quadriga.rollout.native.slots import Sampled, SlotTable

_GROUP = 64
"""The inverse of the distribution function is found in two steps: the group of this many tokens, then the token."""
_FIRST_SORT = 256
"""So many of the likeliest tokens are looked at first for top-p; all of them only if their mass does not do."""


@dataclass(frozen=True)
class Needs:
    """Which of the rarer transforms any running request wants; the others are skipped."""

    temperature: bool = False
    greedy: bool = False
    truncation: bool = False
    penalty: bool = False
    min_new: bool = False


def needs_of(params: Iterable[SamplingParams]) -> Needs:
    """Which transforms these parameters ask for."""
    params = set(params)
    return Needs(
        temperature=any(p.scale_temperature != 1 for p in params),
        greedy=any(p.greedy for p in params),
        truncation=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        penalty=any(p.repetition_penalty != 1 for p in params),
        min_new=any(p.min_new_tokens > 0 for p in params),
    )


def sample(logits: Tensor, table: SlotTable, slots: Tensor, needs: Needs) -> Sampled:
    """One token for each of `slots[R]` from its row of `logits[R, V]` (float32; overwritten)."""
    if fits(logits):
        rare = _rarities(table, slots) if needs.truncation or needs.penalty or needs.min_new else None
        if rare is None or not bool(rare.any()):
            return _sample_by_kernel(logits, table, slots)
        if not bool(rare.all()):  # a row must not depend on what the rows beside it want
            return _joined(rare, *(sample(logits[part], table, slots[part], needs) for part in (rare, ~rare)))
    original = logits.clone() if needs.penalty or needs.min_new else None
    if needs.penalty and table.seen is not None:
        penalty = table.penalty[slots, None]
        punished = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(table.seen[slots], punished, logits)
    if needs.min_new:
        logits = _bar_stops(logits, table, slots)
    temperature = table.temperature[slots, None] if needs.temperature else None
    if temperature is not None:
        logits.div_(temperature)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    total = _group_sums(weights).sum(-1)
    allowed = weights
    if needs.truncation:
        allowed = _truncate(weights, total, table.top_k[slots], table.top_p[slots], table.min_p[slots])
    sums = _group_sums(allowed)
    tokens = _inverse_cdf(allowed, sums, uniforms(table.key[slots], table.count[slots]))
    if needs.greedy:
        tokens = torch.where(table.greedy[slots], weights.argmax(-1), tokens)
    chosen = weights.gather(1, tokens[:, None]).squeeze(1).log()
    full = chosen - total.log()
    log_probs = chosen - sums.sum(-1).log() if needs.truncation else full
    if needs.greedy:
        log_probs = torch.where(table.greedy[slots], full, log_probs)
    if original is not None:
        original = original if temperature is None else original.div_(temperature)
        untouched = original.gather(1, tokens[:, None]).squeeze(1) - original.logsumexp(-1)
        full = torch.where((table.penalty[slots] != 1) | (table.min_new[slots] > 0), untouched, full)
    return Sampled(tokens, log_probs, full)


def _rarities(table: SlotTable, slots: Tensor) -> Tensor:
    """`[R]`, True for rows that want more than a temperature."""
    truncated = (table.top_k[slots] > 0) | (table.top_p[slots] < 1) | (table.min_p[slots] > 0)
    return truncated | (table.penalty[slots] != 1) | (table.min_new[slots] > 0)


def _joined(where: Tensor, yes: Sampled, no: Sampled) -> Sampled:
    """Rows of `yes` where `where[R]`, of `no` elsewhere."""
    parts = []
    for name in ("tokens", "log_probs", "full_log_probs"):
        whole = getattr(yes, name).new_empty(where.shape)
        whole[where], whole[~where] = getattr(yes, name), getattr(no, name)
        parts.append(whole)
    return Sampled(*parts)


def _sample_by_kernel(logits: Tensor, table: SlotTable, slots: Tensor) -> Sampled:
    """The same on a CPU, where each row is drawn at a temperature or takes its likeliest token, and nothing else is asked for."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens, log_probs = torch.empty_like(slots), logits.new_empty(rows)
    drawn, temperature = uniforms(table.key[slots], table.count[slots]), table.temperature[slots]
    greedy, sums = table.greedy[slots], logits.new_empty(rows, -(-vocab // _GROUP))
    kernels().sample_tokens(
        *pointers(logits, temperature, drawn, greedy), rows, vocab, *pointers(sums, tokens, log_probs)
    )
    return Sampled(tokens, log_probs, log_probs)


def _bar_stops(logits: Tensor, table: SlotTable, slots: Tensor) -> Tensor:
    """No stop token before the row's min_new_tokens."""
    too_early = table.count[slots] < table.min_new[slots]
    stops = torch.where(too_early[:, None], table.stop_ids[slots], -1)
    barred = F.pad(torch.zeros_like(logits, dtype=torch.bool), (0, 1))
    barred.scatter_(1, torch.where(stops < 0, logits.shape[1], stops), True)
    return logits.masked_fill(barred[:, :-1], float("-inf"))


def _truncate(weights: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`weights[R, V]` with 0 for tokens that top-k, top-p (of what top-k left) or min-p drop."""
    vocab = weights.shape[1]
    look = min(vocab, max(_FIRST_SORT, int(top_k.max())))
    limited = top_k > 0
    while True:
        best = weights.topk(look, sorted=True).values
        last = best.gather(1, (top_k.clamp(1, look) - 1)[:, None])
        threshold = torch.where(limited[:, None], last, 0.0)
        kept = torch.where(best >= threshold, best, 0.0)
        mass = torch.where(limited, kept.sum(-1), total)
        needed = (kept.cumsum(-1) < (top_p * mass)[:, None]).sum(-1)  # tokens before the one that reaches the mass
        open_end = (top_p < 1) & ~limited & (needed >= look)
        if look == vocab or not bool(open_end.any()):
            break
        look = min(vocab, look * 8)
    nucleus = best.gather(1, needed.clamp(max=look - 1)[:, None])
    threshold = torch.where((top_p < 1)[:, None], threshold.maximum(nucleus), threshold)
    threshold = threshold.maximum(min_p[:, None] * best[:, :1])
    return torch.where(weights >= threshold, weights, 0.0)


def _group_sums(weights: Tensor) -> Tensor:
    """`[R, ceil(V / _GROUP)]` sums of neighbouring weights."""
    whole = weights.shape[1] // _GROUP * _GROUP
    sums = weights[:, :whole].unflatten(1, (-1, _GROUP)).sum(-1) if whole else weights[:, :0]
    if whole == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)


def _inverse_cdf(weights: Tensor, sums: Tensor, u: Tensor) -> Tensor:
    """The token at which the running sum of `weights[R, V]` passes `u[R]` of the whole; never one of weight 0."""
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    # NaN would be found behind the last group; the caller sees it in the log-prob.
    group = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = F.pad(cumulative, (1, 0)).gather(1, group)
    members = group * _GROUP + torch.arange(_GROUP, device=weights.device)
    inside = members < weights.shape[1]
    inner = weights.gather(1, members.clamp(max=weights.shape[1] - 1)) * inside
    place = (before + inner.cumsum(-1) <= target).sum(-1, keepdim=True)
    # The group's sum and the running sum inside it round differently: stay on a token that has weight.
    last = ((inner > 0) * torch.arange(_GROUP, device=weights.device)).amax(-1, keepdim=True)
    return members.gather(1, place.minimum(last)).squeeze(1)
