"""The numbers of a step that follow from its batch."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quadriga.protocol import DataProto


def batch_metrics(
    tensors: Mapping[str, torch.Tensor], max_response_length: int, max_prompt_length: int
) -> dict[str, float]:
    """Scores, advantages and lengths of a step's rows. A response is all that comes after the prompt, what the policy read too."""
    mask = tensors["response_mask"].bool()
    responses = tensors["attention_mask"][:, -mask.shape[1] :]
    scores = tensors["token_level_scores"].sum(1)
    rewards = tensors["token_level_rewards"].sum(1)
    lengths = responses.sum(1).float()
    prompts = tensors["attention_mask"][:, : -mask.shape[1]].sum(1).float()
    cut = tensors.get("cut_off", lengths >= max_response_length)
    metrics = {
        **_spread("critic/score", scores),
        **_spread("critic/rewards", rewards),
        **_spread("critic/advantages", tensors["advantages"][mask]),
        **_spread("critic/returns", tensors["returns"][mask]),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": float(cut.float().mean()),
        **_spread("prompt_length", prompts),
        "prompt_length/clip_ratio": float((prompts >= max_prompt_length).float().mean()),
        "perf/total_num_tokens": float(tensors["attention_mask"].sum()),
    }
    if "values" in tensors:
        values, returns = tensors["values"][mask], tensors["returns"][mask]
        metrics |= _spread("critic/values", values)
        if values.numel() > 1 and (spread := returns.var()) > 0:
            metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / spread)
    return metrics


LOOP_TOKENS, LONGEST_LOOP, REPEATS = 64, 128, 3
"""A response is repetitive that ends in up to `LONGEST_LOOP` tokens said over and over: `REPEATS` times, and over `LOOP_TOKENS`
tokens, at least. A token in twenty may differ."""


def warning_signs(tensors: Mapping[str, torch.Tensor], group_ids: Sequence[str] | np.ndarray) -> dict[str, float]:
    """What the alarms need to know of a step's rows besides `batch_metrics`.

    Args:
        tensors: response_mask, token_level_scores `[B, R]` and, if there, responses `[B, R]`.
        group_ids: the prompt of each row.
    """
    mask, scores = tensors["response_mask"].bool(), tensors["token_level_scores"].sum(1).double()
    lengths = mask.sum(1).double()
    signs = {}
    if scores.std(correction=0) > 0 and lengths.std(correction=0) > 0:
        signs["reward/length_correlation"] = float(torch.corrcoef(torch.stack([scores, lengths]))[0, 1])
    groups, sizes = np.unique(np.asarray(group_ids, dtype=str), return_inverse=True, return_counts=True)[1:]
    if sizes.max() > 1:
        row_group = torch.from_numpy(groups)
        lowest, highest = (
            torch.zeros(len(sizes), dtype=scores.dtype).scatter_reduce_(0, row_group, scores, how, include_self=False)
            for how in ("amin", "amax")
        )
        signs["reward/equal_groups"] = float((lowest == highest).double().mean())
    if "responses" in tensors:
        signs["response/repetitive"] = float(_ends_in_a_loop(tensors["responses"], mask).double().mean())
    return signs


def _ends_in_a_loop(responses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B]`: rows whose end repeats with some period. Looks at the ends alone."""
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    lengths = torch.where(mask, positions, -1).amax(1) + 1  # an observation may follow what the policy wrote
    seen = min(REPEATS * LONGEST_LOOP, mask.shape[1])
    places = lengths[:, None] - torch.arange(seen, 0, -1)
    tail = responses.gather(1, places.clamp(min=0))
    found = torch.zeros(len(responses), dtype=torch.bool)
    for period in range(1, LONGEST_LOOP + 1):
        window = max(LOOP_TOKENS, REPEATS * period)
        if window > seen:
            break
        # Few rows agree with themselves in their last tokens: the whole window is compared of those alone.
        agrees = (tail[:, -8:] == tail[:, -8 - period : seen - period]).sum(1) >= 6
        rows = (agrees & ~found & (lengths >= window)).nonzero()[:, 0]
        if len(rows):
            end = tail[rows, seen - window :]
            found[rows] = (end[:, period:] == end[:, :-period]).float().mean(1) > 0.95
    return found


def throughput(metrics: dict[str, float], step_s: float, workers: int = 1) -> dict[str, float]:
    """Tokens per second: of one worker under verl's name, of all of them under another."""
    total = metrics["perf/total_num_tokens"] / step_s
    return {
        "perf/time_per_step": step_s,
        "perf/throughput": total / workers,
        "perf/total_throughput": total,
        "perf/max_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def over_batches(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the reward function told of each batch that was generated for a step, as if of one: means, and the largest of `…_max`."""
    values = {name: [m[name] for m in told if name in m] for m in told for name in m}
    return {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}


def mean_over_ranks(told: DataProto) -> dict[str, float]:
    """The metrics that workers put into their answer: one dict, or a list of values per name after collecting ranks."""
    metrics: Any = told.meta_info["metrics"]
    return {k: float(sum(v) / len(v)) if isinstance(v, (list, tuple)) else float(v) for k, v in metrics.items()}


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
