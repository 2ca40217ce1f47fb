"""The environment of each worker of a group, computed from where the group's processes have landed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.controller.rendezvous import SECRET
from quadriga.controller.worker import PROTECTED_VARIABLES
from quadriga.errors import ConfigError, ResourceError

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def refuse_protected(worker_env: Mapping[str, str]) -> None:
    touched = sorted(PROTECTED_VARIABLES & set(worker_env))
    if touched:
        raise ConfigError(
            f"Cannot override protected system env: {{{', '.join(touched)}}}",
            "remove them from worker_env: the group sets them",
        )


def rank_environments(
    places: Sequence[Mapping[str, Any]],
    device: str,
    prefix: str,
    node_slots: Mapping[str, int] | None = None,
    port: int = 0,
    secret: str = "",
) -> list[dict[str, str]]:
    """Variables for each rank.

    Args:
        places: what `Slot.where` told, in rank order.
        device: cuda, npu or cpu.
        prefix: the group's name prefix.
        node_slots: slots on each node, those of other pools included; by default only this group is counted.
        port: where the first rank listens.
        secret: the name under which the ranks meet.

    Raises:
        ResourceError: GLOO_SOCKET_IFNAME names an interface that a node does not have.
    """
    nodes = [place["node_id"] for place in places]
    one_node = len(set(nodes)) == 1
    master = master_address(places)
    environments = []
    for rank, place in enumerate(places):
        local_rank, local_size = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(_device_number(place, device, local_rank)),
            "LOCAL_WORLD_SIZE": str(local_size),
            "RAY_LOCAL_RANK": str(local_rank),
            "RAY_LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            SECRET: secret,
            "WG_PREFIX": prefix,
            "WG_BACKEND": "ray",
            "QUADRIGA_DEVICE": device,
        }
        if device == "cpu":
            # Ray has set OMP_NUM_THREADS from the CPUs it booked, which says nothing about the cores there are.
            threads = str(max(1, place["cores"] // max(local_size, (node_slots or {}).get(nodes[rank], 0))))
            variables.update(dict.fromkeys(THREAD_VARIABLES, threads))
        # Left to itself, gloo asks for the host's name, which on many machines means 127.0.0.1 or nothing at all.
        # The user's own choice stands, except loopback between nodes: it can connect no two of them, and is inherited
        # wherever Ray was started by a process that once ran a group alone.
        refuse_unknown_interfaces(place["chosen_interface"], place["interfaces"], f"the node {place['node_ip']}")
        interface = "lo" if one_node else place["interface"]
        if interface and place["chosen_interface"] in (None, "", "lo"):
            variables["GLOO_SOCKET_IFNAME"] = interface
        environments.append(variables)
    return environments


def master_address(places: Sequence[Mapping[str, Any]]) -> str:
    """Where the first rank listens. On one node nothing needs to leave the machine, and loopback works where the host
    name does not resolve."""
    return "127.0.0.1" if len({place["node_id"] for place in places}) == 1 else places[0]["node_ip"]


def refuse_unknown_interfaces(chosen: str | None, known: Sequence[str], where: str) -> None:
    """ResourceError if `chosen`, the value of GLOO_SOCKET_IFNAME, names what is not among the interfaces `known`."""
    unknown = [name for name in (chosen or "").split(",") if name and name not in known]
    if unknown:
        raise ResourceError(
            f"GLOO_SOCKET_IFNAME={chosen}: {where} has no network interface {unknown[0]!r}, only {', '.join(known)}",
            "unset GLOO_SOCKET_IFNAME, or name one of these",
        )


def _device_number(place: Mapping[str, Any], device: str, local_rank: int) -> int:
    """The number torch must use: Ray shows each worker its own device as number 0, unless it was told not to."""
    if device == "cpu":
        return local_rank
    if not place["noset"]:
        return 0
    ids = place["accelerator_ids"].get({"cuda": "GPU", "npu": "NPU"}[device]) or [local_rank]
    return int(ids[0])
