"""What a run prints about its workers when they are up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from quadriga.workers.base import WorkerReport


def print_workers(reports: Sequence[WorkerReport], pools: Any) -> None:
    """A table of the live workers, and the pools they sit in."""
    pool_of = {str(role): pool for role, pool in pools.mapping.items()}
    table = Table(title="workers", title_justify="left")
    for column in ("pool", "role", "rank", "host", "pid", "device", "collectives", "threads"):
        table.add_column(column)
    for r in reports:
        table.add_row(
            pool_of[r.role],
            r.role,
            f"{r.rank} of {r.world_size}",
            r.host,
            str(r.pid),
            r.device,
            r.collectives,
            str(r.threads),
        )
    console = Console(width=110)
    for pool, sizes in pools.resource_pool_spec.items():
        console.print(f"{pool}: {list(sizes)} slots per node")
    console.print(table)
