"""What the model's shape must allow: workers that share sequences or copies of the weights, and losses of routers."""

from __future__ import annotations

from quadriga.config.model_shape import count_experts, describe
from quadriga.config.schema import Config
from quadriga.config.typed import Problems

SEQUENCE_KEY = "ulysses_sequence_parallel_size"


def report_parallel(section: str, workers: int, sharing: int, copy: int, path: str, problems: Problems) -> None:
    """Note what does not divide, with the nearest numbers that do.

    Args:
        section: the keys' section.
        sharing, copy: values of the two keys.
        path: the model; its heads are looked at if its folder is here.
    """
    key, size_key = f"{section}.{SEQUENCE_KEY}", f"{section}.fsdp_config.fsdp_size"
    if copy == 0 or (0 < copy < workers and workers % copy):
        problems.add(
            f"{size_key}={copy} does not divide the {workers} workers of {section}",
            f"set it to {_nearest_divisors(workers, copy)}, or -1 for all of them",
        )
    if sharing == 1:
        return
    if workers % sharing:
        problems.add(
            f"{key}={sharing} does not divide the {workers} workers of {section}",
            f"set it to {_nearest_divisors(workers, sharing)}",
        )
        return
    described = describe(path)
    heads: int = described.get("num_attention_heads") or 0  # 0: not known here
    if heads and (problem := heads_problem(sharing, heads, described.get("num_key_value_heads") or heads)):
        problems.add(f"{key}={sharing} {problem[0]}", problem[1])


def heads_problem(size: int, heads: int, key_heads: int) -> tuple[str, str] | None:
    """What is wrong with sharing a model's heads among `size` ranks, and what to do; None if nothing is."""

    def fits(s: int) -> bool:
        return heads % s == 0 and (key_heads % s == 0 or s % key_heads == 0)

    if fits(size):
        return None
    near = [max((s for s in range(1, size) if fits(s)), default=1)]
    near += [s for s in range(size + 1, heads + 1) if fits(s)][:1]
    what = f"does not share out {heads} attention heads with {key_heads} heads of keys and values evenly"
    return what, f"set it to {' or '.join(map(str, near))}"


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    near = [d for d in divisors if d <= wanted][-1:] + [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, near))


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
