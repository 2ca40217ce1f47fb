"""The generation service on a GPU: a thread of its own, a cache that comes and goes, weights that change in the middle."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from rollout_models import VOCAB, tiny_model

from quadriga.controller.call_record import CallMeter
from quadriga.controller.device_gate import DeviceGate
from quadriga.rollout import Completion, Request, SamplingParams, create_engine
from quadriga.rollout.service import GenerationService, Sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(device: str = "cuda", **options: Any) -> Any:
    settings = {"max_num_seqs": 16, "max_model_len": 160, "block_size": 16} | options
    return create_engine("native", module=tiny_model("qwen2").to(device), **settings)


def ask(step: int, new: int = 60, samples: int = 3) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (1, 16, 30, 67)]
    params = SamplingParams(max_new_tokens=new)
    return [Request(f"{step}.{i}", p, params, (0, i), tuple(range(samples)), step=step) for i, p in enumerate(prompts)]


def collect(service: GenerationService, count: int, limit_s: float = 60.0) -> dict[tuple[str, int], Sample]:
    came: list[Sample] = []
    deadline = time.monotonic() + limit_s
    while len(came) < count and time.monotonic() < deadline:
        came += service.take(1.0).samples
    return {(s.request_id, s.sample_index): s for s in came}


def test_a_thread_generates_what_the_engine_does_and_frees_its_cache_while_calls_use_the_device():
    options = {"eos_token_ids": [3, 50, 117]}
    asked = [ask(step) for step in (1, 2)]
    plain = make(**options)
    expected = [{(c.request_id, c.sample_index): c for c in plain.generate(requests)} for requests in asked]
    gate = DeviceGate()
    service = GenerationService(
        make(**options),
        gate,
        frees_cache=True,
        meter=lambda: CallMeter("actor", "generate"),
        choose_device=lambda: torch.cuda.set_device(0),
    )
    over = threading.Event()

    def train() -> None:
        """What calls do meanwhile: take and give memory, launch, wait for the device."""
        while not over.is_set():
            with gate.call():
                weight = torch.randn(512, 512, device="cuda", requires_grad=True)
                (weight @ weight).sum().backward()
                torch.cuda.synchronize()
            time.sleep(0.002)

    calls = threading.Thread(target=train)
    calls.start()
    try:
        for requests, own in zip(asked, expected, strict=True):
            service.submit(requests)
            came = collect(service, len(own))
            assert came.keys() == own.keys()
            assert all(came[key].token_ids.tolist() == own[key].token_ids for key in own)
            assert service.engine.asleep
    finally:
        over.set()
        calls.join()
        service.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_in_the_middle_go_on_under_new_weights_as_on_the_cpu(recompute: bool):
    def run(device: str) -> dict[tuple[str, int], Completion]:
        engine = make(device, recompute_on_update=recompute)
        engine.update_weights(1)
        for request in ask(1, new=40):
            engine.submit(request)
        done = []
        for _ in range(12):
            done += engine.step()
        torch.manual_seed(5)
        changed = [(n, p.detach() + 0.02 * torch.randn(p.shape).to(p)) for n, p in engine.module.named_parameters()]
        assert engine.update_weights(2, changed).version == 2
        while not engine.idle:
            done += engine.step()
        assert engine.pool.num_free == engine.pool.num_blocks
        return {(c.request_id, c.sample_index): c for c in done}

    gpu, cpu = run("cuda"), run("cpu")
    assert gpu.keys() == cpu.keys()
    assert {c.versions for c in gpu.values()} == {((1, 12), (2, 28))}
    different = [key for key in gpu if gpu[key].token_ids != cpu[key].token_ids]
    assert len(different) <= 1, different
    for key in gpu.keys() - set(different):
        assert cpu[key].versions == gpu[key].versions
        gap = torch.tensor(gpu[key].full_log_probs) - torch.tensor(cpu[key].full_log_probs)
        assert gap.abs().max() < 5e-4
