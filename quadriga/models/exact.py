"""Exact computation: the same bits for a token in generation and in training, alone and in any batch.

It is a property of a process, like PyTorch's own deterministic mode: a worker sets it when it starts (`trainer.deterministic`),
before models are made, and the parts that compute ask for it. On CUDA it means: matrix products by `kernels.linear`, attention
over whole rows in one order (`kernels.attention`), log-probs of sampled tokens by the trainer's own kernel, micro-batches whose
size depends on nothing that is measured. On a CPU it changes nothing.
"""

from __future__ import annotations

from typing import Any

from quadriga.config.exactness import EXACT_FAMILIES
from quadriga.errors import ConfigError, WorkerError

_state = {"exact": False}


def set_exact(exact: bool) -> None:
    """Whether what is made and computed in this process from now on is exact."""
    _state["exact"] = exact


def is_exact() -> bool:
    return _state["exact"]


def check_family(config: Any) -> None:
    """ConfigError where computation is to be exact and a model of this Hugging Face config is not."""
    if is_exact() and config.model_type not in EXACT_FAMILIES:
        raise ConfigError(
            f"trainer.deterministic=exact does not hold: the model is of the family {config.model_type}",
            f"use one of {', '.join(EXACT_FAMILIES)}, or trainer.deterministic=fast",
        )


def check_gap(gap: float | None) -> None:
    """WorkerError where computation is to be exact and the log-probs of rollout and trainer, of the same weights, differ."""
    if is_exact() and gap:
        raise WorkerError(
            f"trainer.deterministic=exact was promised, but log-probs of rollout and trainer differ by {gap:.3g} on average",
            "a kernel on this device does not keep its order of summation: run pytest -m gpu tests/gpu/test_exact_gpu.py, "
            "and go on with trainer.deterministic=fast",
        )
