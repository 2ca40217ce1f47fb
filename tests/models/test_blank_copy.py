"""A second module for generation: the same model, its own weights, in the precision of the device."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, make_causal_lm

from quadriga.models.outline import blank_copy
from quadriga.rollout.weights import copy_weights


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "gpt2"])
def test_filled_with_the_weights_it_computes_the_same(family: str) -> None:
    model = make_causal_lm(CONFIGS[family]())
    copy = blank_copy(model, "cpu", torch.float32)
    copy_weights(copy, model.named_parameters())
    ids = torch.arange(12)[None]
    logits = []
    for one in (model, copy):
        one.set_attn_implementation("eager")
        logits.append(one(input_ids=ids).logits)
    torch.testing.assert_close(logits[0], logits[1])
    assert not any(p.requires_grad for p in copy.parameters())
    assert copy.config is not model.config


def test_weights_are_narrow_and_the_rotary_table_is_not() -> None:
    copy = blank_copy(make_causal_lm(CONFIGS["qwen2"]()), "cpu")
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert copy.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_blank_copy_has_the_tables_of_its_model():
    model = make_causal_lm(CONFIGS["qwen2"]())
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(1 + 2**-20)  # as another device might have computed it
    assert torch.equal(blank_copy(model, "cpu").model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
