"""A prompt that begins with tokens of before computes only the rest, and nobody can tell from what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_models import VOCAB, own_log_probs, tiny_model

from quadriga.rollout import Completion, Request, SamplingParams, create_engine
from quadriga.rollout.router import Delivered, Router
from quadriga.rollout.service import GenerationService, Sample

BY_PROGRAM = ["llama", "qwen2", "qwen3", "mistral_window"]


def make(model: Any, **options: Any) -> Any:
    settings = {"max_num_seqs": 16, "max_model_len": 192, "block_size": 16} | options
    return create_engine("native", module=model, **settings)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def play(
    engine: Any, episodes: int = 6, turns: int = 4, between: Callable[[int], None] = lambda turn: None
) -> list[list[Completion]]:
    """Every turn goes on from the one before, with a few tokens more."""
    contexts = [ids(5 + 7 * e, e) for e in range(episodes)]
    played = []
    for turn in range(turns):
        between(turn)
        params = SamplingParams(max_new_tokens=9 + turn, temperature=0.8)
        asked = [
            Request(f"{e}", context, params, (0, e), call=turn, affinity=f"e{e}") for e, context in enumerate(contexts)
        ]
        done = sorted(engine.generate(asked), key=lambda c: int(c.request_id))
        played.append(done)
        contexts = [[*c, *d.token_ids, *ids(3 + turn, 100 + turn)] for c, d in zip(contexts, done, strict=True)]
    return played


@pytest.mark.parametrize("family", BY_PROGRAM)
def test_no_bit_depends_on_what_was_taken_from_the_cache(family: str) -> None:
    model = tiny_model(family)
    engine = make(model)
    reused, anew = play(engine), play(make(model, reuses_prefixes=False))
    assert engine.computes_by_program
    assert reused == anew
    assert all(c.cached_tokens == 0 for turn in anew for c in turn)
    lengths = [5 + 7 * e for e in range(6)]
    for turn, done in enumerate(reused):
        if turn:  # all but the last token that the turn before had written
            assert [c.cached_tokens for c in done] == [length + 9 + turn - 1 - 1 for length in lengths]
            lengths = [length + 9 + turn - 1 + 3 + turn - 1 for length in lengths]
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("options", [{"kv_cache_tokens": 192}, {"max_num_batched_tokens": 16}, {"max_num_seqs": 2}])
def test_little_memory_small_passes_and_few_slots_change_no_bit(options: dict[str, int]) -> None:
    model = tiny_model("qwen3")
    engine = make(model, **options)
    assert play(engine) == play(make(model, reuses_prefixes=False))
    if "kv_cache_tokens" in options:
        cached = engine.statistics()["cached_tokens"]
        play(whole := make(model))
        assert cached < whole.statistics()["cached_tokens"]  # some of it was given up, and computed again


def test_what_is_kept_costs_nobody_a_preemption() -> None:
    model = tiny_model()
    tight = {"kv_cache_tokens": 512, "max_num_seqs": 4}
    engines = [make(model, reuses_prefixes=reuses, **tight) for reuses in (True, False)]
    for engine in engines:
        play(engine, episodes=8)
    kept, plain_one = (engine.statistics()["preemptions"] for engine in engines)
    assert kept <= plain_one
    assert engines[0].pool.num_kept > 0


def test_samples_asked_for_one_by_one_compute_their_prompt_once_and_are_those_of_one_request() -> None:
    model = tiny_model()
    params = SamplingParams(max_new_tokens=20)
    together, apart = make(model), make(model)
    prompt = ids(45, 3)
    one = {c.sample_index: c for c in together.generate([Request("a", prompt, params, (0, 1), tuple(range(8)))])}
    before = apart.statistics()
    many = list(apart.generate([Request(f"{k}", prompt, params, (0, 1), (k,)) for k in range(8)]))
    after = apart.statistics()
    assert {c.sample_index: c.token_ids for c in many} == {k: c.token_ids for k, c in one.items()}
    assert {c.sample_index: c.log_probs for c in many} == {k: c.log_probs for k, c in one.items()}
    computed = {key: after[key] - before[key] for key in ("prompt_tokens", "cached_tokens")}
    assert computed["prompt_tokens"] - computed["cached_tokens"] == 45
    (late,) = apart.generate([Request("late", prompt, params, (0, 1), (9,))])
    assert late.cached_tokens == 32


def test_a_prompt_begins_with_blocks_that_another_computes_in_the_same_pass() -> None:
    """Also where each of the two has one row only, and would not wait for the other."""
    model = tiny_model()
    params = SamplingParams(max_new_tokens=6)
    first = ids(14, 1)
    results = []
    for reuses in (True, False):
        engine = make(model, reuses_prefixes=reuses)
        (start,) = engine.generate([Request("start", first, SamplingParams(max_new_tokens=2), (0, 1))])
        whole = [*first, *start.token_ids]  # a block, of which all but the last token is known
        asked = [Request("a", whole, params, (0, 2)), Request("b", [*whole, 5], params, (0, 3))]
        done = sorted(engine.generate(asked), key=lambda c: c.request_id)
        results.append([(c.token_ids, c.log_probs) for c in done])
        assert [c.cached_tokens for c in done] == ([15, 16] if reuses else [0, 0])
    assert results[0] == results[1]


@pytest.mark.parametrize("told", [True, False])
def test_new_weights_leave_nothing_known(told: bool) -> None:
    model, other = tiny_model(), tiny_model()
    weights = {name: weight.clone() * 1.1 for name, weight in tiny_model(seed=5).named_parameters()}

    def change(turn: int) -> None:
        if turn == 2 and told:
            engine.update_weights(1, weights.items())
        elif turn == 2:
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_(weights[name])

    engine = make(model)
    played = play(engine, between=change)
    engine = make(other, reuses_prefixes=False)
    model = other
    assert played == play(engine, between=change)
    assert all(c.cached_tokens > 0 for turn in (1, 3) for c in played[turn])
    assert all(c.cached_tokens == 0 for c in played[2])


def test_a_sample_that_has_seen_two_weights_leaves_nothing_behind() -> None:
    model = tiny_model()
    engine = make(model)
    params = SamplingParams(max_new_tokens=40)
    engine.submit(Request("a", ids(33, 1), params, (0, 1), affinity="a"))
    for _ in range(5):
        engine.step()
    engine.update_weights(1, tiny_model(seed=5).named_parameters())
    while not engine.idle:
        done = engine.step()
    assert len(done[0].versions) == 2
    context = [*ids(33, 1), *done[0].token_ids, 7]
    (after,) = engine.generate([Request("b", context, SamplingParams(max_new_tokens=8), (0, 1), version=1, call=1)])
    assert after.cached_tokens == 0
    own = own_log_probs(model, context, after.token_ids)
    torch.testing.assert_close(torch.tensor(after.full_log_probs), own, atol=1e-5, rtol=1e-5)


def test_sleep_and_a_generation_that_breaks_off_leave_nothing_known() -> None:
    engine = make(tiny_model())
    asked = Request("a", ids(40, 1), SamplingParams(max_new_tokens=4), (0, 1))
    list(engine.generate([asked]))
    engine.sleep()
    engine.wake()
    assert next(engine.generate([asked])).cached_tokens == 0
    stream = engine.generate([asked, replace(asked, request_id="b", params=SamplingParams(max_new_tokens=60))])
    assert next(stream).cached_tokens > 0
    stream.close()
    assert next(engine.generate([asked])).cached_tokens == 0


def test_an_aborted_turn_can_be_gone_on_from() -> None:
    engine = make(tiny_model())
    engine.submit(Request("a", ids(20, 1), SamplingParams(max_new_tokens=60), (0, 1)))
    for _ in range(10):
        engine.step()
    engine.abort(["a"])
    (partial,) = engine.step()
    context = [*ids(20, 1), *partial.token_ids]
    (after,) = engine.generate([Request("b", context, SamplingParams(max_new_tokens=3), (0, 1), call=1)])
    assert after.cached_tokens == len(context) - 1


@pytest.mark.parametrize("family", ["gpt2", "gemma2_softcap_window", "gemma3_window"])
def test_other_families_reuse_within_an_episode_and_compute_what_the_model_computes(family: str) -> None:
    """There a prompt's tokens and new ones differ in the last bit, so that single turns must not depend on what was before."""
    model = tiny_model(family)
    engine = make(model)
    played = play(engine)
    assert not engine.computes_by_program
    assert all(c.cached_tokens > 0 for turn in played[1:] for c in turn)
    context = ids(5 + 7 * 5, 5)
    for turn, done in enumerate(played):
        own = own_log_probs(model, context, done[5].token_ids, 0.8)
        torch.testing.assert_close(torch.tensor(done[5].full_log_probs), own, atol=1e-5, rtol=1e-5)
        context = [*context, *done[5].token_ids, *ids(3 + turn, 100 + turn)]
    single = Request("x", ids(40, 5), SamplingParams(max_new_tokens=5), (0, 5))
    assert next(engine.generate([single])) == next(make(model, reuses_prefixes=False).generate([single]))


class Services:
    """Engines behind services without threads, as a router reaches them."""

    def __init__(self, engines: list[Any]) -> None:
        self.services = [GenerationService(engine, threaded=False) for engine in engines]
        self.capacities = [engine.capacity for engine in engines]

    def submit(self, rank: int, requests: list[Request]) -> None:
        self.services[rank].submit(requests)

    def abort(self, rank: int, request_ids: list[str]) -> None:
        self.services[rank].abort(request_ids)

    def take_weights(self, rank: int, version: int) -> None:
        self.services[rank].take_weights(version, None)

    def events(self, timeout_s: float) -> list[Any]:
        for service in self.services:
            service.advance()
        return [Delivered(rank, service.take(0)) for rank, service in enumerate(self.services)]


def test_two_engines_behind_a_router_compute_almost_nothing_twice_and_give_what_one_gives() -> None:
    model, contexts, turns = tiny_model(), {f"{e}": ids(5 + 3 * e, e) for e in range(24)}, 4
    expected = play(make(model, reuses_prefixes=False, max_num_seqs=64), episodes=6)
    calls, written = dict.fromkeys(contexts, 0), {name: [] for name in contexts}
    engines = Services([make(model), make(model)])
    # The first six are those of `play`, and what they get must not depend on the others or on where they went.
    contexts |= {f"{e}": ids(5 + 7 * e, e) for e in range(6)}

    def ask(name: str) -> Request:
        params = SamplingParams(max_new_tokens=9 + calls[name], temperature=0.8)
        about = {"uid": (0, int(name)), "version": 0, "call": calls[name], "affinity": f"e{name}"}
        return Request(f"{name}.{calls[name]}", contexts[name], params, **about)

    def go_on(samples: list[Sample]) -> None:
        for sample in samples:
            name, call = sample.request_id.split(".")
            written[name].append(sample.token_ids.tolist())
            contexts[name] = [*contexts[name], *sample.token_ids.tolist(), *ids(3 + int(call), 100 + int(call))]
            calls[name] += 1
            if calls[name] < turns:
                router.submit([ask(name)])

    router = Router(engines, go_on, threaded=False)
    router.holds(0)
    router.submit([ask(name) for name in contexts])
    router.wait(lambda: all(len(turn) == turns for turn in written.values()))
    for e in range(6):
        assert written[f"{e}"] == [turn[e].token_ids for turn in expected]
    assert router.reuse.figures()["rollout/prefix_reuse"] >= 0.95
    assert all(service.engine.statistics()["cached_tokens"] > 0 for service in engines.services)
