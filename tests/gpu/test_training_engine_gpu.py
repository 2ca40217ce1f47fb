"""The training engine on a GPU: bfloat16 computation, float32 weights, attention kernels, offload, real shortage of memory."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_cases import gradients, mini_batch, ppo_loss, sgd_like, tiny_policy

from quadriga.config.schema_models import FSDPConfig
from quadriga.engine import TrainingEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def step(engine, data):
    return engine.train_mini_batch(data, ppo_loss(), 60, with_entropy=True)


def new_engine(**options):
    return TrainingEngine(tiny_policy(), optim=sgd_like(1e-3), device="cuda", **options)


def test_log_probs_are_those_of_the_cpu_up_to_bfloat16():
    data = mini_batch(rows=24)
    expected, expected_entropy = TrainingEngine(tiny_policy()).log_probs(data, 0.9, 60, with_entropy=True)
    ours, entropy = new_engine().log_probs(data, 0.9, 60, with_entropy=True)
    assert (ours - expected).abs().max() < 1e-2
    assert (entropy - expected_entropy).abs().max() < 1e-2


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_point_where_those_of_the_cpu_do(reshard):
    data = mini_batch(rows=24)
    cpu = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    gpu = new_engine(grad_clip=None, fsdp=FSDPConfig(reshard_after_forward=reshard))
    step(cpu, data), step(gpu, data)
    ours = gradients(gpu)
    for name, expected in gradients(cpu).items():
        assert torch.nn.functional.cosine_similarity(ours[name].cpu().flatten(), expected.flatten(), dim=0) > 0.99, name
    assert {p.dtype for p in gpu.model.parameters()} == {torch.float32}


def test_offloaded_training_is_the_same_and_leaves_the_device_empty():
    data = mini_batch(rows=24)
    plain, away = new_engine(), new_engine(fsdp=FSDPConfig(param_offload=True, optimizer_offload=True))
    losses = [(step(plain, data)["loss"], step(away, data)["loss"]) for _ in range(3)]
    assert all(one == pytest.approx(other, abs=1e-6) for one, other in losses)
    assert {p.device.type for p in away.model.parameters()} == {"cpu"}
    moments = [state[name] for state in away.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.device.type for moment in moments} == {"cpu"}
    assert all(weight.is_cuda for _, weight in away.full_weights(torch.bfloat16))


def test_state_round_trip():
    data = mini_batch(rows=24)
    first = new_engine()
    step(first, data)
    second = new_engine()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert step(second, data)["loss"] == pytest.approx(step(first, data)["loss"], abs=1e-6)


def test_running_out_of_device_memory_halves_the_budget():
    data = mini_batch(rows=24)
    engine = new_engine()

    def hog(module, args):
        if args[0].shape[1] > 40:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

    engine.model.huggingface.model.layers[1].mlp.register_forward_pre_hook(hog)
    assert step(engine, data)["token_budget"] <= 40
