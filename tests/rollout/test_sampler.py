"""Sampling follows the distribution it was asked for, and says how likely each token was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_models import VOCAB, own_log_probs, tiny_model

from quadriga.errors import ConfigError
from quadriga.rollout import Request, SamplingParams
from quadriga.rollout.native.randomness import stream_key, uniforms
from quadriga.rollout.native.sampler import _group_sums, _inverse_cdf, needs_of, sample
from quadriga.rollout.native.sequence import Sequence
from quadriga.rollout.native.slots import Sampled, SlotTable

# ---- random numbers --------------------------------------------------------------------------------------------------


def test_uniforms_fill_the_interval_evenly_and_independently() -> None:
    keys = torch.tensor([stream_key(0, 0, (0, row), 0) for row in range(200)])
    u = torch.stack([uniforms(keys, torch.full((200,), position)) for position in range(500)])
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, bins=50, min=0, max=1)
    expected = u.numel() / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # 49 degrees of freedom: 1 in 100,000
    centred = u - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1)):  # neighbouring positions, neighbouring rows
        assert (centred * other).mean().abs() < 5 / 12 / math.sqrt(u.numel())


def test_streams_of_different_keys_do_not_meet() -> None:
    parts = [
        (s, t, (e, r), i) for s in range(3) for t in range(3) for e in range(3) for r in range(30) for i in range(8)
    ]
    assert len({stream_key(*p) for p in parts}) == len(parts)


def test_every_call_of_an_episode_has_a_stream_of_its_own_and_the_first_that_of_a_single_request() -> None:
    keys = [stream_key(1, 2, (3, 4), i, call) for i in range(8) for call in range(64)]
    assert len(set(keys)) == len(keys)
    assert keys[::64] == [stream_key(1, 2, (3, 4), i) for i in range(8)]
    assert stream_key(0, 0, (0, 0), 0) == 8695987549771912286  # a stored run can be generated again


def test_a_key_depends_on_the_order_of_its_parts() -> None:
    assert stream_key(1, 2, (3, 4), 5) != stream_key(2, 1, (3, 4), 5) != stream_key(2, 1, (4, 3), 5)


# ---- distributions ---------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, params: SamplingParams, rows: int, prompt: tuple[int, ...] = (0,)) -> Sampled:
    """`rows` samples, of which each has a stream of its own, from one row of `logits[V]`."""
    table = SlotTable(rows, logits.numel(), (), torch.device("cpu"))
    table.reserve(params.max_new_tokens, len(params.stop_token_ids))
    sequences = [Sequence(Request("r", prompt, params), i, math.inf, slot=i) for i in range(rows)]
    table.load(sequences)
    return sample(logits.expand(rows, -1).clone(), table, torch.arange(rows), needs_of([params]))


def allowed_by_sorting(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after truncation, the slow and obvious way."""
    p = (logits / params.scale_temperature).softmax(-1).double()
    order = p.argsort(descending=True)
    keep = torch.zeros_like(p, dtype=torch.bool)
    count = params.top_k if params.top_k > 0 else p.numel()
    mass, total = 0.0, p[order[:count]].sum().item()
    for token in order[:count]:
        if mass >= params.top_p * total and params.top_p < 1:
            break
        mass += p[token].item()
        keep[token] = True
    keep &= p >= params.min_p * p.max()
    p = torch.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.7, top_k=40, top_p=0.8, min_p=0.05),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-6),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [10, 64, 333])
def test_frequencies_are_the_probabilities_asked_for(params: SamplingParams, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    rows = 20_000
    drawn = draw(logits, params, rows)
    expected = allowed_by_sorting(logits, params)
    assert not (drawn.tokens.bincount(minlength=vocab)[expected == 0]).any()
    frequency = drawn.tokens.bincount(minlength=vocab) / rows
    assert (frequency - expected).abs().max() < 5 * math.sqrt(0.25 / rows)
    torch.testing.assert_close(drawn.log_probs.double(), expected.log()[drawn.tokens], atol=1e-5, rtol=1e-5)
    full = (logits / params.scale_temperature).log_softmax(-1)[drawn.tokens]
    torch.testing.assert_close(drawn.full_log_probs, full, atol=1e-5, rtol=1e-5)


def test_top_p_of_a_flat_distribution_looks_beyond_the_first_tokens() -> None:
    """More tokens than the sampler sorts at first are needed to reach the mass."""
    logits = torch.linspace(0, 0.1, 3000)
    drawn = draw(logits, SamplingParams(top_p=0.9), 5000)
    expected = allowed_by_sorting(logits, SamplingParams(top_p=0.9))
    assert (expected > 0).sum() > 2600
    assert not expected[drawn.tokens].eq(0).any()
    torch.testing.assert_close(drawn.log_probs.double(), expected.log()[drawn.tokens], atol=1e-4, rtol=0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-200, 200, width=32), min_size=2, max_size=300),
    st.sampled_from([SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3, min_p=0.1)]),
)
def test_no_token_without_probability_is_ever_drawn(values: list[float], params: SamplingParams) -> None:
    logits = torch.tensor(values)
    logits[0] = float("-inf")
    drawn = draw(logits, params, 50)
    assert (drawn.tokens > 0).all()
    assert drawn.log_probs.isfinite().all()
    assert (drawn.log_probs <= 1e-5).all()
    assert (drawn.full_log_probs <= drawn.log_probs + 1e-5).all()


def test_greedy_takes_the_likeliest_token_and_scores_it_at_temperature_one() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for params in (SamplingParams(temperature=0), SamplingParams(do_sample=False, temperature=0.3)):
        drawn = draw(logits, params, 3)
        assert drawn.tokens.tolist() == [int(logits.argmax())] * 3
        torch.testing.assert_close(drawn.log_probs, logits.log_softmax(-1).max().expand(3))


def test_repetition_penalty_makes_seen_tokens_rarer_but_not_in_the_trainers_log_prob() -> None:
    logits = torch.tensor([3.0, 3.0, -1.0, -1.0])
    drawn = draw(logits, SamplingParams(repetition_penalty=2.0), 4000, prompt=(0, 2))
    punished = torch.tensor([1.5, 3.0, -2.0, -1.0])
    torch.testing.assert_close(drawn.log_probs, punished.log_softmax(-1)[drawn.tokens])
    torch.testing.assert_close(drawn.full_log_probs, logits.log_softmax(-1)[drawn.tokens])
    share = (drawn.tokens == 0).float().mean().item()
    assert abs(share - punished.softmax(-1)[0].item()) < 0.03


def test_no_stop_token_before_min_new_tokens() -> None:
    params = SamplingParams(max_new_tokens=5, min_new_tokens=2, stop_token_ids=(1,))
    drawn = draw(torch.tensor([0.0, 10.0, 0.0]), params, 200)
    assert not (drawn.tokens == 1).any()
    assert set(drawn.tokens.tolist()) == {0, 2}


# ---- through the engine ----------------------------------------------------------------------------------------------


def test_requests_with_different_parameters_run_together_and_alone_the_same() -> None:
    from quadriga.rollout import create_engine

    model = tiny_model()
    kinds = [
        SamplingParams(max_new_tokens=12),
        SamplingParams(max_new_tokens=12, top_k=3),
        SamplingParams(max_new_tokens=12, temperature=0.5, top_p=0.7),
        SamplingParams(max_new_tokens=12, repetition_penalty=1.4),
        SamplingParams(max_new_tokens=12, do_sample=False),
        SamplingParams(max_new_tokens=12, min_new_tokens=12, stop_token_ids=tuple(range(100))),
    ]
    requests = [Request(str(i), [3, 1, 4, 1, 5], p, (0, i), (0, 1)) for i, p in enumerate(kinds)]
    engine = create_engine("native", module=model, max_num_seqs=16, max_model_len=64)
    together = {(c.request_id, c.sample_index): c for c in engine.generate(requests)}
    alone = {(c.request_id, c.sample_index): c for r in requests for c in engine.generate([r])}
    assert together == alone
    for i, params in enumerate(kinds):
        c = together[str(i), 0]
        own = own_log_probs(model, [3, 1, 4, 1, 5], c.token_ids, params.scale_temperature)
        torch.testing.assert_close(torch.tensor(c.full_log_probs), own, atol=1e-5, rtol=1e-5)
    assert not set(together["5", 0].token_ids[:11]) & set(range(100))
    assert together["4", 0].token_ids == together["4", 1].token_ids
    assert max(t for c in together.values() for t in c.token_ids) < VOCAB


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("min_new_tokens", 200),
        ("stop_strings", ("",)),
    ],
)
def test_impossible_parameters_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        SamplingParams(**{key: value})


def test_numbers_on_the_very_edge_of_a_group_draw_a_token_that_has_weight() -> None:
    """A group's sum and the running sum inside it round differently, so the edge may lie beyond all of its tokens."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(4000, 192, generator=generator) ** 8
    weights[:, 60:64] = weights[:, 124:128] = weights[:, 180:] = 0
    sums = _group_sums(weights)
    for group in range(3):
        edge = sums.cumsum(-1)[:, group] / sums.cumsum(-1)[:, -1]
        for u in (edge, edge.nextafter(torch.zeros(1)), edge.nextafter(torch.ones(1))):
            tokens = _inverse_cdf(weights, sums, u.clamp(max=1 - 2.0**-24))
            assert (weights.gather(1, tokens[:, None]) > 0).all()
