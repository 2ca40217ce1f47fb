"""The numbers of a step that follow from its batch."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import torch

from quadriga.protocol import DataProto


def batch_metrics(tensors: Mapping[str, torch.Tensor], max_response_length: int) -> dict[str, float]:
    """Scores, advantages and lengths of a step's rows."""
    mask = tensors["response_mask"].bool()
    scores = tensors["token_level_scores"].sum(1)
    rewards = tensors["token_level_rewards"].sum(1)
    lengths = mask.sum(1).float()
    prompts = (tensors["attention_mask"].sum(1) - mask.sum(1)).float()
    metrics = {
        **_spread("critic/score", scores),
        **_spread("critic/rewards", rewards),
        **_spread("critic/advantages", tensors["advantages"][mask]),
        **_spread("critic/returns", tensors["returns"][mask]),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": float((lengths >= max_response_length).float().mean()),
        **_spread("prompt_length", prompts),
        "perf/total_num_tokens": float(tensors["attention_mask"].sum()),
    }
    if "values" in tensors:
        metrics["critic/vpred_mean"] = float(tensors["values"][mask].mean())
    return metrics


def throughput(metrics: dict[str, float], step_s: float) -> dict[str, float]:
    return {
        "perf/time_per_step": step_s,
        "perf/throughput": metrics["perf/total_num_tokens"] / step_s,
        "perf/max_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


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
