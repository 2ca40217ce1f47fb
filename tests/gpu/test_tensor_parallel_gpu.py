"""One model over two processes that share a GPU: what a set generates there is what one process on a CPU does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from rank_processes import in_a_set, plain, sharded
from rollout_models import tiny_model

from quadriga.rollout import Request, SamplingParams
from quadriga.rollout.native.engine import NativeEngine
from quadriga.rollout.rank_set import RankSet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2_softcap_window", "qwen3_moe"]


def requests() -> list[Request]:
    prompts = [[(31 * i + 7 * n) % 331 for i in range(n)] for n in (3, 20, 41)]
    greedy = SamplingParams(max_new_tokens=12, do_sample=False, ignore_eos=True)
    drawn = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5)
    asked = [Request(f"greedy{i}", ids, greedy, uid=(0, i)) for i, ids in enumerate(prompts)]
    return asked + [Request(f"drawn{i}", ids, drawn, (0, i), (0, 1, 2)) for i, ids in enumerate(prompts)]


def together(ranks: RankSet) -> dict[str, Any]:
    """The model's data go over gloo: the device's own collectives cannot join two processes of one device."""
    return {f: plain(sharded(f, ranks, "cuda", memory_fraction=0.05)[1].generate(requests())) for f in FAMILIES}


@pytest.mark.timeout(600)
def test_a_set_on_one_gpu_generates_what_a_cpu_does():
    for member in in_a_set(2, together, device="cuda"):
        for family in FAMILIES:
            whole = NativeEngine(tiny_model(family), [7], max_num_seqs=8, max_model_len=96, block_size=8)
            expected, got = plain(whole.generate(requests())), member[family]
            different = [key for key in expected if got[key][0] != expected[key][0]]
            assert len(different) <= 1, "at most one lay on the edge between two tokens"
            for key in expected.keys() - set(different):
                gap = torch.tensor(got[key][1]) - torch.tensor(expected[key][1])
                assert gap.abs().max() < 2e-4, (family, key)
