"""Start or join Ray, with errors that say what to do."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import ray

from quadriga.errors import ConfigError, ResourceError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What every client of a Ray cluster asks first; whoever cannot answer it is no cluster."""
NO_CLUSTER = (
    "start one with `ray start --head`, correct ray_kwargs.ray_init.address (or RAY_ADDRESS), or leave both unset"
)


def start_ray(ray_init: dict[str, Any]) -> None:
    """`ray.init(**ray_init)`: a cluster of our own on this machine, or the one at `address` (or RAY_ADDRESS).

    Without an address it is always our own: Ray by itself would join whatever the file `ray_current_cluster` in a folder
    that all users share names, be it long gone or somebody else's.

    Raises:
        ResourceError: no Ray answers at the address, or the cluster runs another version of Ray or Python.
        ConfigError: Ray does not know one of the arguments.
    """
    arguments = dict(ray_init)
    address = str(arguments.get("address") or os.environ.get("RAY_ADDRESS") or "local")
    if address == "local":
        # A cluster of our own, which lives as long as this process: no dashboard to start, no usage reports to send.
        arguments["address"] = address
        arguments.setdefault("include_dashboard", False)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would run its workers at priority 15, behind everything else; training is what this machine is here for.
        os.environ.setdefault("RAY_worker_niceness", "0")
        _provide_token()
    else:
        # For a named address Ray looks for its token file only when told to; without it, it is refused for a long time.
        if _token() is not None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        named = _found_by_ray() if address == "auto" else address
        if named is None:
            raise ResourceError("ray_kwargs.ray_init.address=auto, but no Ray runs on this machine", NO_CLUSTER)
        _refuse_what_is_no_cluster(named)
    try:
        ray.init(**arguments)
    except ConnectionError as error:
        raise ResourceError(f"no Ray cluster at {address}: {error}", NO_CLUSTER) from None
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
    except OSError as error:
        raise ResourceError(
            f"Ray did not start: {error}",
            "set RAY_TMPDIR to a folder that Ray can write to, with a short path and some room",
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"ray_kwargs.ray_init={ray_init}: {error}", "see the arguments of ray.init") from None


# ---- the token without which nobody may talk to Ray -------------------------------------------------------------------


def _token_file() -> Path | None:
    """Where Ray keeps its token; None where this user has no home."""
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return Path(path)
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError:
        return None


def _token() -> str | None:
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    file = _token_file()
    try:
        return file.read_text(encoding="ascii").strip() if file else None
    except (OSError, UnicodeError):
        return None


def _provide_token() -> None:
    """A token that only this user can read, made before Ray makes one that everybody can read.

    Where the home folder cannot be written to, the token lives in the environment of this run's processes alone.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    # Ray would warn that authentication is on, as it should be.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    file = _token_file()
    if os.environ.get("RAY_AUTH_TOKEN"):
        return
    try:
        if file is None:
            raise FileNotFoundError
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if file.stat().st_uid == os.getuid() and file.stat().st_mode & 0o077:
                file.chmod(0o600)
            return
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(secrets.token_hex(32))
    except OSError:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


# ---- somebody else's cluster ------------------------------------------------------------------------------------------


def _found_by_ray() -> str | None:
    """The cluster that Ray means by "auto": RAY_ADDRESS, or one that runs on this machine; None where there is none."""
    from ray._private.services import canonicalize_bootstrap_address  # the search has no public name

    try:
        return canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        return None


def _refuse_what_is_no_cluster(address: str) -> None:
    """Ask what every client asks first, with a deadline: Ray itself would try for a minute and more."""
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
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"no Ray cluster answers at {address}: {error}",
            "check that `ray start --head` runs there and that the port is open, or correct ray_kwargs.ray_init.address",
        ) from None
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # encrypted, with certificates that only Ray knows how to find
    import grpc

    token = _token()
    headers = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(FIRST_CALL)(b"", timeout=ANSWER_TIMEOUT_S, metadata=headers)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise ResourceError(
                    f"the Ray cluster at {address} refuses our token" if token else f"{address} asks for a token",
                    "copy ~/.ray/auth_token of the cluster's head to ~/.ray/auth_token here, or set RAY_AUTH_TOKEN",
                ) from None
            raise ResourceError(
                f"something listens at {address}, but it does not answer like a Ray cluster ({code.name.lower()})",
                NO_CLUSTER,
            ) from None
