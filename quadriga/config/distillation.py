"""The section `distillation`: which teachers there are, who teaches which row, and whether it all fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quadriga.errors import ConfigError

SELF = "self"
"""The `model_path` of a teacher that is the policy itself, which sees a hint in its prompt."""
_FIELDS = ("key", "model_path", "endpoint", "model", "api_key_env")


@dataclass(frozen=True)
class Teacher:
    """One entry of `distillation.teacher_models`.

    Attributes:
        name: the entry's.
        key: rows whose `distillation.teacher_key` has this value are its; None: the rows of no other teacher.
        model_path: a local model, or `self`; empty with an endpoint.
        endpoint: base address of a server with OpenAI's completions that returns `prompt_logprobs`, e.g. http://host:8000/v1.
        model: the model's name there.
        api_key_env: environment variable that holds the key for it.
    """

    name: str
    key: str | None
    model_path: str = ""
    endpoint: str = ""
    model: str = ""
    api_key_env: str = ""

    @property
    def is_local(self) -> bool:
        """Whether a worker of the role `teacher` holds it."""
        return bool(self.model_path) and self.model_path != SELF


def divergence_of(loss: Any) -> str:
    """The `loss_mode` that holds, of a section `distillation.distillation_loss`."""
    return loss.loss_mode or ("k1" if loss.use_policy_gradient else "k3+")


def teachers_of(config: Any) -> list[Teacher]:
    """The run's teachers, none without distillation. ConfigError for entries that cannot be read."""
    section = config.distillation
    if not section.enabled:
        return []
    if not section.teacher_models:
        raise ConfigError(
            "distillation.enabled=True, but there is no teacher",
            "set distillation.teacher_models.teacher_model.model_path to a model, or .endpoint to a server",
        )
    return [_teacher(name, entry) for name, entry in section.teacher_models.items()]


def _teacher(name: str, entry: Any) -> Teacher:
    where = f"distillation.teacher_models.{name}"
    if not hasattr(entry, "items"):
        raise ConfigError(f"{where}={entry!r} is no section", f"set {where}.model_path")
    given = dict(entry.items())
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"{where} has unknown keys: {', '.join(unknown)}", f"its keys: {', '.join(_FIELDS)}")
    path, endpoint = given.get("model_path") or "", given.get("endpoint") or ""
    if bool(path) == bool(endpoint):
        raise ConfigError(
            f"{where} needs either model_path or endpoint, and has {'both' if path else 'neither'}",
            f"set {where}.model_path to a model (or to {SELF}), or {where}.endpoint to a server",
        )
    if endpoint and not _is_address(endpoint):
        raise ConfigError(
            f"{where}.endpoint={endpoint} is no address of a server", f"write {where}.endpoint=http://host:8000/v1"
        )
    if endpoint and not given.get("model"):
        raise ConfigError(f"{where}.endpoint={endpoint} needs the model's name there", f"set {where}.model")
    key = given.get("key")
    texts = {field: str(given.get(field) or "") for field in ("model_path", "endpoint", "model", "api_key_env")}
    return Teacher(name, None if key is None else str(key), **texts)


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def check_distillation(config: Any) -> None:
    """ConfigError for a combination that cannot work."""
    teachers, loss = teachers_of(config), config.distillation.distillation_loss
    if not teachers:
        return
    keys = [teacher.key for teacher in teachers]
    if len(set(keys)) != len(keys):
        raise ConfigError(
            f"distillation.teacher_models: several teachers have the key {next(k for k in keys if keys.count(k) > 1)}",
            "give each teacher a key of its own; one may have none, for all other rows",
        )
    mode = divergence_of(loss)
    if mode in ("k1", "kl") and not loss.use_policy_gradient:
        raise ConfigError(
            "distillation.distillation_loss.loss_mode=k1 as a loss has an expected gradient of 0: nothing would be learned",
            "set distillation.distillation_loss.use_policy_gradient=True, or loss_mode=k3+",
        )
    if mode.endswith(("_topk", "+")) and loss.use_policy_gradient:
        kind = "a loss on the teacher's top k" if mode.endswith("_topk") else "a loss with a gradient of its own"
        raise ConfigError(
            f"distillation.distillation_loss.loss_mode={mode} is {kind}, not an advantage of sampled tokens",
            "set distillation.distillation_loss.use_policy_gradient=False, or loss_mode=k1",
        )
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature != 1 and any(teacher.endpoint for teacher in teachers):
        raise ConfigError(
            f"actor_rollout_ref.rollout.temperature={temperature}, but a server tells log-probs at temperature 1",
            "set actor_rollout_ref.rollout.temperature=1.0, or use a local teacher",
        )
    hint = config.distillation.hint
    if any(teacher.model_path == SELF for teacher in teachers) and len(teachers) > 1:
        raise ConfigError(
            "a policy that teaches itself is the only teacher", "remove the other distillation.teacher_models"
        )
    if hint != "none" and "{hint}" not in config.distillation.hint_template:
        raise ConfigError(
            f"distillation.hint_template={config.distillation.hint_template!r} has no place for the hint",
            "write {hint} where it belongs",
        )
    if any(teacher.model_path == SELF for teacher in teachers) and hint == "none":
        raise ConfigError(
            "a teacher that is the policy itself says what the policy says: it needs a hint",
            "set distillation.hint=sibling, or to a column of the data",
        )
    if hint == "sibling" and config.actor_rollout_ref.rollout.n < 2:
        raise ConfigError(
            "distillation.hint=sibling shows a successful response to the same prompt, but there is one a prompt",
            "set actor_rollout_ref.rollout.n=2 or more",
        )
