"""Devices by name and their memory, for a plan that is made elsewhere."""

from __future__ import annotations

import difflib

from quadriga.errors import ConfigError

GIB = 1 << 30
GPUS = {
    "rtx3090-24g": 24 * GIB,
    "rtx4090-24g": 24 * GIB,
    "rtx5090-32g": 32 * GIB,
    "l4-24g": 23 * GIB,
    "a10-24g": 23 * GIB,
    "l40s-48g": 45 * GIB,
    "a6000-48g": 48 * GIB,
    "v100-32g": 32 * GIB,
    "a100-40g": 40 * GIB,
    "a100-80g": 80 * GIB,
    "h100-80g": 80 * GIB,
    "h200-141g": 140 * GIB,
    "gh200-96g": 95 * GIB,
    "b200-180g": 179 * GIB,
    "910b-64g": 64 * GIB,
}
"""Bytes that the driver reports, rounded down."""


def gpu_memory(name: str) -> int:
    """Bytes of the device of that name. ConfigError for a name that is not in the table."""
    known = name.lower().replace("_", "-")
    if known in GPUS:
        return GPUS[known]
    near = difflib.get_close_matches(known, GPUS, n=1) or [n for n in GPUS if n.startswith(known.split("-")[0])][:1]
    raise ConfigError(
        f"the GPU {name!r} is not in the table of devices",
        (f"did you mean {near[0]}? " if near else "") + f"known are {', '.join(GPUS)}",
    )
