"""What a configuration asks of the routers of a mixture of experts, and whether the model has any."""

from __future__ import annotations

from quadriga.config.model_shape import count_experts, describe
from quadriga.config.schema import Config
from quadriga.config.typed import Problems

AUXILIARY_KEY = "actor_rollout_ref.actor.router_aux_loss_coef"


def report_experts(config: Config, problems: Problems) -> None:
    """Note what is asked of routers that the model, as far as it is on this machine, does not have."""
    model = config.actor_rollout_ref.model
    described = describe(model.path, model.override_config)
    if config.actor_rollout_ref.actor.router_aux_loss_coef and described and not count_experts(described):
        problems.add(*no_routers(model.path))


def no_routers(model: str) -> tuple[str, str]:
    """What is wrong with a loss of the routers of that model, and what to do."""
    return (
        f"{AUXILIARY_KEY} evens the load of experts, and {model} has no router that is known",
        f"leave {AUXILIARY_KEY} at 0, or train a mixture of experts such as Qwen3-MoE, Mixtral or GLM-4-MoE",
    )
