"""Start or join Ray, with errors that say what to do."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import ray

from quadriga.errors import ConfigError, ResourceError

CONNECT_TIMEOUT_S = 5.0


def start_ray(ray_init: dict[str, Any]) -> None:
    """`ray.init(**ray_init)`: a cluster of our own on this machine, or the one at `address` (or RAY_ADDRESS).

    Raises:
        ResourceError: the address cannot be reached, or the cluster runs another version of Ray or Python.
        ConfigError: Ray does not know one of the arguments.
    """
    arguments = dict(ray_init)
    address = arguments.get("address") or os.environ.get("RAY_ADDRESS")
    if address and address not in ("local", "auto"):
        _refuse_unreachable(str(address))
        # For a named address Ray looks for its token file only when told to; without it, it is refused for a long time.
        if (Path.home() / ".ray" / "auth_token").exists():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    elif address != "auto":
        # A cluster of our own, which lives as long as this process: no dashboard to start, no usage reports to send.
        arguments.setdefault("include_dashboard", False)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would run its workers at priority 15, behind everything else; training is what this machine is here for.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(**arguments)
    except ConnectionError as error:
        raise ResourceError(
            f"no Ray cluster at {address or 'this machine'}: {error}",
            "start one with `ray start --head`, correct ray_kwargs.ray_init.address (or RAY_ADDRESS), or leave both unset",
        ) from None
    except RuntimeError as error:
        text = str(error)
        if "ersion mismatch" in text:
            raise ResourceError(
                f"the cluster at {address} runs other versions: {' '.join(text.split())}",
                "install the cluster's Ray and Python versions here, or the other way round",
            ) from None
        if "nknown keyword argument" in text:
            raise ConfigError(f"ray_kwargs.ray_init: {text}", "see the arguments of ray.init") from None
        raise ResourceError(f"Ray did not start: {text}", "`quadriga doctor --deep` tries this in isolation") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"ray_kwargs.ray_init={ray_init}: {error}", "see the arguments of ray.init") from None


def _refuse_unreachable(address: str) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address}: the driver must run inside the cluster, not behind Ray Client",
            "run on a node of the cluster, or use `ray job submit`; then set ray_kwargs.ray_init.address=auto",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"ray_kwargs.ray_init.address={address!r} is not host:port", "e.g. 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ResourceError(
            f"no Ray cluster answers at {address}: {error}",
            "check that `ray start --head` runs there and that the port is open, or correct ray_kwargs.ray_init.address",
        ) from None
