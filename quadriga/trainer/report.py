"""What a run says about its workers when they are up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.workers.base import WorkerReport


def describe_workers(
    reports: Sequence[WorkerReport], pool_of: Mapping[Any, str], sizes: Mapping[str, Sequence[int]]
) -> str:
    """The pools with their slots, the roles in each, and the processes that hold them."""
    pools = {str(role): pool for role, pool in pool_of.items()}
    lines = []
    for pool, slots in sizes.items():
        members = [r for r in reports if pools[r.role] == pool]
        roles = ", ".join(dict.fromkeys(r.role for r in members))
        places = {f"{r.host} pid {r.pid}": None for r in members}
        shown = ", ".join(list(places)[:4]) + (f", … {len(places) - 4} more" if len(places) > 4 else "")
        kind = f"{members[0].device}, {members[0].collectives}, {members[0].threads} threads" if members else "unused"
        lines.append(f"{pool} {list(slots)}: {roles} in {len(places)} processes ({kind}): {shown}")
    return "\n".join(lines)
