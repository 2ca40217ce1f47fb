"""Rows that share their prompt, through the attention kernels with grouped queries: the gradients of whole rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import CONFIGS, make_causal_lm, ragged_batch

from quadriga.models.packing import group_by_prompt, pack_rows
from quadriga.models.token_model import PolicyModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [(9, 12), (9, 7), (9, 12), (4, 30), (4, 1), (11, 5)]
WIDE_HEADS = {"hidden_size": 64, "head_dim": 16}


def model_of(family: str) -> Any:
    config = CONFIGS[family]()
    for key, value in WIDE_HEADS.items():
        setattr(config, key, value)
    return make_causal_lm(config)


def shared_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows 0 to 2 have one prompt, rows 3 and 4 another."""
    ids, mask, response_mask = ragged_batch(LENGTHS)
    width = ids.shape[1] - response_mask.shape[1]
    for leader, followers in ((0, (1, 2)), (3, (4,))):
        for row in followers:
            ids[row, :width] = ids[leader, :width]
    return ids, mask, response_mask


def gradients(model: Any, packed: Any, pull: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (PolicyModel(model)(packed)["log_probs"] * pull).sum().backward()
    return {name: p.grad.float().cpu().flatten() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_gradients_of_shared_prompts_are_those_of_whole_rows(family: str) -> None:
    from quadriga.models.fused import fuse

    ids, mask, response_mask = shared_batch()
    same_prompt, _ = group_by_prompt(ids, mask, ids.shape[1] - response_mask.shape[1])
    assert len(set(same_prompt)) < len(LENGTHS)
    plain = pack_rows(ids, mask, response_mask)
    pull = torch.randn(plain.targets.shape, generator=torch.Generator().manual_seed(3))
    expected = gradients(model_of(family), plain, pull)  # on the CPU, in float32, nothing shared, nothing fused
    model = model_of(family).to("cuda")
    for parameter in model.parameters():  # the rotary embedding's table stays in float32
        parameter.data = parameter.data.to(torch.bfloat16)
    assert fuse(model, torch.device("cuda")) > 0
    whole = gradients(model, plain.to("cuda"), pull.cuda())
    shared = gradients(model, pack_rows(ids, mask, response_mask, same_prompt).to("cuda"), pull.cuda())
    for name, reference in expected.items():
        for ours in (whole[name], shared[name]):
            assert torch.nn.functional.cosine_similarity(ours, reference, dim=0) > 0.99, name
