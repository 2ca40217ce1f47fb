"""The engine as its users meet it: streaming, stopping, aborting, weights, and what happens when something is wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch
from rollout_models import VOCAB, own_log_probs, tiny_model

from quadriga.errors import ConfigError, DataError, WorkerError
from quadriga.rollout import (
    Completion,
    Request,
    RolloutEngine,
    SamplingParams,
    create_engine,
    interface,
    register_engine,
)
from quadriga.rollout.weights import checksum


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def make(model: Any, **options: Any) -> Any:
    return create_engine("native", **({"module": model, "max_num_seqs": 8, "max_model_len": 128} | options))


def ask(name: str = "a", prompt: int = 5, new: int = 10, samples: int = 1, **more: Any) -> Request:
    return Request(
        name, list(range(prompt)), SamplingParams(max_new_tokens=new), (0, prompt), tuple(range(samples)), **more
    )


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)


# ---- streaming and ending --------------------------------------------------------------------------------------------


def test_short_samples_leave_before_long_ones_are_done(model: Any) -> None:
    engine = make(model)
    stream = engine.generate([ask("long", new=60), ask("short", new=3)])
    assert next(stream).request_id == "short"
    assert len(engine.scheduler.running) == 1
    assert [c.request_id for c in stream] == ["long"]


def test_a_response_ends_with_its_stop_token(model: Any) -> None:
    free = next(make(model).generate([ask(new=30)]))
    stop = free.token_ids[7]
    place = free.token_ids.index(stop)
    ended = next(make(model, eos_token_ids=[stop]).generate([ask(new=30)]))
    assert ended.token_ids == free.token_ids[: place + 1]
    assert (ended.finish_reason, free.finish_reason) == ("stop", "length")
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    ignoring = next(make(model, eos_token_ids=[stop]).generate([Request("a", list(range(5)), params, (0, 5))]))
    assert ignoring.token_ids == free.token_ids
    own_stop = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    assert next(make(model).generate([Request("a", list(range(5)), own_stop, (0, 5))])) == ended


def test_a_stop_string_across_tokens_ends_the_response(model: Any) -> None:
    free = next(make(model).generate([ask(new=40)]))
    text = Letters().decode(free.token_ids)
    params = SamplingParams(max_new_tokens=40, stop_strings=(text[20:23], "never there"))
    (ended,) = make(model, tokenizer=Letters()).generate([Request("a", list(range(5)), params, (0, 5))])
    assert ended.finish_reason == "stop_string"
    assert Letters().decode(ended.token_ids) == text[: text.index(text[20:23]) + 3]


def test_a_stop_string_that_never_comes_does_no_harm(model: Any) -> None:
    params = SamplingParams(max_new_tokens=20, stop_strings=("UPPER",))
    (c,) = make(model, tokenizer=Letters()).generate([Request("a", list(range(5)), params, (0, 5))])
    assert (c.finish_reason, len(c.token_ids)) == ("length", 20)


def test_aborted_samples_come_back_with_what_they_have(model: Any) -> None:
    engine = make(model, max_num_seqs=3)
    whole = {c.request_id: c for c in make(model).generate([ask("a", new=40), ask("b", new=5)])}
    stream = engine.generate([ask("a", new=40), ask("b", new=5), ask("c", samples=2, new=40)])
    seen: list[Completion] = [next(stream)]
    assert seen[0].request_id == "b"
    engine.abort(["a", "c"])
    seen += list(stream)
    partial = {(c.request_id, c.sample_index): c for c in seen}
    assert [partial[k].finish_reason for k in (("a", 0), ("c", 0), ("c", 1))] == ["aborted"] * 3
    assert partial["a", 0].token_ids == whole["a"].token_ids[:5]
    assert partial["c", 0].token_ids == []  # it never got a slot
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_deadline_gives_partial_samples(model: Any) -> None:
    engine = make(model)
    start = time.monotonic()
    late, free = (
        next(c for c in cs if c.request_id == "late")
        for cs in (
            list(engine.generate([ask("late", new=120, deadline_s=0.01), ask("other", prompt=4, new=10)])),
            list(engine.generate([ask("late", new=120)])),
        )
    )
    assert late.finish_reason == "deadline"
    assert len(late.token_ids) == len(late.log_probs) < 120
    assert late.token_ids == free.token_ids[: len(late.token_ids)]
    assert time.monotonic() - start < 60


def test_closing_the_stream_frees_everything(model: Any) -> None:
    engine = make(model)
    stream = engine.generate([ask("a", new=2), ask("b", new=100, samples=4)])
    next(stream)
    stream.close()
    assert engine.scheduler.idle
    assert engine.pool.num_free == engine.pool.num_blocks
    assert len(list(engine.generate([ask(new=3)]))) == 1


def test_an_exception_in_the_middle_of_a_batch_leaks_no_block() -> None:
    model = tiny_model()
    engine = make(model)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise MemoryError("out of memory")

    expected = list(engine.generate([ask(samples=3, new=20)]))
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        list(engine.generate([ask(samples=3, new=20), ask("b", prompt=40)]))
    hook.remove()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert model.config._attn_implementation != "quadriga_paged"
    assert list(engine.generate([ask(samples=3, new=20)])) == expected


def test_weights_that_diverged_stop_the_generation_with_a_reason() -> None:
    model = tiny_model()
    engine = make(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(WorkerError, match="not finite"):
        list(engine.generate([ask("broken")]))
    assert engine.pool.num_free == engine.pool.num_blocks


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_stale_engine_refuses_to_generate(model: Any) -> None:
    engine = make(model)
    echo = engine.update_weights(4)
    assert (echo.version, engine.version) == (4, 4)
    with pytest.raises(WorkerError, match="version 4, but 5"):
        list(engine.generate([replace(ask(), version=5)]))
    assert next(engine.generate([replace(ask(), version=4)])).version == 4


def test_a_sample_in_flight_goes_on_under_new_weights_and_tells_which_wrote_what(model: Any) -> None:
    """With the blocks of the old weights, or with blocks computed anew: then the tail is what the new weights say."""
    other = tiny_model(seed=7)
    for recompute in (False, True):
        engine = make(tiny_model(), recompute_on_update=recompute)
        engine.update_weights(1)
        engine.submit(ask("a", new=20, samples=2))
        for _ in range(6):
            assert not engine.step()
        engine.update_weights(2, other.named_parameters())
        assert not engine.idle
        done = []
        while not engine.idle:
            done += engine.step()
        assert [c.versions for c in done] == [((1, 6), (2, 14))] * 2
        for c in done:
            own = own_log_probs(other, list(range(5)), c.token_ids)
            gap = (own - torch.tensor(c.full_log_probs))[6:].abs().max().item()
            assert (gap < 1e-4) is recompute


def test_weights_changed_in_place_are_used_at_once_and_change_the_checksum() -> None:
    model = tiny_model()
    engine = make(model)
    first = engine.update_weights(1)
    before = next(engine.generate([ask(new=20)]))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    second = engine.update_weights(2)
    after = next(engine.generate([ask(new=20)]))
    assert first.checksum != second.checksum == checksum(model.named_parameters())
    assert before.token_ids != after.token_ids
    own = own_log_probs(model, list(range(5)), after.token_ids)
    torch.testing.assert_close(torch.tensor(after.full_log_probs), own, atol=1e-5, rtol=1e-5)


def test_weights_can_be_sent_by_name() -> None:
    sender, receiver = tiny_model(seed=1), tiny_model(seed=2)
    echo = make(receiver).update_weights(7, sender.named_parameters())
    assert echo.checksum == checksum(sender.named_parameters())
    engine = make(receiver)
    assert next(engine.generate([ask()])).token_ids == next(make(sender).generate([ask()])).token_ids
    with pytest.raises(WorkerError, match="no weight 'nonsense'"):
        engine.update_weights(8, [("nonsense", torch.zeros(1))])
    with pytest.raises(WorkerError, match="were not sent"):
        engine.update_weights(8, list(sender.named_parameters())[1:])
    with pytest.raises(WorkerError, match="shape"):
        engine.update_weights(8, [("model.norm.weight", torch.zeros(3))])


def test_checksums_of_shards_add_up() -> None:
    weight = torch.randn(8, 6)
    parts = [checksum([("w", part)]) for part in weight.split(2)]
    assert sum(parts) % (1 << 64) == checksum([("w", weight)])
    assert checksum([("w", weight.to(torch.bfloat16))]) != checksum([("w", weight)]) != checksum([("v", weight)])


def test_sleep_and_another_generation_wait_for_the_end_of_the_first(model: Any) -> None:
    engine = make(model)
    stream = engine.generate([ask("a", new=2), ask("b", new=50)])
    next(stream)
    for action in (engine.sleep, lambda: engine.generate([ask()])):
        with pytest.raises(WorkerError, match="middle of a generation"):
            action()
    stream.close()
    engine.update_weights(3)


def test_sleep_gives_the_cache_back_and_wake_goes_on(model: Any) -> None:
    engine = make(model)
    before = list(engine.generate([ask(samples=2)]))
    engine.sleep()
    with pytest.raises(WorkerError, match="asleep"):
        list(engine.generate([ask()]))
    engine.wake()
    assert list(engine.generate([ask(samples=2)])) == before


# ---- requests that cannot run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask("x", prompt=120, new=20), "do not fit into a context of 128 tokens"),
        (Request("x", []), "no prompt tokens"),
        (Request("x", [1], sample_indices=()), "no samples"),
        (Request("x", [1, VOCAB]), f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        (Request("x", [-1, 2]), "token -1 is outside"),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_any_other_starts(
    model: Any, request_: Request, message: str
) -> None:
    engine = make(model)
    with pytest.raises(DataError, match=message):
        engine.generate([ask("fine"), request_])
    assert engine.scheduler.idle


def test_a_cache_too_small_for_one_sequence_says_how_much_fits_and_which_key(model: Any) -> None:
    engine = make(model, kv_cache_tokens=64, block_size=16)
    with pytest.raises(ConfigError, match=r"(?s)70 tokens, but the whole KV cache holds 64.*gpu_memory_utilization"):
        engine.generate([ask(prompt=10, new=60)])
    assert len(next(engine.generate([ask(prompt=10, new=54)])).token_ids) == 54


def test_a_cache_of_no_block_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="no block of 32 tokens"):
        make(model, kv_cache_tokens=31)


def test_stop_strings_need_a_tokenizer(model: Any) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        make(model).generate([Request("x", [1], SamplingParams(max_new_tokens=3, stop_strings=("\n",)))])


def test_an_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'natve'; known: .*native.*name=native"):
        create_engine("natve")


def test_an_engine_of_ones_own_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo(RolloutEngine):
        """Repeats the prompt."""

        version, capacity, longest = 0, 1, 8

        def __init__(self) -> None:
            self.asked: list[Request] = []

        @property
        def idle(self) -> bool:
            return not self.asked

        def check(self, request: Request) -> None: ...

        def submit(self, request: Request) -> None:
            self.asked.append(request)

        def step(self) -> list[Completion]:
            r = self.asked.pop()
            zeros = [0.0] * len(r.prompt_ids)
            return [Completion(r.request_id, r.uid, 0, list(r.prompt_ids), zeros, zeros, "length", ((0, len(zeros)),))]

        def clear(self) -> None:
            self.asked.clear()

        update_weights = abort = sleep = wake = None  # type: ignore[assignment]

    monkeypatch.setattr(interface, "_ENGINES", dict(interface._ENGINES))  # known to no other test
    register_engine(Enum("Own", {"ECHO": "echo-of-tests"}).ECHO, Echo)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"known: echo-of-tests, native"):
        create_engine("ech")
    engine: RolloutEngine = create_engine("echo-of-tests")
    assert next(iter(engine.generate([ask()]))).token_ids == [0, 1, 2, 3, 4]


def test_ragged_responses_waste_less_than_a_tenth_of_the_rows(model: Any) -> None:
    engine = make(model, max_num_seqs=32, check=False)
    requests = [ask(f"r{i}", prompt=8, new=16 + (37 * i) % 100) for i in range(96)]
    assert sum(len(c.token_ids) for c in engine.generate(requests)) == sum(r.params.max_new_tokens for r in requests)
    waste = engine.statistics()
    assert waste["wasted_rows"] < 0.1
    assert waste["wasted_blocks"] < 0.25
