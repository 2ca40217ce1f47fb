"""The section `global_profiler`, and the `profiler` of each role."""

from __future__ import annotations

from typing import Any

from quadriga.config.typed import Problems

SECTIONS = {
    "actor_rollout": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "rm": "reward_model",
    "teacher": "distillation",
}
"""Role → the section that has its `profiler`."""


def profiler_section(config: Any, role: str) -> Any | None:
    """The `profiler` of a role; None for one that has none."""
    if role not in SECTIONS:
        return None
    node = config
    for part in SECTIONS[role].split("."):
        node = getattr(node, part)
    return node.profiler


def report_profiling(config: Any, roles: list[str], problems: Problems) -> None:
    """Note a profile that nobody would write."""
    profiler = config.global_profiler
    if profiler.tool is None:
        return
    if not profiler.steps:
        problems.add(
            f"global_profiler.tool={profiler.tool}, but global_profiler.steps names no step",
            "set global_profiler.steps, e.g. to [2,5]",
        )
    sections = [profiler_section(config, role) for role in roles]
    if not any(section is not None and section.enable and (section.all_ranks or section.ranks) for section in sections):
        keys = ", ".join(f"{SECTIONS[role]}.profiler.enable" for role in roles if role in SECTIONS)
        problems.add(
            f"global_profiler.tool={profiler.tool}, but no role of this run is to be profiled",
            f"set one of {keys} to True",
        )
