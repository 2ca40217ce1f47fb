"""Waiting for calls to Ray actors: always with a deadline, and with errors that say whose worker failed and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from quadriga.errors import QuadrigaError, WorkerError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
RAISED_IN = re.compile(r"\(pid=(\d+), ip=([^,)]+)")


@dataclass(frozen=True)
class Seat:
    """Who a worker is and where it sits, for messages."""

    role: str
    rank: int
    world_size: int
    node_ip: str = "unknown"
    node_id: str = ""
    pid: int = 0
    actor_id: str = ""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} of {self.world_size} (node {self.node_ip}, pid {self.pid or 'unknown'})"


class WorkersLost(WorkerError):
    """Some workers did not start, died or never answered: their group cannot be used any more."""


class WorkersDied(WorkersLost):
    """Some workers were at work and died, or did not answer in time. New ones may well succeed where they did not."""


_DEATHS = (ActorDiedError, WorkerCrashedError, NodeDiedError, ActorUnavailableError, OutOfMemoryError)


def fetch(
    pending: list[Any],
    seats: Callable[[], Sequence[Seat]],
    method: str,
    timeout_s: float | None,
    doing: Callable[[int], str] | None = None,
    deadline_key: str = "controller.call_timeout_s",
    waited_s: float = 0.0,
) -> list[Any]:
    """The answers to `pending`, one per seat. The first failure ends the wait, whatever the others do.

    Args:
        pending: object references, in rank order.
        seats: who the callees are; asked only when something went wrong.
        method: what was called, for messages.
        timeout_s: deadline.
        doing: what the worker of a rank is doing right now, for the message after a missed deadline.
        deadline_key: the configuration key behind `timeout_s`.
        waited_s: how much of that time has passed already.

    Raises:
        WorkerError: a worker raised; its traceback comes first, then role, rank, node and pid.
        WorkersLost: a worker did not start.
        WorkersDied: a worker died, or some did not answer within `timeout_s`.
        QuadrigaError: a worker raised one of our own errors; the same class, with the place added.
    """
    try:
        return ray.get(pending, timeout=None if timeout_s is None else max(0.0, timeout_s - waited_s))
    except GetTimeoutError:
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        late = [seat for ref, seat in zip(pending, seats()) if ref not in done]
        lines = [f"no answer to {method} within {timeout_s:g} s from {len(late)} of {len(pending)} workers:"]
        for seat in late:
            lines.append(f"  {seat}" + (f", now in\n{doing(seat.rank)}" if doing else ""))
        raise WorkersDied(
            "\n".join(lines), f"if the work really takes that long, raise {deadline_key}; else see what it waits for"
        ) from None
    except RayError as error:
        raise explain(error, seats(), method) from None


def death_among(pending: list[Any], seats: Sequence[Seat], method: str) -> QuadrigaError | None:
    """The death of a worker, if one of the answered calls failed by it: the cause of what its peers raised meanwhile."""
    answered, _ = ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)
    for ref in answered:
        try:
            ray.get(ref, timeout=5)
        except _DEATHS as error:
            return explain(error, seats, method)
        except RayError:
            continue
    return None


def explain(error: RayError, seats: Sequence[Seat], method: str) -> QuadrigaError:
    """A Ray error as one of ours."""
    if isinstance(error, RayTaskError):
        raised_in = RAISED_IN.search(str(error))
        pid, ip = (int(raised_in[1]), raised_in[2]) if raised_in else (0, "unknown")
        seat = next((s for s in seats if s.pid == pid and s.node_ip == ip), None)
        place = f"in {method} of {seat}" if seat else f"in {method} (node {ip}, pid {pid})"
        cause = error.cause
        if isinstance(cause, QuadrigaError):
            return type(cause)(f"{cause.what}\n  {place}", cause.fix)
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return explain(cause, seats, method)
        return WorkerError(f"{_traceback(error)}\n\n{place}")
    if isinstance(error, _DEATHS):
        actor_id = getattr(error, "actor_id", None)
        seat = next((s for s in seats if s.actor_id and s.actor_id == actor_id), None)
        who = str(seat) if seat else f"a worker of {seats[0].role}"
        cause_text = _constructor_traceback(error)
        if cause_text:
            return WorkersLost(f"{cause_text}\n\nin the start of {who}")
        if isinstance(error, OutOfMemoryError):
            return WorkersDied(
                f"{who} was ended by Ray during {method}, because its node ran out of memory:\n{_memory_detail(error)}",
                "see `quadriga plan` for what a worker needs: give the node fewer workers, lower the token budgets "
                "(…max_token_len_per_gpu) or rollout.max_num_seqs, or end other programs there",
            )
        return WorkersDied(
            f"{who} died during {method}: {_death_detail(error)}",
            "killed by hand or by the kernel for lack of memory (see dmesg), or crashed in native code: look at its log",
        )
    if isinstance(error, ObjectLostError):
        return WorkersDied(
            f"data that {method} of {seats[0].role} needs is gone: the worker that held it has died",
            "look at the logs of the other workers for what ended one of them",
        )
    text = ANSI.sub("", str(error))
    not_found = re.search(r"ModuleNotFoundError: (No module named '[^']+')", text)
    if not_found:
        return WorkersLost(
            f"the workers of {seats[0].role} cannot import what they were sent: {not_found[1]}",
            "install that module on every node, or add its folder to PYTHONPATH in ray_kwargs.ray_init.runtime_env.env_vars",
        )
    return WorkersLost(f"{method} failed: {type(error).__name__}: {text}", "see Ray's logs of that session")


def _traceback(error: RayTaskError) -> str:
    """The worker's own traceback, without Ray's header and colours."""
    lines = ANSI.sub("", str(error)).rstrip().splitlines()
    first = next((i for i, line in enumerate(lines) if line.lstrip().startswith("File ")), None)
    if first is None:
        return "\n".join(lines)
    return "\n".join(["Traceback (most recent call last):", *lines[first:]])


def _constructor_traceback(error: RayError) -> str:
    text = ANSI.sub("", str(error))
    return text if "The actor died because of an error raised in its creation task" in text else ""


def _memory_detail(error: RayError) -> str:
    """How much memory was used by whom, out of what Ray says: half a page, most of it about its own settings."""
    lines = [line.strip() for line in ANSI.sub("", str(error)).splitlines()]
    kept = [line for line in lines if "memory" in line.lower() and "RAY_memory" not in line and "http" not in line]
    return "\n".join(f"  {line}"[:300] for line in kept[:2]) or "  Ray gave no figures"


def _death_detail(error: RayError) -> str:
    text = ANSI.sub("", str(error))
    detail = re.search(r"Worker exit type: (\w+).*?Worker exit detail: ([^.]*\.[^.]*\.)", text, re.DOTALL)
    return f"{detail[1]}, {detail[2].strip()}" if detail else " ".join(text.split())[:300]
