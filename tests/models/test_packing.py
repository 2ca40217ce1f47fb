from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ragged_batch

from quadriga.errors import DataError
from quadriga.models.layout import Run, SequenceLayout
from quadriga.models.packing import group_by_prompt, pack_rows

_LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=6).filter(
    lambda rows: any(response for _, response in rows)
)


@settings(deadline=None, max_examples=60)
@given(_LENGTHS)
def test_packing_keeps_every_valid_token_in_order_and_nothing_else(lengths):
    ids, mask, response_mask = ragged_batch(lengths)
    packed = pack_rows(ids, mask, response_mask)
    rows = [row[keep.bool()] for row, keep in zip(ids, mask)]
    assert packed.input_ids.tolist() == [torch.cat(rows).tolist()]
    assert packed.position_ids[0].tolist() == [i for row in rows for i in range(len(row))]
    assert packed.layout.lengths == tuple(map(len, rows))
    assert packed.layout.cu_seqlens.tolist() == [0, *torch.tensor(packed.layout.lengths).cumsum(0).tolist()]
    assert packed.input_ids[0, packed.last_tokens].tolist() == [int(row[-1]) for row in rows]


@settings(deadline=None, max_examples=60)
@given(_LENGTHS)
def test_unpacking_puts_each_value_back_at_its_response_token(lengths):
    ids, mask, response_mask = ragged_batch(lengths)
    packed = pack_rows(ids, mask, response_mask)
    responses = ids[:, -response_mask.shape[1] :] * response_mask
    assert torch.equal(packed.unpack(packed.targets), responses)


def test_a_response_token_is_predicted_by_the_token_before_it():
    ids = torch.tensor([[0, 11, 12, 21, 22, 0], [13, 14, 15, 31, 32, 33]])
    mask = (ids > 0).long()
    packed = pack_rows(ids, mask, mask[:, 3:])
    assert packed.input_ids[0, packed.predictors].tolist() == [12, 21, 15, 31, 32]
    assert packed.targets.tolist() == [21, 22, 31, 32, 33]


def test_tokens_masked_out_of_the_response_get_no_value_but_are_context():
    ids = torch.tensor([[11, 12, 21, 22, 23]])
    packed = pack_rows(ids, torch.ones_like(ids), torch.tensor([[1, 0, 1]]))
    assert packed.input_ids.tolist() == ids.tolist()
    assert packed.targets.tolist() == [21, 23]
    assert packed.unpack(torch.tensor([5.0, 7.0])).tolist() == [[5.0, 0.0, 7.0]]


def test_a_row_without_tokens_takes_no_place_in_the_stream():
    ids, mask, response_mask = ragged_batch([(2, 2), (3, 1)])
    mask[0], response_mask[0] = 0, 0
    packed = pack_rows(ids, mask, response_mask)
    assert packed.layout.lengths == (4,)
    assert packed.nonempty_rows.tolist() == [1]
    assert packed.unpack(torch.ones(1)).tolist() == [[0, 0], [1, 0]]


def test_a_hole_in_the_attention_mask_is_refused_with_its_row():
    ids, mask, response_mask = ragged_batch([(3, 3), (3, 3)])
    mask[1, 2] = 0
    with pytest.raises(DataError, match="row 1 has a hole"):
        pack_rows(ids, mask, response_mask)


def test_a_response_without_a_prompt_is_refused():
    ids, mask, response_mask = ragged_batch([(2, 2)])
    mask[0, :2] = 0
    with pytest.raises(DataError, match="first token of its sequence"):
        pack_rows(ids, mask, response_mask)


def test_runs_of_equal_lengths_are_found():
    assert SequenceLayout.of([5, 5, 3, 5]).runs == (Run(2, 5), Run(1, 3), Run(1, 5))


def shared_batch():
    """Two prompts, answered by rows 0, 2, 3 and by row 1; row 3 answers nothing."""
    ids, mask, response_mask = ragged_batch([(3, 4), (2, 3), (3, 2), (3, 0)])
    ids[2, :3], ids[3, :3] = ids[0, :3], ids[0, :3]
    return ids, mask, response_mask


def test_rows_of_the_same_prompt_are_found():
    ids, mask, _ = shared_batch()
    assert group_by_prompt(ids, mask, 3) == ([0, 1, 0, 0], [3, 2, 3, 3])


def test_a_shared_prompt_is_in_the_stream_once_and_every_value_finds_its_row():
    ids, mask, response_mask = shared_batch()
    packed = pack_rows(ids, mask, response_mask, same_prompt=[0, 1, 0, 0])
    pieces = [ids[0, :3], ids[0, 3:7], ids[2, 3:5], ids[1, 1:6]]
    assert packed.input_ids[0].tolist() == torch.cat(pieces).tolist()
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 1, 2, 3, 4]
    assert packed.layout.prefixes == (-1, 0, 0, -1), "a prompt that nobody shares stays with its response"
    assert torch.equal(packed.unpack(packed.targets), ids[:, 3:] * response_mask)
    assert packed.input_ids[0, packed.predictors[[0, 4]]].tolist() == [int(ids[0, 2]), int(ids[1, 2])]
    assert packed.input_ids[0, packed.last_tokens].tolist() == [
        int(row[keep.bool()][-1]) for row, keep in zip(ids, mask)
    ]
