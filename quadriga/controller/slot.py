"""The process in a slot of a pool: a Ray actor that hosts one or more worker objects, each under a role.

It starts without importing torch, tells where it is, receives its environment, and only then builds its workers, so that
variables such as OMP_NUM_THREADS act on libraries imported later. Calls run one after another on one thread; `control`
calls run beside them, so a busy or stuck slot can still be asked where it stands; a third thread waits for whoever listens to
what a worker gives out meanwhile.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import os
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from typing import Any

import ray

from quadriga.controller import rendezvous
from quadriga.controller.call_record import CallMeter, CallRecord, around_call
from quadriga.controller.device_gate import DEVICE_GATE

SIOCGIFADDR = 0x8915
KEPT_CALLS = 4096
"""Calls that a slot remembers until somebody asks what it did when."""


class Slot:
    """Host of the worker objects of one slot."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calling_thread: int | None = None
        self._doing: CallMeter | None = None
        self._calls: deque[CallRecord] = deque(maxlen=KEPT_CALLS)

    @ray.method(concurrency_group="control")
    def where(self) -> dict[str, Any]:
        """Where this process runs and what it sees."""
        context = ray.get_runtime_context()
        node_ip = ray.util.get_node_ip_address()
        return {
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "node_ip": node_ip,
            "interface": interface_of(node_ip),
            "actor_id": context.get_actor_id(),
            "accelerator_ids": context.get_accelerator_ids(),
            "cores": len(os.sched_getaffinity(0)),
            "chosen_interface": os.environ.get("GLOO_SOCKET_IFNAME"),
            "noset": [n for n in os.environ if n.startswith("RAY_EXPERIMENTAL_NOSET_") and os.environ[n]],
            "interfaces": [name for _, name in socket.if_nameindex()],
        }

    @ray.method(concurrency_group="control")
    def hold_port(self, address: str) -> int:
        """Hold a port on `address` for the group that this process is the first of; returns its number."""
        return rendezvous.hold_port(address)

    @ray.method(concurrency_group="control")
    def stacks(self, only_call: bool = False) -> str:
        """The Python stacks of all threads now, or only of the call that is running."""
        names = {t.ident: t.name for t in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            if only_call and ident == self._calling_thread:
                return "".join(traceback.format_stack(frame)[-3:]).rstrip()
            parts.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
        return "  no call is running" if only_call else "\n".join(parts)

    @ray.method(concurrency_group="control")
    def busy(self) -> str:
        """The call that is running, and for how long; empty when there is none."""
        doing = self._doing
        return f"{doing.role}.{doing.method} for {doing.seconds:.1f} s" if doing else ""

    @ray.method(concurrency_group="control")
    def ask(self, role: str, method: str, *args: Any) -> Any:
        """A method of a worker, beside the call that it is busy with: it must be quick and safe to run so."""
        return getattr(self._workers[role], method)(*args)

    @ray.method(concurrency_group="listening")
    def listen(self, role: str, method: str, *args: Any) -> Any:
        """A method of a worker that waits until it has something to tell, for a bounded time."""
        return getattr(self._workers[role], method)(*args)

    @ray.method(concurrency_group="control")
    def take_calls(self) -> list[CallRecord]:
        """The calls that have ended since the last time."""
        return [self._calls.popleft() for _ in range(len(self._calls))]

    def set_environment(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)

    def prepare(self, variables: dict[str, str], preparation: str) -> None:
        """Call a `module:function` that makes ready what the workers to come will need."""
        self._calling_thread = threading.get_ident()
        os.environ.update(variables)
        module, _, function = preparation.partition(":")
        try:
            getattr(importlib.import_module(module), function)()
        finally:
            self._calling_thread = None

    def build(self, role: str, worker_class: type, arguments: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        """Make the worker object of `role` from `(args, kwargs)`."""
        self._calling_thread = threading.get_ident()
        rendezvous.serve_if_torch_is_there()
        args, kwargs = arguments or ((), {})
        self._workers[role] = worker_class(*args, **kwargs)
        self._calling_thread = None

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        self._calling_thread = threading.get_ident()
        meter = self._doing = CallMeter(role, method)
        try:
            worker = self._workers[role]
            with DEVICE_GATE.call(), around_call(worker, method):
                result = getattr(worker, method)(*args, **kwargs)
                if asyncio.iscoroutine(result):
                    self._loop = self._loop or asyncio.new_event_loop()
                    return self._loop.run_until_complete(result)
                return result
        finally:
            self._calling_thread = self._doing = None
            self._calls.append(meter.record())


def interface_of(ip: str) -> str | None:
    """The network interface that has this address, where the system tells (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address, or this is not Linux
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


SlotActor: Any = ray.remote(concurrency_groups={"control": 1, "listening": 1}, max_restarts=0)(Slot)  # type: ignore[call-overload]
