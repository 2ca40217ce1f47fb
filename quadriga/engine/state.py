"""The engine's state for a checkpoint: sharded tensors under names that do not depend on the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from quadriga.accelerator import random_state, restore_random_state
from quadriga.errors import CheckpointError

if TYPE_CHECKING:
    from quadriga.engine.engine import TrainingEngine


def engine_state(engine: TrainingEngine) -> dict[str, Any]:
    """`model`, `optimizer` (tensors, or DTensors that torch.distributed.checkpoint can load into another world size),
    `schedule`, `counters`, and `rng`, this rank's random state."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(engine.model),
        "counters": {
            "optimizer_steps": engine.optimizer_steps,
            "nonfinite_total": engine.nonfinite.total,
            "nonfinite_in_a_row": engine.nonfinite.in_a_row,
            "token_limit": engine.budget.limit,
        },
        "rng": random_state(engine.device),
    }
    if engine.optimizer is not None and engine.schedule is not None:
        _make_moments(engine)
        state["optimizer"] = get_optimizer_state_dict(engine.model, engine.optimizer)
        state["schedule"] = {"step": engine.schedule.step}
    return state


def load_engine_state(engine: TrainingEngine, state: dict[str, Any]) -> None:
    """Inverse of `engine_state`. CheckpointError if the state is of another model, or lacks an optimiser."""
    optimizer, schedule = engine.optimizer, engine.schedule
    _make_moments(engine)
    if optimizer is not None and "optimizer" not in state:
        raise CheckpointError("the state has no optimiser", "load it into an engine without one, or take another state")
    try:
        set_model_state_dict(engine.model, state["model"], options=StateDictOptions(strict=True))
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the state does not fit {type(engine.model.huggingface).__name__}: {error}",
            "resume with the model that the run was started with",
        ) from error
    if optimizer is not None and schedule is not None:
        set_optimizer_state_dict(engine.model, optimizer, state["optimizer"])
        # The learning rate is a function of the step and the configuration: the configuration of the resumed run counts.
        schedule.move_to(state["schedule"]["step"])
    counters = state["counters"]
    engine.optimizer_steps = counters["optimizer_steps"]
    engine.nonfinite.total, engine.nonfinite.in_a_row = counters["nonfinite_total"], counters["nonfinite_in_a_row"]
    engine.budget.limit = counters["token_limit"]
    restore_random_state(state["rng"], engine.device)


def _make_moments(engine: TrainingEngine) -> None:
    """Give an optimiser that has not stepped the state it would have, all zero.

    torch makes missing state by a step without gradient, and counts it; it must not count.
    """
    if engine.optimizer is not None and not engine.optimizer.state:
        get_optimizer_state_dict(engine.model, engine.optimizer)
        for moments in engine.optimizer.state.values():
            moments["step"].zero_()
