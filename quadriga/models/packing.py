"""Rows with padding to one stream of tokens without any, and values per token back to rows.

A row is `[left padding | prompt | response | right padding]`: its valid tokens are contiguous. Packing lays the valid
tokens of all rows end to end, position ids start at 0 in every sequence, and attention keeps the sequences apart
(`attention.py`). What a model computes for the response (log-probs, values) is read one position earlier: the hidden
state of a token predicts the next one.

Rows that answer the same prompt can share it: the prompt is in the stream once, each response is a segment of its own
that sees the prompt and itself. The results are those of whole sequences, and the prompt is computed once, not n times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quadriga.errors import DataError
from quadriga.models.layout import SequenceLayout, to_device


@dataclass(frozen=True)
class PackedRows:
    """Rows without padding. T tokens, and N response tokens that a value is wanted for.

    Attributes:
        input_ids: `[1, T]`.
        position_ids: `[1, T]`, from 0 in each sequence.
        layout: the sequences' bounds.
        predictors: `[N]` index in the stream of the token before each response token.
        targets: `[N]` the response tokens' ids.
        cells: `[N]` their places in the flattened `[B * R]`.
        last_tokens: `[rows with tokens]` index in the stream of each row's last token.
        nonempty_rows: `[rows with tokens]` which rows these are.
        shape: `(B, R)`.
        filler: so many tokens at the end belong to no row.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: SequenceLayout
    predictors: Tensor
    targets: Tensor
    cells: Tensor
    last_tokens: Tensor
    nonempty_rows: Tensor
    shape: tuple[int, int]
    filler: int = 0

    def to(self, device: torch.device | str) -> PackedRows:
        def move(tensor: Tensor) -> Tensor:
            return to_device(tensor, device)

        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            layout=self.layout.to(device),
            predictors=move(self.predictors),
            targets=move(self.targets),
            cells=move(self.cells),
            last_tokens=move(self.last_tokens),
            nonempty_rows=move(self.nonempty_rows),
        )

    def unpack(self, per_token: Tensor) -> Tensor:
        """`[N]` or `[N, K]` values of the response tokens → `[B, R]` or `[B, R, K]`, 0 where there is none. Differentiable."""
        (rows, width), inner = self.shape, per_token.shape[1:]
        return per_token.new_zeros(rows * width, *inner).index_copy(0, self.cells, per_token).view(rows, width, *inner)


def pack_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    same_prompt: Sequence[int] | None = None,
) -> PackedRows:
    """Pack `input_ids[B, P+R]`; values are wanted for the tokens with `response_mask[B, R]` 1. All on the host.

    Args:
        same_prompt: a number for each row; rows with the same number have the same prompt and share it. None: no
            sharing.

    Raises:
        DataError: a mask with a hole, a response token that is padding or has no token before it, no token at all.
    """
    rows, width = input_ids.shape
    valid, wanted = attention_mask.bool(), response_mask.bool()
    if valid.shape != input_ids.shape or wanted.shape[0] != rows or wanted.shape[1] > width:
        raise DataError(
            f"shapes do not fit: input_ids {tuple(input_ids.shape)}, attention_mask {tuple(valid.shape)}, "
            f"response_mask {tuple(wanted.shape)}",
            "give [B, P+R], [B, P+R] and [B, R]",
        )
    lengths = valid.sum(-1)
    first = valid.int().argmax(-1)
    _check_contiguous(valid, first, lengths)
    nonempty = lengths.nonzero().squeeze(-1)
    if nonempty.numel() == 0:
        raise DataError("a batch without a single token cannot be packed", "drop rows whose attention_mask is all 0")

    prompt_width = width - wanted.shape[1]
    if same_prompt is None:
        segments = _Segments.of_rows(nonempty, first, lengths)
    else:
        segments = _Segments.sharing(nonempty, first, lengths, prompt_width, same_prompt)
    cells = segments.cells(width)  # [T] the place in [B * width] of each token of the stream
    in_stream = torch.full((rows * width,), -1).index_copy(0, cells, torch.arange(cells.numel()))
    # A row without a prompt of its own in the stream finds it in another's: the token before its first response token is there.
    for follower, leader, start, end in segments.borrowed:
        in_stream[follower * width + start : follower * width + end] = in_stream[
            leader * width + start : leader * width + end
        ]

    response_cells = wanted.flatten().nonzero().squeeze(-1)
    token_rows, columns = response_cells // wanted.shape[1], response_cells % wanted.shape[1] + prompt_width
    _check_predictable(valid, first, token_rows, columns)
    wanted_cells = token_rows * width + columns
    positions = valid.cumsum(-1).sub_(1).flatten()
    return PackedRows(
        input_ids=input_ids.flatten()[cells].unsqueeze(0),
        position_ids=positions[cells].unsqueeze(0),
        layout=SequenceLayout.of(segments.lengths, segments.prefixes),
        predictors=in_stream[wanted_cells - 1],
        targets=input_ids.flatten()[wanted_cells],
        cells=response_cells,
        last_tokens=in_stream[nonempty * width + first[nonempty] + lengths[nonempty] - 1],
        nonempty_rows=nonempty,
        shape=(rows, wanted.shape[1]),
    )


def group_by_prompt(input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> tuple[list[int], list[int]]:
    """For each row a number that it has in common with the rows of the same prompt, and its prompt's length."""
    ids, mask = input_ids[:, :prompt_width], attention_mask[:, :prompt_width].bool()
    keys = torch.where(mask, ids, -1).contiguous().numpy()
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(row.tobytes(), len(numbers)) for row in keys], mask.sum(-1).tolist()


@dataclass
class _Segments:
    """What the stream is made of, in order: `(row, first column, length)`, and which segment precedes each (−1: none).

    borrowed: `(row, row whose prompt stands for its own, first column, end column)`.
    """

    places: list[tuple[int, int]]
    lengths: list[int]
    prefixes: list[int]
    borrowed: list[tuple[int, int, int, int]]

    @classmethod
    def of_rows(cls, nonempty: Tensor, first: Tensor, lengths: Tensor) -> _Segments:
        places = list(zip(nonempty.tolist(), first[nonempty].tolist(), strict=True))
        return cls(places, lengths[nonempty].tolist(), [-1] * len(places), [])

    @classmethod
    def sharing(
        cls, nonempty: Tensor, first: Tensor, lengths: Tensor, prompt_width: int, same_prompt: Sequence[int]
    ) -> _Segments:
        """Prompts first, then the responses. Both are sorted by length: neighbours of equal length are done together.

        Without varlen attention there is one call for each run of neighbours of one shape (`SequenceLayout.runs`). Responses
        are sorted by the length of their prompt first and then by their own, so that a run's prompts lie beside each other
        too and are taken as one region of the stream. The gradients of n copies of a prompt add up in the one that is there.
        """
        starts, ends = first.tolist(), (first + lengths).tolist()
        groups: dict[int, list[int]] = {}
        for row in nonempty.tolist():
            groups.setdefault(same_prompt[row], []).append(row)
        segments = cls([], [], [], [])
        responses = []
        for members in sorted(groups.values(), key=lambda rows: starts[rows[0]] - min(ends[rows[0]], prompt_width)):
            leader = members[0]
            start, end = starts[leader], min(ends[leader], prompt_width)
            if len(members) == 1 or end <= start:  # nothing to share
                responses += [(0, ends[row] - starts[row], row, -1) for row in members]
                continue
            number = segments._add(leader, start, end - start, -1)
            for row in members:
                if row != leader:
                    segments.borrowed.append((row, leader, start, end))
                if ends[row] > prompt_width:
                    responses.append((end - start, ends[row] - prompt_width, row, number))
        for prompt, response, row, prefix in sorted(responses, key=lambda r: (-r[0], -r[1], r[3], r[2])):
            segments._add(row, prompt_width if prompt else starts[row], response, prefix)
        return segments

    def _add(self, row: int, column: int, length: int, prefix: int) -> int:
        self.places.append((row, column))
        self.lengths.append(length)
        self.prefixes.append(prefix)
        return len(self.places) - 1

    def cells(self, width: int) -> Tensor:
        lengths = torch.tensor(self.lengths)
        starts = torch.tensor([row * width + column for row, column in self.places])
        offsets = lengths.cumsum(0) - lengths
        return torch.repeat_interleave(starts - offsets, lengths) + torch.arange(int(lengths.sum()))


def _check_contiguous(valid: Tensor, first: Tensor, lengths: Tensor) -> None:
    last = valid.shape[1] - 1 - valid.flip(-1).int().argmax(-1)
    broken = ((last - first + 1 != lengths) & (lengths > 0)).nonzero().squeeze(-1)
    if broken.numel():
        raise DataError(
            f"the attention_mask of row {int(broken[0])} has a hole: valid tokens must be contiguous",
            "pad prompts on the left and responses on the right; mask tool output in response_mask, not attention_mask",
        )


def _check_predictable(valid: Tensor, first: Tensor, rows: Tensor, columns: Tensor) -> None:
    wrong = ~(valid[rows, columns] & (columns > first[rows]))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise DataError(
            f"response_mask asks for the token in column {int(columns[at])} of row {int(rows[at])}, which is padding or "
            "the first token of its sequence",
            "response_mask must lie within attention_mask, and every prompt needs at least one token",
        )
