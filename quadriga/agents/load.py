"""Agents by name: those built in, those of `agent_loop_config_path`, and `file.py:name`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quadriga.agents.policy import Policy
from quadriga.agents.task import Task
from quadriga.errors import ConfigError
from quadriga.registry import import_named

Agent = Callable[[Task, Policy], Awaitable[Any]]

SINGLE_TURN, TOOLS = "single_turn", "tools"
BUILT_IN = {
    TOOLS: "quadriga.agents.tool_agent:run",
}
SYNONYMS = {"single_turn_agent": SINGLE_TURN, "tool_agent": TOOLS}
"""verl's names."""
KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"


@dataclass(frozen=True)
class AgentSpec:
    """An agent by the place of its code, `package.module:name` or `file.py:name`, and arguments for it."""

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def plain_name(name: str) -> str:
    return SYNONYMS.get(name, name)


def read_agents(path: str | None) -> dict[str, AgentSpec]:
    """The agents of a YAML file as verl has it: a list of `{name, _target_, …}`, where the rest are arguments."""
    if path is None:
        return {}
    from omegaconf import OmegaConf

    from quadriga.data.files import expand_path

    file = expand_path(path)
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {file}", "correct the path")
    entries = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    agents = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not {"name", "_target_"} <= set(entry):
            raise ConfigError(f"{key}: {file} has an entry without name and _target_: {entry}", "give it both")
        kwargs = {str(k): v for k, v in entry.items() if k not in ("name", "_target_")}
        target = str(entry["_target_"])
        if ":" not in target:  # a dotted name, as Hydra has it
            place, _, attribute = target.rpartition(".")
            target = f"{place}:{attribute}"
        agents[plain_name(str(entry["name"]))] = AgentSpec(target, kwargs)
    return agents


def find_agent(name: str, configured: Mapping[str, AgentSpec]) -> AgentSpec:
    """ConfigError for a name that is none."""
    name = plain_name(name)
    if name in configured:
        return configured[name]
    if name in BUILT_IN:
        return AgentSpec(BUILT_IN[name])
    if ":" in name:
        return AgentSpec(name)
    known = [SINGLE_TURN, *BUILT_IN, *configured]
    nearest = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(
        f"unknown agent {name!r}"
        + (f"; did you mean {nearest[0]!r}?" if nearest else "")
        + f" Known: {', '.join(known)}",
        f"set {KEY}, or the row's column agent_name, to one of them or to your own as file.py:name",
    )


def load_agent(spec: AgentSpec) -> Agent:
    """The agent's code: an `async def run(task, policy)`, a class with such a method, or an environment's class.

    A class is made anew for every episode.
    """
    place, _, attribute = spec.target.rpartition(":")
    found: Any = import_named(place, attribute, KEY)
    kwargs = dict(spec.kwargs)
    if inspect.isclass(found):
        if hasattr(found, "run"):
            return partial(_run_one, partial(found, **kwargs))
        if hasattr(found, "reset") and hasattr(found, "step"):
            from quadriga.agents.environment import play

            return partial(play, partial(found, **kwargs))
        raise ConfigError(
            f"the class {spec.target} is no agent: it has neither `run` nor `reset` and `step`",
            "give it `async def run(self, task, policy)`, or `reset(row)` and `step(text)`",
        )
    if not callable(found):
        raise ConfigError(f"{spec.target} is no agent", "name an `async def run(task, policy)` or a class")
    return partial(found, **kwargs) if kwargs else found


async def _run_one(make: Callable[[], Any], task: Task, policy: Policy) -> Any:
    return await make().run(task, policy)
