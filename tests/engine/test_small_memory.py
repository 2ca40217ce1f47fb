"""Optimiser steps in parts and narrow gradients: the same step with less memory."""

from __future__ import annotations

import pytest
import torch
from engine_cases import mini_batch, ppo_loss, tiny_policy

from quadriga.checkpoint.shards import load_engine, save_engine
from quadriga.config.names import OPTIMISERS
from quadriga.config.schema_models import FSDPConfig, OptimConfig
from quadriga.engine import TrainingEngine


def new_engine(name: str = "adamw", *, offload: bool = False, seed: int = 0, **fsdp) -> TrainingEngine:
    """With `offload`, as on an accelerator: its copies are made here too, from host memory to host memory."""
    torch.set_num_threads(1)
    engine = TrainingEngine(
        tiny_policy(seed), optim=OptimConfig(name=name, lr=1e-2), fsdp=FSDPConfig(**fsdp), grad_clip=0.3
    )
    engine.offload.offloads_optimizer, engine.offload.bucket = offload, 3000
    return engine


def train(engine: TrainingEngine, steps: range) -> list[dict[str, float]]:
    return [engine.train_mini_batch(mini_batch(seed=n), ppo_loss(), 40, with_entropy=True) for n in steps]


def weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.full_weights()}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_step_in_parts_is_the_same_step(name):
    whole, parts = new_engine(name), new_engine(name, offload=True)
    assert train(whole, range(3)) == train(parts, range(3))
    ours, expected = weights(parts), weights(whole)
    assert all(torch.equal(ours[n], expected[n]) for n in expected)


def test_only_some_of_an_offloaded_state_is_on_the_device_at_a_time():
    engine = new_engine(offload=True)
    train(engine, range(2))
    state = sum(v.nbytes for values in engine.optimizer.state.values() for v in values.values())
    largest = max(sum(v.nbytes for v in values.values()) for values in engine.optimizer.state.values())
    assert largest <= engine.offload.most_on_device <= 2 * max(largest, 8 * engine.offload.bucket)
    assert engine.offload.most_on_device < state / 2
    assert engine.offload._on_device == 0, "all of it has gone back"


def test_a_run_in_parts_resumes_from_one_that_was_whole(tmp_path):
    straight = new_engine()
    train(straight, range(2))
    save_engine(straight, tmp_path)
    resumed = new_engine(seed=5, offload=True)
    load_engine(resumed, tmp_path)
    assert train(resumed, range(2, 4)) == train(straight, range(2, 4))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_narrow_gradients_take_half_the_memory_and_lead_the_same_way(name):
    wide, narrow = new_engine(name), new_engine(name, grad_dtype="bfloat16")
    seen = []
    step = narrow.offload.step
    narrow.offload.step = lambda: (seen.extend(p.grad.dtype for p in narrow.parameters), step())
    ours, expected = train(narrow, range(3)), train(wide, range(3))
    assert set(seen) == {torch.bfloat16}
    start = {n: p.detach() for n, p in tiny_policy().causal_lm.named_parameters()}
    for one, other in zip(ours, expected, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.02)
    new = weights(narrow)
    way = {n: w - start[n] for n, w in weights(wide).items()}
    off = sum(float((new[n] - start[n] - way[n]).square().sum()) for n in way)
    assert off < 0.05 * sum(float(w.square().sum()) for w in way.values())
