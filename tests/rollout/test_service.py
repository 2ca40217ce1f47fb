"""The service: anybody submits, results come as they finish, calls come before steps, and nothing waits for ever."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch
from rollout_models import tiny_model

from quadriga.controller.device_gate import DeviceGate
from quadriga.errors import DataError
from quadriga.rollout import Request, SamplingParams, create_engine
from quadriga.rollout.service import GenerationService, Sample


@pytest.fixture(scope="module")
def engine() -> Any:
    return create_engine("native", module=tiny_model(), max_num_seqs=8, max_model_len=128)


@pytest.fixture
def serve(engine: Any) -> Any:
    services = []

    def start(**options: Any) -> GenerationService:
        engine.clear()
        engine.wake()
        services.append(GenerationService(engine, **options))
        return services[-1]

    yield start
    for service in services:
        service.close()


def ask(name: str, new: int = 5, samples: int = 1) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_new_tokens=new), (0, len(name)), tuple(range(samples)))


def collect(service: GenerationService, count: int, limit_s: float = 60.0) -> list[Sample]:
    came: list[Sample] = []
    deadline = time.monotonic() + limit_s
    while len(came) < count and time.monotonic() < deadline:
        came += service.take(1.0).samples
    return came


def test_samples_come_as_they_finish_and_are_those_of_the_engine(engine: Any, serve: Any) -> None:
    asked = [ask("long", 60), ask("short", 3, samples=2), ask("middle", 20)]
    expected = {(c.request_id, c.sample_index): Sample.of(c) for c in engine.generate(asked)}
    service = serve()
    service.submit(asked)
    came = collect(service, 4)
    assert [s.request_id for s in came] == ["short", "short", "middle", "long"]
    for sample in came:
        own = expected[sample.request_id, sample.sample_index]
        assert sample.token_ids.tolist() == own.token_ids.tolist()
        assert sample.full_log_probs.tolist() == own.full_log_probs.tolist()
        assert sample.versions == ((0, len(sample.token_ids)),)


def test_requests_may_come_at_any_time(serve: Any) -> None:
    service = serve()
    for k in range(6):
        service.submit([ask(f"r{k}", 10 + k)])
        time.sleep(0.01)
    assert sorted(s.request_id for s in collect(service, 6)) == [f"r{k}" for k in range(6)]


def test_who_waits_is_told_at_once(serve: Any) -> None:
    """Pushed, not polled: `take` comes back within 50 ms of the end of a sample."""
    service = serve()
    ended: list[float] = []
    step = service.engine.step

    def noting() -> Any:
        done = step()
        ended.extend(time.monotonic() for _ in done)
        return done

    service.engine.step = noting
    try:
        delays = []
        for k in range(10):
            service.submit([ask(f"r{k}", 4)])
            assert len(service.take(30.0).samples) == 1
            delays.append(time.monotonic() - ended[-1])
    finally:
        del service.engine.step
    assert sorted(delays)[5] < 0.05


def test_an_aborted_request_comes_out_as_it_is(serve: Any) -> None:
    service = serve()
    step, steps = service.engine.step, itertools.count(1)

    def aborting() -> Any:
        done = step()
        if next(steps) == 10:
            service.abort(["endless"])
        return done

    service.engine.step = aborting
    try:
        service.submit([ask("endless", 110), ask("other", 5)])
        came = {s.request_id: s for s in collect(service, 2)}
    finally:
        del service.engine.step
    assert came["endless"].finish_reason == "aborted"
    assert len(came["endless"].token_ids) < 110
    assert came["other"].finish_reason == "length"


def test_a_call_comes_before_the_next_step_and_generation_goes_on_after_it(serve: Any) -> None:
    gate = DeviceGate()
    service = serve(gate=gate)
    service.submit([ask("a", 100)])
    with gate.call():
        before = service.engine.table.count.sum().item()
        time.sleep(0.1)
        assert service.engine.table.count.sum().item() == before
    assert len(collect(service, 1)) == 1


def test_weights_taken_between_two_steps_are_told_to_who_listens(serve: Any) -> None:
    gate = DeviceGate()
    service = serve(gate=gate)
    weights = [(n, p.detach().clone()) for n, p in service.engine.module.named_parameters()]
    service.submit([ask("a", 100)])
    with gate.call():
        echo = service.take_weights(3, weights)
    delivery = service.take(30.0)
    assert delivery.held == echo
    came = delivery.samples or collect(service, 1)
    assert came[0].versions[-1][0] == 3
    service.engine.update_weights(0)


def test_a_request_that_can_never_run_is_told_to_who_waits(serve: Any) -> None:
    service = serve()
    service.submit([ask("too long", 1000)])
    with pytest.raises(DataError, match="do not fit into a context"):
        service.take(30.0)


def test_an_engine_that_shares_its_device_sleeps_when_it_has_nothing_to_do(engine: Any, serve: Any) -> None:
    service = serve(frees_cache=True)
    assert engine.asleep
    service.submit([ask("a", 5)])
    assert len(collect(service, 1)) == 1
    assert engine.asleep
    service.submit([ask("b", 5)])
    assert len(collect(service, 1)) == 1


def test_take_comes_back_without_a_sample_when_its_time_is_up(serve: Any) -> None:
    service = serve()
    began = time.monotonic()
    delivery = service.take(0.05)
    assert delivery.samples == []
    assert time.monotonic() - began < 5
    assert delivery.idle_s > 0


def test_calls_do_not_starve_behind_a_loop_that_never_rests() -> None:
    gate = DeviceGate()
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            with gate.step():
                time.sleep(0.001)

    thread = threading.Thread(target=loop)
    thread.start()
    began = time.monotonic()
    for _ in range(20):
        with gate.call():
            torch.zeros(1)
    took = time.monotonic() - began
    over.set()
    thread.join()
    assert took < 5
