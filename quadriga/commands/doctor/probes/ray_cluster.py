"""Probe: `ray_cluster.py ADDRESS [deep]` connects to a cluster and lists its nodes; deep asks each for its software.

Every step is announced before it is taken, since Ray may wait in one of them until the doctor kills this process.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
import threading
from importlib import metadata
from urllib.parse import urlsplit

TCP_TIMEOUT_S = 3.0
PACKAGES = ("torch", "transformers", "quadriga")


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def reach_tcp(address: str) -> None:
    """Fail at once, and with a plain reason, where Ray would retry for a minute."""
    scheme, default_port = ("", 10001) if "://" in address else ("tcp://", 6379)
    parts = urlsplit(scheme + address)
    say(stage="tcp", error=f"{parts.hostname} does not answer")
    try:
        socket.create_connection((parts.hostname, parts.port or default_port), TCP_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        say(error=str(error))
        sys.exit(1)


def watch_ray_log() -> None:
    """Report why Ray keeps retrying: it logs the reason to stderr, waits a minute and then raises an error without it.

    A refused token will not become right by waiting, so that ends the probe at once.
    """
    read_end, write_end = os.pipe()
    real_stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    os.dup2(write_end, sys.stderr.fileno())

    def watch() -> None:
        for line in os.fdopen(read_end, errors="replace"):
            print(line, end="", file=real_stderr, flush=True)
            _, found, reason = line.partition("Failed to get cluster ID from GCS server: ")
            if found:
                say(error=f"Ray does not answer as expected: {reason.strip()}")
            if "Unauthenticated" in reason:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def list_nodes() -> None:
    import ray

    nodes = [
        {
            "name": node["NodeManagerHostname"] or node["NodeManagerAddress"],
            "alive": node["Alive"],
            "CPU": node["Resources"].get("CPU", 0),
            "GPU": node["Resources"].get("GPU", 0),
        }
        for node in ray.nodes()
    ]
    say(nodes=nodes, ray=ray.__version__, python=platform.python_version())


def software() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def ask_every_node() -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(software)
    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answers[f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"] = ask.options(
                scheduling_strategy=here
            ).remote()
    say(software=dict(zip(answers, ray.get(list(answers.values())))))


def main() -> None:
    address = sys.argv[1]
    if address != "auto":
        reach_tcp(address)
    say(stage="ray", error=None)
    watch_ray_log()
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # reported to the doctor, which decides
        say(error=" ".join(str(error).split())[:400])
        sys.exit(1)
    list_nodes()
    if "deep" in sys.argv[2:]:
        ask_every_node()
    ray.shutdown()


if __name__ == "__main__":
    main()
