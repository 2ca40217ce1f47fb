"""Rows with padding to one stream of tokens without any, and values per token back to rows.

A row is `[left padding | prompt | response | right padding]`: its valid tokens are contiguous. Packing lays the valid
tokens of all rows end to end, position ids start at 0 in every sequence, and attention keeps the sequences apart
(`attention.py`). What a model computes for the response (log-probs, values) is read one position earlier: the hidden
state of a token predicts the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from quadriga.errors import DataError


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of a stream of tokens begin and end.

    Attributes:
        lengths: tokens of each sequence, all ≥ 1, on the host.
        cu_seqlens: `[len(lengths) + 1]` int32 on the device, 0 first: sequence i is `[cu_seqlens[i], cu_seqlens[i+1])`.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: list[int] | tuple[int, ...], device: torch.device | str = "cpu") -> SequenceLayout:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), bounds.to(device, non_blocking=True))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """`(how many, of which length)` for each run of neighbours of equal length: what one batched call can do."""
        return tuple((len(list(same)), length) for length, same in groupby(self.lengths))


@dataclass(frozen=True)
class PackedRows:
    """Rows without padding. T tokens, of which N are response tokens that a value is wanted for.

    Attributes:
        input_ids: `[1, T]`.
        position_ids: `[1, T]`, from 0 in each sequence.
        layout: the sequences' bounds.
        predictors: `[N]` index in the stream of the token before each response token.
        targets: `[N]` the response tokens' ids.
        slots: `[N]` their places in the flattened `[B * R]`.
        last_tokens: `[sequences]` index in the stream of each sequence's last token.
        nonempty_rows: `[sequences]` the row of each sequence (rows without any token have none).
        shape: `(B, R)`.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: SequenceLayout
    predictors: Tensor
    targets: Tensor
    slots: Tensor
    last_tokens: Tensor
    nonempty_rows: Tensor
    shape: tuple[int, int]

    def to(self, device: torch.device | str) -> PackedRows:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            layout=SequenceLayout(self.layout.lengths, move(self.layout.cu_seqlens)),
            predictors=move(self.predictors),
            targets=move(self.targets),
            slots=move(self.slots),
            last_tokens=move(self.last_tokens),
            nonempty_rows=move(self.nonempty_rows),
        )

    def unpack(self, per_token: Tensor) -> Tensor:
        """`[N]` values of the response tokens → `[B, R]`, 0 where there is none. Differentiable."""
        rows, width = self.shape
        return per_token.new_zeros(rows * width).index_copy(0, self.slots, per_token).view(rows, width)


def pack_rows(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> PackedRows:
    """Pack `input_ids[B, P+R]`; values are wanted for the tokens with `response_mask[B, R]` 1. All on the host.

    Raises:
        DataError: a mask with a hole, a response token that is padding or has no token before it, no token at all.
    """
    rows, width = input_ids.shape
    valid = attention_mask.bool()
    wanted = response_mask.bool()
    if valid.shape != input_ids.shape or wanted.shape[0] != rows or wanted.shape[1] > width:
        raise DataError(
            f"shapes do not fit: input_ids {tuple(input_ids.shape)}, attention_mask {tuple(valid.shape)}, "
            f"response_mask {tuple(wanted.shape)}",
            "give [B, P+R], [B, P+R] and [B, R]",
        )
    lengths = valid.sum(-1)
    _check_contiguous(valid, lengths)
    nonempty = lengths.nonzero().squeeze(-1)
    if nonempty.numel() == 0:
        raise DataError("a batch without a single token cannot be packed", "drop rows whose attention_mask is all 0")

    in_stream = valid.flatten().cumsum(0).sub_(1).view(rows, width)  # index in the stream, where valid
    positions = valid.cumsum(-1).sub_(1)
    wanted_slots = wanted.flatten().nonzero().squeeze(-1)
    columns = wanted_slots % wanted.shape[1] + (width - wanted.shape[1])
    token_rows = wanted_slots // wanted.shape[1]
    _check_predictable(valid[token_rows, columns] & (positions[token_rows, columns] > 0), token_rows, columns)
    layout = SequenceLayout.of(lengths[nonempty].tolist())
    return PackedRows(
        input_ids=input_ids[valid].unsqueeze(0),
        position_ids=positions[valid].unsqueeze(0),
        layout=layout,
        predictors=in_stream[token_rows, columns] - 1,
        targets=input_ids[token_rows, columns],
        slots=wanted_slots,
        last_tokens=layout.cu_seqlens[1:].long() - 1,
        nonempty_rows=nonempty,
        shape=(rows, wanted.shape[1]),
    )


def _check_contiguous(valid: Tensor, lengths: Tensor) -> None:
    width = valid.shape[1]
    first = valid.int().argmax(-1)
    last = width - 1 - valid.flip(-1).int().argmax(-1)
    broken = ((last - first + 1 != lengths) & (lengths > 0)).nonzero().squeeze(-1)
    if broken.numel():
        raise DataError(
            f"the attention_mask of row {int(broken[0])} has a hole: valid tokens must be contiguous",
            "pad prompts on the left and responses on the right; mask tool output in response_mask, not attention_mask",
        )


def _check_predictable(predictable: Tensor, rows: Tensor, columns: Tensor) -> None:
    if bool(predictable.all()):
        return
    at = int((~predictable).nonzero()[0])
    raise DataError(
        f"response_mask asks for the token in column {int(columns[at])} of row {int(rows[at])}, which is padding or the "
        "first token of its sequence",
        "response_mask must lie within attention_mask, and every prompt needs at least one token",
    )
