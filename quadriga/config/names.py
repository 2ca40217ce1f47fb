"""Names that a key may take where the user can add to them: estimators, losses, KL estimators, managers, sinks.

The configuration must be able to refuse a misspelt name before anything heavy is imported, so the built-in names are
listed here; tests hold the lists equal to the registries of the rooms that implement them.
"""

from __future__ import annotations

GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "grpo_passk", "gpg")
"""They compare a response with the others to the same prompt: a lone response has advantage 0."""

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "grpo_passk",
    "gpg",
)
POLICY_LOSSES = ("vanilla", "gspo", "cispo", "gpg", "geo_mean")
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_LOSSES = KL_ESTIMATORS + tuple(f"{name}+" for name in KL_ESTIMATORS)
LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
DPO_LOSSES = ("sigmoid", "ipo")
REWARD_MANAGERS = ("naive", "dapo", "batch")
METRIC_SINKS = ("console", "tensorboard", "wandb", "mlflow")

_ADDED: dict[str, set[str]] = {}


def allow_name(path: str, name: str) -> None:
    """Let the key `path` take `name` too: for a registry's decorator, so that names a user registers are accepted."""
    _ADDED.setdefault(path, set()).add(name)


def added_names(path: str) -> set[str]:
    """What `allow_name` has added for this key in this process."""
    return _ADDED.get(path, set())
