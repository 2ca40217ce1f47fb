"""Generation on CUDA without waiting for the device: the host runs some steps ahead and looks at results behind them.

The device notes by itself which samples are done (`DeviceSlots.done`) and changes those no more. After every step a copy of
these notes is sent to the host; when it has arrived, the samples that are done leave, with the tokens they had when they
ended. A sample that reaches its full length leaves the batch at once, since the host can count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.models.exact import is_exact
from quadriga.models.layout import to_device
from quadriga.rollout.interface import Completion
from quadriga.rollout.native.cuda.runner import CudaRunner
from quadriga.rollout.native.cuda.sampling_kernels import note_tokens, sample_rows, trainer_log_probs
from quadriga.rollout.native.sampler import Needs, needs_of, sample
from quadriga.rollout.native.scheduler import Batch, Scheduler
from quadriga.rollout.native.sequence import Sequence
from quadriga.rollout.native.slots import NOT_FINITE, DeviceSlots, Sampled
from quadriga.rollout.native.stop_strings import StopStrings

MAX_LAG = 4
"""Steps whose notes the host has not seen, while it goes on. Each lets the host be a step later without the device waiting for it, and each
computes a row more for a sample that has ended without the host knowing."""
_REASONS = {0: "stop_string", 1: "stop", 2: "length"}


@dataclass(eq=False)
class _Notes:
    """`done` of all slots after a step, on its way to the host, and who ran in that step."""

    arrived: torch.cuda.Event
    done: Tensor
    running: list[Sequence]


@dataclass(eq=False)
class _Leaving:
    """Tokens and log-probs of samples that have left, on their way to the host."""

    arrived: torch.cuda.Event
    sequences: list[Sequence]
    counts: Tensor
    codes: Tensor
    tokens: Tensor
    log_probs: Tensor
    full_log_probs: Tensor


class CudaSteps:
    """One step after the other; see the module's text."""

    def __init__(self, runner: CudaRunner, scheduler: Scheduler, table: DeviceSlots, stop_strings: StopStrings) -> None:
        self.runner, self.scheduler, self.table, self.stop_strings = runner, scheduler, table, stop_strings
        self._needs = Needs()
        self._notes: deque[_Notes] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._limits = np.zeros(len(table.key), np.int64)
        self._with_stop_strings = False

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._leaving

    def forget(self) -> None:
        """Drop what is on its way: the generation it belongs to is over."""
        self._notes.clear()
        self._leaving.clear()

    def step(self, version: int) -> list[Completion]:
        """Start one token for every running sample and a piece of the waiting prompts; returns who is known to be done."""
        self._look(wait_until=MAX_LAG - 1)
        if not self.scheduler.idle:
            if self._blocks_short():
                self._look(wait_until=0)  # before anyone is preempted, those who have ended must be gone
            self._launch(self.scheduler.schedule())
        if self._with_stop_strings:
            self._look(wait_until=0)
            self._leave([s for s in self.scheduler.running if self._ends_with_stop_string(s)])
        return self._arrived(version, wait=self.scheduler.idle)

    def settle(self, version: int) -> list[Completion]:
        """Wait for everything that was started; returns who is done."""
        self._look(wait_until=0)
        return self._arrived(version, wait=True)

    # ---- the device's work -------------------------------------------------------------------------------------------

    def _launch(self, batch: Batch) -> None:
        self.table.set_blocks(self.scheduler.take_changes())
        if len(batch.slots):
            for slots, logits in self.runner.decode(batch.slots):
                self._sample(logits, torch.arange(len(slots), device=slots.device), slots, decoding=True)
        if batch.chunks:
            logits = self.runner.prefill(batch.chunks)
            if prompts := batch.starting:
                self.runner.share_tails(prompts)
                self._start([s for p in prompts for s in p.members])
                rows = [(row, s.slot) for row, p in enumerate(prompts) for s in p.members]
                row_and_slot = to_device(torch.tensor(rows).t().contiguous(), logits.device)
                self._sample(logits, row_and_slot[0], row_and_slot[1], decoding=False)
        self.scheduler.advance(batch)
        self._send_notes()
        running = self.scheduler.running
        if running:
            at = np.array([s.slot for s in running])
            at_end = self.scheduler.lengths[at] >= self._limits[at]
            self._leave([running[i] for i in np.flatnonzero(at_end)])

    def _start(self, sequences: list[Sequence]) -> None:
        self.table.load(sequences)
        for s in sequences:
            # The last token of a response is never written to the cache.
            self._limits[s.slot] = len(s.request.prompt_ids) + s.request.params.max_new_tokens - 1
        params = {s.request.params for s in (*self.scheduler.running, *sequences)}
        self._needs = needs_of(params)
        self._with_stop_strings = any(p.stop_strings for p in params)

    def _sample(self, logits: Tensor, rows: Tensor, slots: Tensor, decoding: bool) -> None:
        needs = self._needs
        if not (needs.truncation or needs.penalty or needs.min_new):
            sampled = sample_rows(logits, rows, slots, self.table)
            if is_exact():
                of_rows = logits if decoding else logits[rows]
                log_probs = trainer_log_probs(of_rows, slots, sampled.tokens, self.table)
                sampled = Sampled(sampled.tokens, log_probs, log_probs)
            note_tokens(slots, sampled, self.table, decoding)
            return
        real = slots.clamp(min=0)
        sampled = sample(logits[rows], self.table, real, needs)
        note_tokens(slots, Sampled(*(x.contiguous() for x in vars(sampled).values())), self.table, decoding)
        if self.table.seen is not None:
            valid = slots >= 0
            self.table.seen[slots[valid], sampled.tokens[valid]] = True

    def _send_notes(self) -> None:
        done = torch.empty(len(self.table.done), dtype=torch.int64, pin_memory=True)
        done.copy_(self.table.done, non_blocking=True)
        self._notes.append(_Notes(_event(), done, self.scheduler.running))

    def _leave(self, sequences: list[Sequence]) -> None:
        """Take samples out of the batch; what they have sampled follows.

        Their slots and blocks are free at once, although the device may still be at work on them: what is started for their next
        owners comes behind these copies on the same stream.
        """
        if not sequences:
            return
        table = self.table
        slots = to_device(torch.tensor([s.slot for s in sequences]), table.device)
        columns = (table.count, table.done, table.tokens, table.log_probs, table.full_log_probs)
        copies = []
        for column in columns:
            chosen = column.index_select(0, slots)
            copies.append(
                torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True).copy_(chosen, non_blocking=True)
            )
        self._leaving.append(_Leaving(_event(), list(sequences), *copies))
        self.scheduler.finish(sequences)

    # ---- its results -------------------------------------------------------------------------------------------------

    def _look(self, wait_until: int) -> None:
        """Read notes, waiting for the oldest, until no more than `wait_until` are on their way.

        Not those that happen to have arrived: which samples share a step must not depend on how fast the host is.
        """
        while len(self._notes) > wait_until:
            notes = self._notes.popleft()
            notes.arrived.synchronize()
            ended = notes.done.numpy()
            gone = []
            for sequence in notes.running:
                if sequence.slot < 0 or not ended[sequence.slot]:
                    continue  # it has left already, or it runs
                gone.append(sequence)
            self._leave(gone)

    def _arrived(self, version: int, wait: bool) -> list[Completion]:
        completions: list[Completion] = []
        while self._leaving and (wait or self._leaving[0].arrived.query()):
            completions += self._completions(self._leaving.popleft(), version)
        return completions

    def _completions(self, leaving: _Leaving, version: int) -> Iterable[Completion]:
        leaving.arrived.synchronize()
        counts, codes = leaving.counts.tolist(), leaving.codes.tolist()
        for i, sequence in enumerate(leaving.sequences):
            if codes[i] == NOT_FINITE:
                raise WorkerError(
                    f"the model's logits for request {sequence.request.request_id} are not finite",
                    "the weights have diverged: go back to an earlier checkpoint and lower the learning rate",
                )
            done = slice(counts[i])
            sequence.tokens = leaving.tokens[i, done].tolist()
            sequence.log_probs = leaving.log_probs[i, done].tolist()
            sequence.full_log_probs = leaving.full_log_probs[i, done].tolist()
            yield sequence.completion(_REASONS[codes[i]], version)

    def _ends_with_stop_string(self, sequence: Sequence) -> bool:
        return bool(sequence.request.params.stop_strings) and self.stop_strings.ends(sequence, self.table)

    def _blocks_short(self) -> bool:
        return bool(self._notes) and self.scheduler.pool.num_free < self.scheduler.blocks_due


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
