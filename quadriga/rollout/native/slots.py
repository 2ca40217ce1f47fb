"""Per-slot tables on the device: how each running sample is sampled, what it has sampled so far, and, on a GPU, where it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quadriga.models.layout import to_device
from quadriga.rollout.native.sequence import Sequence

NOT_FINITE = 3


@dataclass(frozen=True)
class Sampled:
    """A token for each of some slots, `[R]` each; see `Completion` for the two log-probs."""

    tokens: Tensor
    log_probs: Tensor
    full_log_probs: Tensor


class SlotTable:
    """Rows of sampling parameters, and the tokens and log-probs of running samples. All `[slots]` or `[slots, …]`."""

    def __init__(self, slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.vocab_size, self.eos_token_ids, self.device = vocab_size, eos_token_ids, device
        integers = lambda *size: torch.zeros(*size, dtype=torch.int64, device=device)  # noqa: E731
        floats = lambda *size: torch.zeros(*size, dtype=torch.float32, device=device)  # noqa: E731
        self.key, self.count, self.last_token = (integers(slots) for _ in range(3))
        self.max_new, self.min_new, self.top_k = (integers(slots) for _ in range(3))
        self.temperature, self.top_p, self.min_p, self.penalty = (floats(slots) for _ in range(4))
        self.greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self.stop_ids = torch.full((slots, max(1, len(eos_token_ids))), -1, dtype=torch.int64, device=device)
        self.tokens = integers(slots, 0)
        self.log_probs, self.full_log_probs = floats(slots, 0), floats(slots, 0)
        self.seen: Tensor | None = None
        """`[slots, vocab]`, True for tokens of the prompt or the response; made when a penalty first needs it."""

    def reserve(self, max_new_tokens: int, stop_ids: int) -> None:
        """Make room for responses of this length and this many stop tokens of one's own."""
        if (more := max_new_tokens - self.tokens.shape[1]) > 0:
            for name in ("tokens", "log_probs", "full_log_probs"):
                setattr(self, name, torch.nn.functional.pad(getattr(self, name), (0, more)))
        if (more := stop_ids + len(self.eos_token_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, more), value=-1)

    def load(self, sequences: list[Sequence]) -> None:
        """Fill the slots of `sequences` with their parameters, and with what they had sampled before a preemption."""
        slots = torch.tensor([s.slot for s in sequences], device=self.device)
        params = [s.request.params for s in sequences]
        self.count[slots] = self._row([len(s.tokens) for s in sequences], torch.int64)
        self.key[slots] = self._row([s.key for s in sequences], torch.int64)
        for name, attribute in (("max_new", "max_new_tokens"), ("min_new", "min_new_tokens"), ("top_k", "top_k")):
            getattr(self, name)[slots] = self._row([getattr(p, attribute) for p in params], torch.int64)
        for name, attribute in (
            ("temperature", "scale_temperature"),
            ("top_p", "top_p"),
            ("min_p", "min_p"),
            ("penalty", "repetition_penalty"),
        ):
            getattr(self, name)[slots] = self._row([getattr(p, attribute) for p in params], torch.float32)
        self.greedy[slots] = self._row([p.greedy for p in params], torch.bool)
        width = self.stop_ids.shape[1]
        stops = [(*p.stop_token_ids, *(() if p.ignore_eos else self.eos_token_ids)) for p in params]
        self.stop_ids[slots] = self._row([list(ids) + [-1] * (width - len(ids)) for ids in stops], torch.int64)
        for sequence in sequences:
            if sequence.tokens:
                done = slice(len(sequence.tokens))
                self.tokens[sequence.slot, done] = self._row(sequence.tokens, torch.int64)
                self.log_probs[sequence.slot, done] = self._row(sequence.log_probs, torch.float32)
                self.full_log_probs[sequence.slot, done] = self._row(sequence.full_log_probs, torch.float32)
            if sequence.request.params.repetition_penalty != 1:
                self._mark_seen(sequence)

    def save(self, sequence: Sequence) -> None:
        """Copy what `sequence` has sampled out of its slot."""
        done = slice(int(self.count[sequence.slot]))
        sequence.tokens = self.tokens[sequence.slot, done].tolist()
        sequence.log_probs = self.log_probs[sequence.slot, done].tolist()
        sequence.full_log_probs = self.full_log_probs[sequence.slot, done].tolist()

    def read(self, slots: list[int], starts: list[int]) -> list[tuple[list[int], list[float], list[float]]]:
        """Tokens and both log-probs of each of `slots` from its token of number `starts` on."""
        counts = self.count[torch.tensor(slots, device=self.device)].tolist()
        width = self.tokens.shape[1]
        places = [slot * width + i for slot, a, b in zip(slots, starts, counts) for i in range(a, b)]
        flat = torch.tensor(places, dtype=torch.int64, device=self.device)
        columns = [column.flatten()[flat].tolist() for column in (self.tokens, self.log_probs, self.full_log_probs)]
        lengths = [max(0, b - a) for a, b in zip(starts, counts)]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        return [tuple(column[end - n : end] for column in columns) for end, n in zip(ends, lengths)]  # type: ignore[misc]

    def append(self, slots: Tensor, sampled: Sampled) -> Tensor:
        """Add one token to each of `slots[R]`; a code for each: 0 goes on, 1 stop token, 2 full length, `NOT_FINITE`."""
        count, tokens = self.count[slots], sampled.tokens
        self.tokens[slots, count] = tokens
        self.log_probs[slots, count] = sampled.log_probs
        self.full_log_probs[slots, count] = sampled.full_log_probs
        self.last_token[slots] = tokens
        self.count[slots] = count + 1
        if self.seen is not None:
            self.seen[slots, tokens] = True
        codes = torch.where(count + 1 >= self.max_new[slots], 2, 0)
        codes[(tokens[:, None] == self.stop_ids[slots]).any(1)] = 1
        codes[~sampled.full_log_probs.isfinite()] = NOT_FINITE
        return codes

    def _mark_seen(self, sequence: Sequence) -> None:
        if self.seen is None:
            self.seen = torch.zeros(len(self.key), self.vocab_size, dtype=torch.bool, device=self.device)
        self.seen[sequence.slot] = False
        ids = self._row([*sequence.request.prompt_ids, *sequence.tokens], torch.int64)
        self.seen[sequence.slot, ids] = True

    def _row(self, values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)


class DeviceSlots(SlotTable):
    """A `SlotTable` that the kernels advance by themselves.

    Attributes:
        length: `[slots]` tokens of each sample in the cache.
        done: `[slots]` 0 while it runs, then the code of `SlotTable.append`; a sample that is done changes no more.
        scale: `[slots]` what logits are multiplied by: 1 / temperature, as the trainer computes it.
        blocks: `[slots, W]` int32 block ids, see `Scheduler.tables`.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        blocks_per_slot: int,
    ) -> None:
        super().__init__(slots, vocab_size, eos_token_ids, device)
        self.length, self.done = (torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2))
        self.scale = torch.ones(slots, dtype=torch.float32, device=device)
        self.blocks = torch.zeros(slots, blocks_per_slot, dtype=torch.int32, device=device)

    def load(self, sequences: list[Sequence]) -> None:
        super().load(sequences)
        slots = torch.tensor([s.slot for s in sequences]).to(self.device)
        self.length[slots] = self._row([len(s.request.prompt_ids) + len(s.tokens) for s in sequences], torch.int64)
        self.scale[slots] = self._row([1 / s.request.params.scale_temperature for s in sequences], torch.float32)
        self.done[slots] = 0

    def set_blocks(self, changes: list[tuple[int, int, int]]) -> None:
        """Note `(slot, column, block)` of every block that a sample got."""
        if changes:
            slot, column, block = to_device(torch.from_numpy(np.array(changes, np.int64).T.copy()), self.device)
            self.blocks[slot, column] = block.to(torch.int32)
