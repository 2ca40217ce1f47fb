"""`verl.trainer.ppo.metric_utils`, `verl.utils.metric`, `verl.utils.debug.metrics`: figures of a batch under verl's names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms.masked import as_bool

# ---- verl.utils.metric


class AggregationType(Enum):
    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_REDUCE: dict[AggregationType, Callable[..., Any]] = {
    AggregationType.MEAN: np.mean,
    AggregationType.SUM: np.sum,
    AggregationType.MIN: np.min,
    AggregationType.MAX: np.max,
}


class Metric:
    """Numbers that are gathered one by one, and how they become one number."""

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[float] = []
        if value is not None:
            (self.extend if isinstance(value, list) else self.append)(value)

    def append(self, value: Any) -> None:
        """Add a number, a tensor of one element, or all that another metric holds."""
        if isinstance(value, Metric):
            self.extend(value)
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"a metric takes single numbers, not a tensor of shape {tuple(value.shape)}")
            value = value.item()
        if not isinstance(value, (int, float, np.ndarray, np.number)):
            raise ValueError(f"a metric takes numbers, not {type(value).__name__}")
        self.values.append(value)  # type: ignore[arg-type]

    def extend(self, values: Metric | Sequence[Any]) -> None:
        if isinstance(values, Metric):
            if values.aggregation is not self.aggregation:
                raise ValueError(f"a {values.aggregation.value} cannot be added to a {self.aggregation.value}")
            values = values.values
        for value in list(values):
            self.append(value)

    def aggregate(self) -> float:
        return _REDUCE[self.aggregation](self.values)

    @staticmethod
    def aggregate_dp(metric_lists: list[Metric]) -> float:
        """One number of what every rank has gathered: sums and means are averaged over ranks first."""
        if len({len(metric.values) for metric in metric_lists}) > 1:
            raise ValueError("every rank must have gathered as many values")
        values, how = np.array([metric.values for metric in metric_lists]), metric_lists[0].aggregation
        if how in (AggregationType.SUM, AggregationType.MEAN):
            values = values.mean(axis=0)
        return _REDUCE[how](values)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], aggregation: str | AggregationType) -> dict[str, Metric]:
        return {key: cls(aggregation, value) for key, value in data.items()}

    def init_list(self) -> Metric:
        return Metric(self.aggregation)


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Lists → numbers, in place: the largest where the key says max, the smallest where it says min, else the mean."""
    for key, values in metrics.items():
        if isinstance(values, Metric):
            metrics[key] = values.aggregate()
        else:
            metrics[key] = (np.max if "max" in key else np.min if "min" in key else np.mean)(values)
    return metrics


# ---- verl.trainer.ppo.metric_utils


def _compute_response_info(batch: Any) -> dict[str, Any]:
    """Lengths `[B]` and the mask of the responses `[B, R]`."""
    width = batch.batch["responses"].shape[-1]
    mask = batch.batch["attention_mask"]
    return {
        "response_mask": mask[:, -width:],
        "prompt_length": mask[:, :-width].sum(-1).float(),
        "response_length": mask[:, -width:].sum(-1).float(),
    }


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {f"{name}/{how}": getattr(values, how)().item() for how in ("mean", "max", "min")}


def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, Any]:
    """Scores, rewards, advantages, returns, values and lengths of a batch."""
    tensors, info = batch.batch, _compute_response_info(batch)
    selected = as_bool(tensors["response_mask"])
    prompt, response = info["prompt_length"], info["response_length"]
    most_prompt, most_response = tensors["attention_mask"].shape[-1] - selected.shape[-1], selected.shape[-1]
    returns = tensors["returns"][selected]
    written = response > 0
    metrics = {
        **_spread("critic/score", tensors["token_level_scores"].sum(-1)),
        **_spread("critic/rewards", tensors["token_level_rewards"].sum(-1)),
        **_spread("critic/advantages", tensors["advantages"][selected]),
        **_spread("critic/returns", returns),
        **_spread("response_length", response),
        "response_length/clip_ratio": (response == most_response).float().mean().item(),
        **_spread("prompt_length", prompt),
        "prompt_length/clip_ratio": (prompt == most_prompt).float().mean().item(),
        "response/aborted_ratio": (~written).float().mean().item(),
    }
    if bool(written.any()):
        metrics |= _spread("response_length_non_aborted", response[written])
    if use_critic:
        values = tensors["values"][selected]
        unexplained = torch.var(returns - values) / (torch.var(returns) + 1e-5)
        metrics |= {**_spread("critic/values", values), "critic/vf_explained_var": (1 - unexplained).item()}
    turns = getattr(batch, "non_tensor_batch", {}) or {}
    if isinstance(turns, dict) and "__num_turns__" in turns:
        counts = np.asarray(turns["__num_turns__"], dtype=float)
        metrics |= {f"num_turns/{how}": float(getattr(counts, how)()) for how in ("min", "max", "mean")}
    return metrics


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> dict[str, Any]:
    """`timing_s/*`, and `timing_per_token_ms/*` for the phases whose work grows with tokens."""
    info = _compute_response_info(batch)
    response = info["response_length"].sum().item()
    tokens = info["prompt_length"].sum().item() + response
    counts = {"gen": response, **dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), tokens)}
    return {
        **{f"timing_s/{name}": seconds for name, seconds in timing_raw.items()},
        **{
            f"timing_per_token_ms/{name}": timing_raw[name] * 1000 / count if count else 0.0
            for name, count in counts.items()
            if name in timing_raw
        },
    }


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, Any]:
    """Tokens of the step, its seconds, and tokens per second and GPU (`perf/throughput`)."""
    tokens, seconds = sum(batch.meta_info["global_token_num"]), timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
    }


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and deviation of each of `reduce_fns` over subsets of `data`, drawn with replacement."""
    generator = np.random.RandomState(seed)
    found: list[list[float]] = [[] for _ in reduce_fns]
    for _ in range(n_bootstrap):
        drawn = [data[i] for i in generator.choice(len(data), subset_size, replace=True)]
        for values, reduce in zip(found, reduce_fns):
            values.append(reduce(drawn))
    return [(float(np.mean(values)), float(np.std(values))) for values in found]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the first row that gave the commonest answer."""
    votes = Counter(row[vote_key] for row in data)
    winner = max(votes, key=votes.__getitem__)
    return next(row[val_key] for row in data if row[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """data source → variable → `mean@n`, `std@n`, and for k = 2, 4, 8 … n `best@k/mean`, `worst@k/mean`, `maj@k/mean` (and
    `/std`) of 1,000 bootstraps; each is computed for every prompt and averaged over the prompts of the source."""
    prompts: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids)):
        for name, values in infos_dict.items():
            prompts[source, uid][name].append(values[row])
    per_source: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for (source, _), columns in prompts.items():
        for variable, values in columns.items():
            if not isinstance(values[0], str):
                for name, figure in _figures_of_a_prompt(values, columns.get("pred"), seed).items():
                    per_source[source][variable][name].append(figure)
    return {
        source: {
            variable: {name: float(np.mean(values)) for name, values in figures.items()}
            for variable, figures in variables.items()
        }
        for source, variables in per_source.items()
    }


def _figures_of_a_prompt(values: list[Any], answers: list[Any] | None, seed: int) -> dict[str, float]:
    n = len(values)
    figures = {f"mean@{n}": float(np.mean(values))}
    if n == 1:
        return figures
    figures[f"std@{n}"] = float(np.std(values))
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]
    for k in sizes:
        best, worst = bootstrap_metric(values, k, [np.max, np.min], seed=seed)
        figures |= {f"best@{k}/mean": best[0], f"best@{k}/std": best[1]}
        figures |= {f"worst@{k}/mean": worst[0], f"worst@{k}/std": worst[1]}
        if answers is not None:
            rows = [{"val": value, "pred": answer} for value, answer in zip(values, answers)]
            vote = partial(calc_maj_val, vote_key="pred", val_key="val")
            ((mean, deviation),) = bootstrap_metric(rows, k, [vote], seed=seed)
            figures |= {f"maj@{k}/mean": mean, f"maj@{k}/std": deviation}
    return figures


# ---- verl.utils.debug.metrics


def calculate_token_list_diff(tensor1: Tensor, tensor2: Tensor, mask: Tensor) -> Tensor:
    """How many of each row's selected tokens differ, `[B]`."""
    return ((tensor1 != tensor2) & as_bool(mask)).sum(-1)


def pearson_correlation_coefficient(tensor1: Tensor, tensor2: Tensor, mask: Tensor) -> float:
    """Of the selected elements; 0 where the shapes differ."""
    if not tensor1.shape == tensor2.shape == mask.shape:
        return 0
    selected = as_bool(mask)
    return float(torch.corrcoef(torch.stack([tensor1[selected], tensor2[selected]]))[0, 1])


def calculate_log_prob_diff(log_probs1: Tensor, log_probs2: Tensor, mask: Tensor) -> Tensor:
    """|a − b| of the selected elements, in one line."""
    return (log_probs1 - log_probs2).abs()[as_bool(mask)]


def calculate_debug_metrics(data: Any) -> dict[str, float]:
    """How far apart the probabilities of rollout and actor are, over the tokens of the responses."""
    tensors = data.batch
    rollout, actor = tensors["rollout_log_probs"].exp(), tensors["old_log_probs"].exp()
    name = next((n for n in ("response_mask", "loss_mask", "attention_mask") if n in tensors.keys()), None)  # noqa: SIM118
    width = tensors["responses"].shape[1]
    mask = torch.ones_like(rollout) if name is None else tensors[name][:, -width:]
    if not bool(as_bool(mask).any()):
        return {"training/rollout_probs_diff_valid": 0}
    difference = calculate_log_prob_diff(actor, rollout, mask)
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std().item(),
        "training/rollout_actor_probs_pearson_corr": pearson_correlation_coefficient(actor, rollout, mask),
    }


def compute_variance_proxy_metrics(batch: Any, gradient_norm: float | None = None) -> dict[str, float]:
    """Nothing: how much of a gradient is noise is not estimated."""
    return {}
