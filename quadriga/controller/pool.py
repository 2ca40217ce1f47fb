"""A resource pool: how many worker slots on how many nodes. Pure arithmetic; nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.errors import ConfigError


class ResourcePool:
    """Slots per node, e.g. `[8, 8]`: two nodes with eight slots each. A slot is one device and one process on it.

    Args:
        process_on_nodes: slots on each node; entries may differ.
        max_colocate_count: how many worker groups may share a slot, each with processes of its own.
        n_gpus_per_node: devices that a node has; for information only.
    """

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store: list[int] = []
        for slots in process_on_nodes or ():
            self.add_node(slots)
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count is {max_colocate_count}", "give at least 1")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        if isinstance(process_count, bool) or not isinstance(process_count, int) or process_count < 1:
            raise ConfigError(
                f"a pool cannot have {process_count!r} slots on a node", "give a whole number of at least 1 per node"
            )
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        return self._store

    def __call__(self) -> list[int]:
        return self._store

    def local_world_size_list(self) -> list[int]:
        """For each rank, how many ranks its node has."""
        return [slots for slots in self._store for _ in range(slots)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number among the ranks of its node."""
        return [local for slots in self._store for local in range(slots)]
