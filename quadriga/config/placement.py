"""Which pools a run has, and which role lives in which. Plan, checks and trainer all ask here.

`trainer.placement` is one of

- `colocated`: one pool, `global_pool`; all roles share its processes.
- `split`: actor, rollout and reference in `actor_rollout_ref_pool`, critic and reward model in `critic_pool`. Nodes are divided
  in half between them, or the slots of a single node; of an odd number the actor gets one more.
- explicit: `{pools: {name: [slots per node, …], …}, roles: {role: pool, …}}`. Here `rollout` may have a pool of its own: then the
  actor only trains, and pushes its weights to the engines there.

In the first two, a reward model with `reward_model.enable_resource_pool` has `reward_pool` to itself, and local teachers with
`distillation.nnodes` above 0 have `teacher_pool`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import Any

from quadriga.config.distillation import teachers_of
from quadriga.config.needs import need_critic, need_reference_policy, need_reward_model
from quadriga.errors import ConfigError

ACTOR, ROLLOUT, CRITIC, REFERENCE, REWARD = "actor_rollout", "rollout", "critic", "ref", "rm"
TEACHER = "teacher"
KINDS = ("colocated", "split")
KEY = "trainer.placement"


class Role(Enum):
    """What a worker is for; `str(Role.Critic)` is its name in a placement."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Env = 7
    Teacher = 8

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.Env: "env",
    Role.Teacher: "teacher",
}


@dataclass(frozen=True)
class Placement:
    """Pools by name with their slots per node, and the pool of each role."""

    pools: dict[str, list[int]]
    role_pool: dict[str, str]

    def slots(self, role: str) -> int:
        """Worker processes of a role."""
        return sum(self.pools[self.role_pool[role]])

    @property
    def generator(self) -> str:
        """The role that generates: the actor itself, or a rollout in another pool."""
        return ROLLOUT if ROLLOUT in self.role_pool else ACTOR

    def roles_in(self, pool: str) -> list[str]:
        return [role for role, home in self.role_pool.items() if home == pool]


def roles_of(config: Any) -> list[str]:
    """The roles that a configuration needs. With LoRA the actor without its adapter is the reference."""
    roles = [ACTOR]
    if need_critic(config):
        roles.append(CRITIC)
    if need_reference_policy(config) and config.actor_rollout_ref.model.lora_rank == 0:
        roles.append(REFERENCE)
    if need_reward_model(config):
        roles.append(REWARD)
    if any(teacher.is_local for teacher in teachers_of(config)):
        roles.append(TEACHER)
    return roles


def placement_of(config: Any) -> Placement:
    """The placement of a configuration. ConfigError if it cannot be; see the module's docstring."""
    chosen, roles = config.trainer.placement, roles_of(config)
    if not isinstance(chosen, str):
        return _explicit(chosen, roles)
    nodes, slots = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if chosen == "colocated":
        pools, homes = {"global_pool": [slots] * nodes}, dict.fromkeys(roles, "global_pool")
    elif chosen == "split":
        first, second = _halves(nodes, slots)
        pools = {"actor_rollout_ref_pool": first, "critic_pool": second}
        homes = {r: "actor_rollout_ref_pool" if r in (ACTOR, REFERENCE, TEACHER) else "critic_pool" for r in roles}
    else:
        raise ConfigError(f"{KEY}={chosen!r} is unknown", f"set it to {' or '.join(KINDS)}, or give pools and roles")
    own = config.reward_model
    if REWARD in roles and own.enable_resource_pool:
        pools["reward_pool"] = [own.n_gpus_per_node] * own.nnodes
        homes[REWARD] = "reward_pool"
    if TEACHER in roles and config.distillation.nnodes > 0:
        pools["teacher_pool"] = [config.distillation.n_gpus_per_node] * config.distillation.nnodes
        homes[TEACHER] = "teacher_pool"
    return _checked(Placement(pools, homes))


def learning_slots(config: Any) -> int:
    """By what the rows of a mini-batch must divide: the workers of the actor, and of the critic where there is one."""
    placement = placement_of(config)
    return lcm(*(placement.slots(role) for role in (ACTOR, CRITIC) if role in placement.role_pool))


def _halves(nodes: int, slots: int) -> tuple[list[int], list[int]]:
    if nodes > 1:
        return [slots] * (nodes - nodes // 2), [slots] * (nodes // 2)
    if slots < 2:
        raise ConfigError(
            f"{KEY}=split divides slots between actor and critic, and there is one slot "
            "(trainer.nnodes=1, trainer.n_gpus_per_node=1)",
            "set trainer.n_gpus_per_node to 2 or more, or trainer.placement=colocated",
        )
    return [slots - slots // 2], [slots // 2]


def _explicit(chosen: Mapping[str, Any], roles: list[str]) -> Placement:
    unknown = sorted(set(chosen) - {"pools", "roles"})
    if unknown or "pools" not in chosen or "roles" not in chosen:
        raise ConfigError(
            f"{KEY} must have the keys pools and roles, got {', '.join(chosen) or 'none'}",
            "e.g. {pools: {policy: [4], value: [2]}, roles: {actor_rollout: policy, critic: value}}",
        )
    pools = {}
    for name, sizes in chosen["pools"].items():
        sizes = [sizes] if isinstance(sizes, int) else list(sizes)
        if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
            raise ConfigError(f"{KEY}.pools.{name}={sizes} is not a list of slots per node", "e.g. [8, 8]")
        pools[name] = sizes
    given = dict(chosen["roles"])
    for role in roles:
        if role not in given:
            raise ConfigError(f"{KEY}.roles does not say where {role} lives", f"add {role}: one of {', '.join(pools)}")
    for role in given:
        if role not in (ACTOR, ROLLOUT, CRITIC, REFERENCE, REWARD, TEACHER):
            raise ConfigError(f"{KEY}.roles: there is no role {role!r}", f"the run has {', '.join(roles)}")
    if given.get(ROLLOUT, given[ACTOR]) != given[ACTOR]:
        roles = [*roles, ROLLOUT]
    return _checked(Placement(pools, {role: given[role] for role in roles}))


def _checked(placement: Placement) -> Placement:
    for role, pool in placement.role_pool.items():
        if pool not in placement.pools:
            raise ConfigError(
                f"{KEY}: {role} is to live in the pool {pool!r}, which does not exist",
                f"use one of {', '.join(placement.pools)}",
            )
    for pool in placement.pools:
        if not placement.roles_in(pool):
            raise ConfigError(
                f"{KEY}: no role is placed in the pool {pool!r}",
                "remove it, map a role to it, or use trainer.placement=colocated (split needs a critic or a reward model)",
            )
    return placement
