"""Values without effect: a key that the user set although the switch it hangs on is off.

Most keys say in the schema when they are read (`only_if`): one condition or several, with ` and ` between those that must all
hold and ` or ` between those of which one will do.

    algorithm.use_kl_in_reward=True     the key has this value
    .loss_mode=dppo_tv|dppo_kl          one of these; a key with a dot in front lies in the same section
    .on_error!=stop                     any other
    .rollout_is                         any but null, 0, False and empty
    .path=null                          none

A value of the user's own (module:function) where names are listed may need any key, so it satisfies every condition. Here is
how conditions are judged, and the few rules that ask for more than values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from quadriga.config.fields import spec_of
from quadriga.config.needs import need_critic, need_reference_policy, need_reward_model, uses_token_budget
from quadriga.config.schema import Config
from quadriga.config.typed import Problems, all_keys, get_key, hints_of


class Atom(NamedTuple):
    """A condition on one key. No values: it must be set."""

    key: str
    values: tuple[str, ...] = ()
    wanted: bool = True

    @classmethod
    def read(cls, text: str, section: str) -> Atom:
        key, _, values = text.partition("=")
        name = key.removesuffix("!")
        place = f"{section}{name}" if name.startswith(".") else name
        return cls(place.lstrip("."), tuple(values.split("|")) if values else (), not key.endswith("!"))

    def holds(self, config: Any) -> bool:
        value = get_key(config, self.key)
        if not self.values:
            return bool(value)
        schema: type = type(config)
        spec = all_keys(schema)[self.key].spec
        if spec.own and spec.choices and value not in spec.choices:
            return True
        return (_text(value) in self.values) == self.wanted

    @property
    def switch(self) -> str:
        """What makes it hold."""
        if not self.values:
            return self.key
        if not self.wanted:
            opposite = {"True": "False", "False": "True"}.get(self.values[0])
            return f"{self.key}={opposite}" if opposite else f"{self.key} to anything but {_either(self.values)}"
        return f"{self.key}={self.values[0]}" if len(self.values) == 1 else f"{self.key} to {_either(self.values)}"


class Need(NamedTuple):
    """One of these must hold, or the key is not read."""

    atoms: tuple[Atom, ...]
    zero_is_off: bool

    def holds(self, config: Any) -> bool:
        return any(atom.holds(config) for atom in self.atoms)

    def why(self, config: Any) -> str:
        """The state of affairs in which it does not hold."""
        return " and ".join(dict.fromkeys(f"{a.key}={_text(get_key(config, a.key))}" for a in self.atoms))

    @property
    def switch(self) -> str:
        return " or ".join(atom.switch for atom in self.atoms)


@cache
def needs_of(schema: type) -> Mapping[str, tuple[Need, ...]]:
    """Every key with `only_if` → what must hold, that of its sections first."""
    return dict(_needs(schema, "", ()))


def _needs(cls: type, section: str, outer: tuple[Need, ...]) -> Iterator[tuple[str, tuple[Need, ...]]]:
    for declared in fields(cls):
        hint, spec = hints_of(cls)[declared.name], spec_of(declared)
        path = f"{section}.{declared.name}".lstrip(".")
        clauses = spec.only_if.split(" and ") if spec.only_if else []
        own = tuple(Need(tuple(Atom.read(a, section) for a in c.split(" or ")), spec.zero_is_off) for c in clauses)
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _needs(hint, path, outer + own)
        elif outer + own:
            yield path, outer + own


class Rule(NamedTuple):
    """What no condition on values says: keys (`section.*`: all in it), when they are idle, why, and the switch."""

    keys: str
    idle: Callable[[Config], bool]
    why: str
    switch: str


def _no_token_budget(config: Config) -> bool:
    """Whether all passes have a fixed number of rows; all follow the actor's budget unless they set their own."""
    policy = config.actor_rollout_ref
    sections: list[Any] = [policy.actor, policy.rollout, *[policy.ref] * need_reference_policy(config)]
    sections += [config.critic] * need_critic(config) + [config.reward_model] * need_reward_model(config)
    return not any(map(uses_token_budget, sections))


def _has_endpoint(config: Config) -> bool:
    entries = config.distillation.teacher_models.values()
    return any(hasattr(entry, "get") and entry.get("endpoint") for entry in entries)


RULES: tuple[Rule, ...] = (
    Rule(
        "critic.* trainer.critic_warmup",
        lambda config: not need_critic(config),
        "there is no critic in this run",
        "algorithm.adv_estimator=gae",
    ),
    # Where a reference keeps its weights (ref.fsdp_config) says nothing about the run where there is none, or where with
    # LoRA it is the actor without its adapter: it is no mistake to have said it.
    Rule(
        "actor_rollout_ref.ref.log_prob_*",
        lambda config: not need_reference_policy(config),
        "there is no reference in this run",
        "actor_rollout_ref.actor.use_kl_loss=True",
    ),
    Rule(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        _no_token_budget,
        "passes have a fixed number of rows",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
    ),
    Rule(
        "custom_reward_function.name",
        lambda config: ":" in (config.custom_reward_function.path or ""),
        "the path names the function already",
        "custom_reward_function.path without the part from the colon on",
    ),
    Rule(
        "distillation.timeout_s distillation.max_concurrent",
        lambda config: config.distillation.enabled and not _has_endpoint(config),
        "no teacher is a server",
        "distillation.teacher_models.NAME.endpoint",
    ),
)
SWITCHES = ("critic.enable",)
"""Keys of an idle section that are its switch, not a part of it."""


def report_values_without_effect(config: Any, set_by_user: Collection[str], problems: Problems) -> None:
    """One problem for each reason, naming all the keys it hits."""
    for (why, switch), paths in values_without_effect(config, set_by_user).items():
        listed = ", ".join(f"{path}={get_key(config, path)}" for path in paths)
        has, it = ("has", "it") if len(paths) == 1 else ("have", "them")
        problems.add(f"{listed} {has} no effect: {why}", f"remove {it}, or set {switch}")


def values_without_effect(config: Any, set_by_user: Collection[str]) -> dict[tuple[str, str], list[str]]:
    """(why, the switch that would change it) → the keys, of those set by the user, that have no effect."""
    hits: dict[tuple[str, str], list[str]] = {}
    schema: type = type(config)
    rules = [rule for rule in RULES if schema is Config and rule.idle(config)]
    for path in sorted(set(set_by_user) - set(SWITCHES)):
        rule = next((r for r in rules if any(fnmatchcase(path, keys) for keys in r.keys.split())), None)
        if rule is not None:
            hits.setdefault((rule.why, rule.switch), []).append(path)
            continue
        unmet = next((need for need in needs_of(schema).get(path, ()) if not need.holds(config)), None)
        if unmet is not None and not (unmet.zero_is_off and _is_off(get_key(config, path))):
            hits.setdefault((unmet.why(config), unmet.switch), []).append(path)
    return hits


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _either(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]


def _is_off(value: Any) -> bool:
    """0, null, or a section of nothing else."""
    if isinstance(value, dict):
        return all(map(_is_off, value.values()))
    return value is None or value == 0
