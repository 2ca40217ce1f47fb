"""Known beginnings of prompts on a GPU: what a next turn takes from the cache is what it would have computed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
import itertools

from rollout_models import VOCAB, own_log_probs, tiny_model

from quadriga.rollout import Completion, Request, SamplingParams, create_engine
from quadriga.rollout.native import engine as native_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def reuses_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_engine, "REUSES_ON_CUDA", True)


def make(family: str, **options: Any) -> Any:
    settings = {"max_num_seqs": 16, "max_model_len": 224, "block_size": 16} | options
    return create_engine("native", module=tiny_model(family).to("cuda"), **settings)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def play(engine: Any, new_weights_at: int = -1) -> list[list[tuple[list[int], Completion]]]:
    """Six episodes of four turns; of every turn the contexts and what answers them."""
    contexts = [ids(10 + 9 * e, e) for e in range(6)]
    played = []
    for turn in range(4):
        if turn == new_weights_at:
            engine.update_weights(1, tiny_model(seed=5).to("cuda").named_parameters())
        params = SamplingParams(max_new_tokens=9 + turn)
        asked = [Request(f"{e}", c, params, (0, e), call=turn, affinity=f"e{e}") for e, c in enumerate(contexts)]
        done = sorted(engine.generate(asked), key=lambda c: int(c.request_id))
        played.append(list(zip(contexts, done, strict=True)))
        contexts = [[*c, *d.token_ids, *ids(3 + turn, 100 + turn)] for c, d in zip(contexts, done, strict=True)]
    return played


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"kv_cache_tokens": 320}, {"max_num_seqs": 3}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window", "gemma2_softcap_window"])
def test_log_probs_are_those_of_the_model_whatever_came_from_the_cache(family: str, options: dict[str, Any]) -> None:
    engine = make(family, **options)
    played = play(engine)
    model = tiny_model(family)
    for turn in played:
        for context, done in turn:
            own = own_log_probs(model, context, done.token_ids)
            torch.testing.assert_close(torch.tensor(done.full_log_probs), own, atol=2e-4, rtol=1e-3)
    if not options:
        for before, after in itertools.pairwise(played):
            for (context, _), (_, done) in zip(before, after, strict=True):
                assert done.cached_tokens == len(context) // 16 * 16  # the full blocks of the prompt before
    assert engine.pool.num_free == engine.pool.num_blocks


def test_new_weights_leave_nothing_known() -> None:
    played = play(make("qwen2"), new_weights_at=2)
    assert all(done.cached_tokens == 0 for _, done in played[2])
    assert all(done.cached_tokens > 0 for turn in (1, 3) for _, done in played[turn])


def test_samples_asked_for_one_by_one_compute_their_prompt_once() -> None:
    engine = make("qwen2")
    prompt, before = ids(45, 3), engine.statistics()
    done = list(
        engine.generate([Request(f"{k}", prompt, SamplingParams(max_new_tokens=8), (0, 1), (k,)) for k in range(8)])
    )
    after = engine.statistics()
    computed = {key: after[key] - before[key] for key in ("prompt_tokens", "cached_tokens")}
    assert len(done) == 8
    assert computed["prompt_tokens"] - computed["cached_tokens"] == 45
