"""The processes that hold one sharded engine together, and how they talk: rank 0 leads, the others follow.

A set has process groups of its own, apart from those of training. What the leader tells the others goes over gloo; what the
model's layers add up and gather goes over the device's own collectives. Its members sit on one node, so everything listens on
loopback. Nothing waits longer than the deadline: whoever misses a member raises `SetBroken`, and the set is replaced as a whole.
"""

from __future__ import annotations

import json
import math
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.accelerator import CPU
from quadriga.controller.rendezvous import bound_socket
from quadriga.errors import ConfigError, WorkerError
from quadriga.rollout.interface import Completion, Request, SamplingParams

LOOPBACK = "127.0.0.1"
LEAST_PATIENCE_S = 30.0
"""For orders; a leader at rest gives a sign of life every ten seconds."""
ROOM = 1 << 13
"""Bytes of a command that go in one message; a longer one takes a second."""


class SetBroken(WorkerError):
    """A member of a set is gone, hangs, or does something else than the leader: the set cannot go on."""


@dataclass(frozen=True)
class Meeting:
    """Where the members of a set meet: a port on loopback, and a secret name that only they were told."""

    port: int
    name: str


class SetOpening:
    """A place for a set to meet, held open by its leader."""

    def __init__(self, timeout_s: float) -> None:
        listener = bound_socket(LOOPBACK)
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )
        self.meeting = Meeting(port, secrets.token_hex(16))


class RankSet:
    """One member's view of its set.

    Args:
        rank, size: of this member in the set.
        meeting: the same for all members.
        timeout_s: no member may keep the others waiting longer.
        device_type: where the model computes.
        shared_device: members share a device, which its own collectives cannot; gloo carries the model's data too.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: Meeting,
        timeout_s: float,
        device_type: str = CPU,
        shared_device: bool = False,
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        deadline = timedelta(seconds=timeout_s)
        with self._unbroken("to meet"):
            store = dist.TCPStore(LOOPBACK, meeting.port, is_master=False, timeout=deadline, wait_for_workers=False)
            self._store = store
            patience = timedelta(seconds=max(timeout_s, LEAST_PATIENCE_S))
            self._orders = _gloo(dist.PrefixStore(f"{meeting.name}/orders", store), rank, size, patience)
            data = dist.PrefixStore(f"{meeting.name}/data", store)
            if device_type == CPU or shared_device:
                self._data: Any = _gloo(data, rank, size, deadline)
            else:
                self._data = _of_device(device_type, data, rank, size, deadline)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # ---- data of the model; called by all members in the same order -------------------------------------------------

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over members, with the same bits for all. In place where `tensor` is contiguous."""
        tensor = tensor.contiguous()
        with self._unbroken("for a sum of the model"):
            self._data.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, which have one shape."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._unbroken("for parts of the model's output"):
            self._data.allgather([parts], [tensor.contiguous()]).wait()
        return parts

    def smallest(self, number: int, device: torch.device) -> int:
        """The smallest of the members' numbers."""
        return min(int(part) for part in self.gather(torch.tensor([number], device=device)))

    # ---- orders of the leader ---------------------------------------------------------------------------------------

    def send(self, order: dict[str, Any]) -> None:
        """By the leader: one order to all others."""
        raw = json.dumps(order, separators=(",", ":"), default=int).encode()  # default: numbers of numpy
        first, rest = raw[: ROOM - 8], raw[ROOM - 8 :]
        head = torch.zeros(ROOM, dtype=torch.uint8)
        head[:8] = torch.tensor(list(len(raw).to_bytes(8, "little")), dtype=torch.uint8)
        head[8 : 8 + len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        with self._unbroken("to hear of the next step"):
            self._orders.broadcast([head]).wait()
            if rest:
                self._orders.broadcast([torch.frombuffer(bytearray(rest), dtype=torch.uint8)]).wait()

    def receive(self) -> dict[str, Any]:
        """By the others: the next order."""
        head = torch.zeros(ROOM, dtype=torch.uint8)
        with self._unbroken("to say what is next"):
            self._orders.broadcast([head]).wait()
            size = int.from_bytes(bytes(head[:8].tolist()), "little")
            raw = bytes(head[8 : 8 + min(size, ROOM - 8)].numpy())
            if size > ROOM - 8:
                tail = torch.zeros(size - (ROOM - 8), dtype=torch.uint8)
                self._orders.broadcast([tail]).wait()
                raw += bytes(tail.numpy())
        return json.loads(raw)

    def all_ready(self, ready: bool) -> bool:
        """Whether every member can begin a step now."""
        flag = torch.tensor([int(ready)])
        with self._unbroken("to be ready for a step"):
            self._orders.allreduce([flag], dist.ReduceOp.MIN).wait()
        return bool(flag)

    @contextmanager
    def _unbroken(self, waited_for: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, WorkerError):
                raise
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise SetBroken(
                f"rank {self.rank} of a tensor parallel set of {self.size} waited {waited_for}, at most "
                f"{self.timeout_s:g} s, and lost a member: {cause}",
                "one of the set's processes died or hangs: look at their logs; actor_rollout_ref.nccl_timeout is the deadline",
            ) from None


def _gloo(store: Any, rank: int, size: int, deadline: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = deadline
    return dist.ProcessGroupGloo(store, rank, size, options)


def _of_device(device_type: str, store: Any, rank: int, size: int, deadline: timedelta) -> Any:
    """The device's own collectives, without torch's default group: training may have one of its own."""
    backend = dist.get_default_backend_for_device(device_type)
    if backend != "nccl":
        raise ConfigError(
            f"tensor parallel sets know the collectives of CPUs and of CUDA, and {device_type} has {backend}",
            "set actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = deadline
    return dist.ProcessGroupNCCL(store, rank, size, options)


# ---- what an order says ----------------------------------------------------------------------------------------------


@dataclass
class SetClock:
    """The leader's clock, as all members of a set see it: deadlines pass for all of them in the same step."""

    now: float = -math.inf

    def __call__(self) -> float:
        return self.now


@dataclass
class Tally:
    """What came out of an engine so far, as a number that does not depend on the order."""

    total: int = 0

    def add(self, completions: Sequence[Completion]) -> None:
        for done in completions:
            text = f"{done.request_id}:{done.sample_index}:{done.finish_reason}:{done.token_ids}"
            self.total = (self.total + zlib.crc32(text.encode())) % (1 << 63)


def request_to_plain(request: Request) -> dict[str, Any]:
    """What JSON can say of a request."""
    return {**asdict(request), "prompt_ids": [int(token) for token in request.prompt_ids]}


def request_from_plain(plain: dict[str, Any]) -> Request:
    params = SamplingParams(**plain["params"])
    fixed = {"params": params, "uid": tuple(plain["uid"]), "sample_indices": tuple(plain["sample_indices"])}
    return Request(**{**plain, **fixed})
