"""Generation by a tensor parallel set: the leader's service answers its callers, the others do in step what it does.

Every member has the whole engine (scheduler, cache of its heads, sampler) around its part of the model, and all of it is a
function of what was asked and of the weights. So the leader tells only what it takes in, and at what time, and all members come
to the same batch, the same logits and the same tokens. A step begins when every member's device is free for it: a member that
is at a call of the driver says so, and the leader tries again, which keeps steps and calls in one order in all processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from quadriga.rollout.interface import Completion, Request
from quadriga.rollout.rank_set import RankSet, SetBroken, SetClock, Tally, request_from_plain, request_to_plain
from quadriga.rollout.service import GenerationService

BEAT_S = 10.0
"""A leader with nothing to do says so this often, that the others do not take it for dead."""
BUSY_S = 0.002
"""Pause of the leader before it asks again, when a member is at a call."""


class SetGate(Protocol):
    """Says when a step may begin here; `quadriga.controller.device_gate`."""

    def try_step(self, timeout_s: float) -> bool: ...

    def end_step(self) -> None: ...


class _Member(GenerationService):
    """What leader and followers have in common.

    Args:
        engine: native, with a sharded module.
        ranks: the set of that module.
        gate: of this process.
        options: of `GenerationService`.
    """

    def __init__(self, engine: Any, ranks: RankSet, gate: SetGate, **options: Any) -> None:
        self.ranks, self._own_gate = ranks, gate
        self._clock, self._tally = SetClock(), Tally()
        engine.clock = self._clock
        super().__init__(engine, None, **options)

    def _in_step(self, requests: Sequence[Request], aborted: set[str], now: float) -> list[Completion]:
        self._clock.now = now
        finished = self._step(requests, aborted)
        self._tally.add(finished)
        return finished


class LeadingService(_Member):
    """The service that callers know. It takes the others along."""

    _beaten = 0.0

    def advance(self) -> bool:
        with self._changed:
            requests, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, set()
        if not requests and self.engine.idle:
            self._beat()
            return False
        began = time.monotonic()
        self._enter()
        try:
            tally = self._tally.total if self.engine.idle else None
            now = time.monotonic()
            plain = [request_to_plain(request) for request in requests]
            self.ranks.send({"do": "step", "requests": plain, "aborted": sorted(aborted), "now": now, "tally": tally})
            finished = self._in_step(requests, aborted, now)
        finally:
            self._own_gate.end_step()
        self._give_out(finished, time.monotonic() - began)
        return True

    def _enter(self) -> None:
        """Wait until a step may begin in all processes of the set."""
        while True:
            if not self._own_gate.try_step(BEAT_S):
                self._beat()
                continue
            try:
                self.ranks.send({"do": "enter"})
                ready = self.ranks.all_ready(True)
            except BaseException:
                self._own_gate.end_step()
                raise
            if ready:
                return
            self._own_gate.end_step()
            time.sleep(BUSY_S)

    def _beat(self) -> None:
        if time.monotonic() - self._beaten >= BEAT_S / 2:
            self.ranks.send({"do": "nothing"})
            self._beaten = time.monotonic()

    def close(self) -> None:
        super().close()
        if self._failure is None:
            self.ranks.send({"do": "close"})


class FollowingService(_Member):
    """Does what the leader says. Nobody submits here, and its samples are the leader's to give out."""

    def advance(self) -> bool:
        order = self.ranks.receive()
        if order["do"] == "close":
            self._closed = True
        elif order["do"] == "enter":
            entered = self._own_gate.try_step(0.0)
            try:
                if self.ranks.all_ready(entered):
                    self._follow(self.ranks.receive())
            finally:
                if entered:
                    self._own_gate.end_step()
        return True

    def _follow(self, order: dict[str, Any]) -> None:
        if order["tally"] is not None and order["tally"] != self._tally.total:
            raise SetBroken(
                f"rank {self.ranks.rank} of a tensor parallel set of {self.ranks.size} has generated other samples than "
                "its leader",
                "do its processes run on different machines or versions of torch? Else please report it",
            )
        requests = [request_from_plain(plain) for plain in order["requests"]]
        began = time.monotonic()
        self._in_step(requests, set(order["aborted"]), order["now"])
        self._give_out([], time.monotonic() - began)
