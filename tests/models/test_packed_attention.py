"""Packed sequences must not see each other: the same log-probs and gradients as one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, UNSUPPORTED, make_causal_lm, ragged_batch

from quadriga.errors import DataError, WorkerError
from quadriga.models.attention import PACKED_ATTENTION
from quadriga.models.packing import group_by_prompt, pack_rows
from quadriga.models.probe import check_packing
from quadriga.models.token_model import PolicyModel

LENGTHS = [(4, 6), (4, 6), (2, 9), (5, 1), (1, 3), (1, 6)]


def one_by_one(model, ids, mask, response_mask):
    """Log-probs by the model's own forward pass, a row at a time, with its eager attention."""
    model.set_attn_implementation("eager")
    result = torch.zeros(response_mask.shape)
    for row in range(len(ids)):
        tokens, length = ids[row][mask[row].bool()], int(response_mask[row].sum())
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, -length - 1 : -1]
        result[row, :length] = logits.log_softmax(-1).gather(1, tokens[-length:, None])[:, 0]
    model.set_attn_implementation(PACKED_ATTENTION)
    return result


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_log_probs_and_gradients_equal_one_sequence_at_a_time(family, share_prompts):
    model = make_causal_lm(CONFIGS[family]())
    ids, mask, response_mask = ragged_batch(LENGTHS)
    same_prompt = None
    if share_prompts:
        ids[[3, 4, 5], :5], mask[[3, 4, 5], :5] = ids[0, :5].clone(), mask[0, :5].clone()
        same_prompt, _ = group_by_prompt(ids, mask, 5)
        assert same_prompt == [0, 1, 2, 0, 0, 0]
    weights = torch.randn(response_mask.shape) * response_mask

    expected = one_by_one(model, ids, mask, response_mask)
    (expected * weights).sum().backward()
    expected_grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    packed = pack_rows(ids, mask, response_mask, same_prompt)
    ours = packed.unpack(PolicyModel(model)(packed)["log_probs"])
    (ours * weights).sum().backward()

    assert (ours - expected).abs().max() <= 1e-5
    for name, parameter in model.named_parameters():
        if name in expected_grads:
            scale = expected_grads[name].abs().max().clamp(min=1)
            assert (parameter.grad - expected_grads[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mistral-window"])
def test_changing_one_sequence_leaves_the_others_exactly_as_they_were(family):
    model = PolicyModel(make_causal_lm(CONFIGS[family]()))
    ids, mask, response_mask = ragged_batch(LENGTHS)
    before = model(packed := pack_rows(ids, mask, response_mask))["log_probs"]
    ids[0] = ids[0].flip(0) * mask[0]
    after = model(pack_rows(ids, mask, response_mask))["log_probs"]
    before, after = packed.unpack(before), packed.unpack(after)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


@pytest.mark.parametrize("family", CONFIGS)
def test_supported_families_pass_the_check_at_load(family):
    check_packing(PolicyModel(make_causal_lm(CONFIGS[family]())), family)


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_an_architecture_that_cannot_be_packed_is_refused_at_load(family):
    model = make_causal_lm(UNSUPPORTED[family]())
    with pytest.raises(DataError, match="cannot be trained by Quadriga"):
        check_packing(PolicyModel(model), family)


def test_a_call_without_the_bounds_of_the_sequences_is_refused():
    model = make_causal_lm(CONFIGS["llama"]())
    with pytest.raises(WorkerError, match="without a layout"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
