"""How the ranks of a group find each other: through torch's TCPStore, on the one address they use.

By itself torch lets the store listen on every interface, and a port that was found free is taken by somebody else now and
then. So the socket is bound once, to loopback where the group is on one machine and to the first rank's address where it is on
several, and handed to the store as it is. The ranks meet under a secret name that only they were told.

torch's store knows no password, and lists its keys to whoever asks. So the name keeps out whoever connects by mistake (another
group, a run that was given the same port), not an attacker who reaches the port: users of this machine, or of the network
between the nodes. docs/placement.md says so too.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

SECRET = "QUADRIGA_STORE_SECRET"
"""Environment variable with the name under which the ranks meet."""
LISTENER = "QUADRIGA_STORE_FD"
"""Environment variable with the listening socket that rank 0 has inherited from the process that started it."""

PATIENCE_S = 30.0
"""So long may the first process look for what is missing: for a model on the hub it waits some seconds, and the machine may be busy."""

_listener: socket.socket | None = None
_servers: dict[int, Any] = {}
"""Stores that this process has opened, by port. A store ends with the object, so they stay until the process ends."""


def bound_socket(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen()
    return listener


def hold_port(address: str) -> int:
    """Hold a port on `address` for the group that this process is rank 0 of; returns its number."""
    global _listener
    if _listener is None:
        _listener = bound_socket(address)
    return int(_listener.getsockname()[1])


def serve_if_torch_is_there() -> None:
    """Before a worker is made: open the store on the port that is held, so that torch's own rendezvous finds it too.

    A process that has not loaded torch is left without it; `join` opens the store there.
    """
    if "torch" in sys.modules:
        _serve_held()


def _serve_held() -> None:
    global _listener
    if _listener is not None:
        held, _listener = _listener, None
        _serve(held)


def join(device_type: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Make this process rank `rank` of torch's default group, at MASTER_ADDR and MASTER_PORT."""
    import torch.distributed as dist

    from quadriga.accelerator import collectives

    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        store: Any = dist.HashStore()
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            _serve_held()
        if rank == 0 and port not in _servers:
            inherited = os.environ.pop(LISTENER, None)
            _serve(socket.socket(fileno=int(inherited)) if inherited else bound_socket(address, port))
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
        store = dist.PrefixStore(os.environ.get(SECRET, "quadriga"), store)
    dist.init_process_group(collectives(device_type), store=store, rank=rank, world_size=world_size, timeout=timeout)


def outlived_the_first() -> bool:
    """For a process that is to end because of what all have met: torchrun ends the others as soon as one of them is gone, and
    the first might not have told its user yet. True where the first has gone on: it has not met it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    time.sleep(PATIENCE_S)  # in which torchrun ends this process, if the first one has ended
    return True


def _serve(listener: socket.socket) -> None:
    """Open the store on `listener`. It is shared with torch's own rendezvous at the same port (`multi_tenant`)."""
    import torch.distributed as dist

    address, port = listener.getsockname()[:2]
    _servers[port] = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
