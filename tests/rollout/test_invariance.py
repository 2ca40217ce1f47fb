"""The tokens of a sample depend on its request and on nothing that happens around it."""

from __future__ import annotations

import pytest
import torch
from rollout_models import VOCAB, own_log_probs, tiny_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from quadriga.rollout import Completion, Request, SamplingParams, create_engine


def requests(seed: int = 0) -> list[Request]:
    """Prompts of 3 to 60 tokens, several samples of some, different lengths and temperatures."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for row in range(10):
        prompt = torch.randint(0, VOCAB, (3 + 6 * row,), generator=generator).tolist()
        params = SamplingParams(max_new_tokens=10 + 3 * row, temperature=0.7 + 0.1 * (row % 4), seed=5)
        made.append(Request(f"r{row}", prompt, params, uid=(0, row), sample_indices=tuple(range(1 + row % 5))))
    return made


def run(asked: list[Request], **options: int) -> dict[tuple[str, int], Completion]:
    engine = create_engine("native", module=tiny_model(), block_size=16, max_model_len=128, **options)
    return {(c.request_id, c.sample_index): c for c in engine.generate(asked)}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], Completion]:
    return run(requests(), max_num_seqs=64)


@pytest.mark.parametrize(("slots", "order"), [(1, "reversed"), (7, "given"), (7, "reversed"), (64, "reversed")])
def test_slots_and_order_of_arrival_change_no_bit(slots: int, order: str, expected: dict) -> None:
    asked = requests() if order == "given" else requests()[::-1]
    assert run(asked, max_num_seqs=slots) == expected


def test_threads_change_no_bit(expected: dict) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        some = run(requests()[:5], max_num_seqs=16)
        assert some == {key: expected[key] for key in some}
    finally:
        torch.set_num_threads(before)


def test_nothing_changes_a_bit_at_a_realistic_size() -> None:
    """7 million weights and 4,096 tokens: matrix products large enough for the library's blocked kernels."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    params = SamplingParams(max_new_tokens=24)
    asked = [Request(str(i), list(range(20 + 5 * i)), params, (0, i), tuple(range(1 + i % 4))) for i in range(10)]
    results = []
    for slots, order in ((5, 1), (17, -1), (128, 1)):
        engine = create_engine("native", module=model, max_num_seqs=slots, max_model_len=128, check=False)
        results.append({(c.request_id, c.sample_index): c for c in engine.generate(asked[::order])})
    assert results[0] == results[1] == results[2]


def test_two_engines_that_split_the_samples_give_the_same_as_one(expected: dict) -> None:
    halves: dict = {}
    for parity in (0, 1):
        part = []
        for r in requests():
            mine = tuple(i for i in r.sample_indices if i % 2 == parity)
            if mine:
                part.append(Request(r.request_id, r.prompt_ids, r.params, r.uid, mine, r.step))
        halves |= run(part, max_num_seqs=8)
    assert halves == expected


def test_prompts_cut_into_chunks_give_the_same_log_probs(expected: dict) -> None:
    prompts = {r.request_id: list(r.prompt_ids) for r in requests()}
    temperatures = {r.request_id: r.params.temperature for r in requests()}
    for (name, _), c in run(requests(), max_num_seqs=8, max_num_batched_tokens=16).items():
        own = own_log_probs(tiny_model(), prompts[name], c.token_ids, temperatures[name])
        torch.testing.assert_close(torch.tensor(c.full_log_probs), own, atol=1e-5, rtol=0)


def test_another_step_seed_or_sample_index_gives_other_tokens() -> None:
    prompt = list(range(8))
    params = SamplingParams(max_new_tokens=20, seed=1)
    asked = [
        Request("a", prompt, params, sample_indices=(0, 1)),
        Request("b", prompt, params, step=1),
        Request("c", prompt, SamplingParams(max_new_tokens=20, seed=2)),
        Request("d", prompt, params, uid=(1, 0)),
    ]
    tokens = [tuple(c.token_ids) for c in run(asked, max_num_seqs=8).values()]
    assert len(set(tokens)) == 5
