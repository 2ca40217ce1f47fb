"""What can go wrong inside a step: gradients that are not finite, memory that does not suffice."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_cases import BUDGET, gradients, mini_batch, ppo_loss, sgd_like, tiny_policy

from quadriga.engine import TrainingEngine
from quadriga.errors import WorkerError
from quadriga.protocol import DataProto


def poisoned():
    data = mini_batch()
    data.batch["advantages"][0, 0] = float("nan")
    return data


def weights_of(engine):
    return {name: weight.clone() for name, weight in engine.full_weights()}


def step(engine, data, max_tokens=BUDGET):
    return engine.train_mini_batch(data, ppo_loss(), max_tokens, with_entropy=True)


def test_a_non_finite_gradient_skips_the_step_and_is_counted():
    engine = TrainingEngine(tiny_policy(), optim=sgd_like())
    before = weights_of(engine)
    metrics = step(engine, poisoned())
    assert metrics["skipped"] == 1
    assert metrics["nonfinite_steps"] == 1
    after = weights_of(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not engine.optimizer.state, "AdamW has seen nothing of it"
    metrics = step(engine, mini_batch())
    assert metrics["skipped"] == 0
    assert metrics["nonfinite_steps"] == 1
    assert any(not torch.equal(before[name], weight) for name, weight in engine.full_weights())


def test_too_many_in_a_row_stop_the_run_with_a_dump_that_repeats_it(tmp_path):
    engine = TrainingEngine(tiny_policy(), optim=sgd_like(), max_nonfinite_steps=2, dump_dir=tmp_path / "dumps")
    step(engine, poisoned())
    with pytest.raises(WorkerError, match="2 optimiser steps in a row") as caught:
        step(engine, poisoned())
    (dump,) = (tmp_path / "dumps").iterdir()
    assert str(dump) in str(caught.value)
    replayed = DataProto.load_from_disk(dump)
    assert step(TrainingEngine(tiny_policy(), optim=sgd_like()), replayed)["skipped"] == 1


def test_a_finite_step_in_between_starts_the_count_again(tmp_path):
    engine = TrainingEngine(tiny_policy(), optim=sgd_like(), max_nonfinite_steps=2, dump_dir=tmp_path)
    for data in (poisoned(), mini_batch(), poisoned()):
        step(engine, data)
    assert engine.nonfinite.total == 2
    assert engine.nonfinite.in_a_row == 1


def limit_memory(engine, max_tokens, where):
    """Make a layer allocate more than any machine has whenever a micro-batch is larger than `max_tokens`."""
    tried = []

    def hook(module, args, *_):
        tokens = args[0].shape[1]
        tried.append(tokens)
        if tokens > max_tokens:
            torch.empty(1 << 50)

    layer = engine.model.huggingface.model.layers[1].mlp
    if where == "forward":
        layer.register_forward_pre_hook(hook)
    else:
        layer.register_full_backward_hook(lambda module, _, grads: hook(module, grads))
    return tried


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_token_budget_and_the_step_is_still_exact(where, caplog):
    expected = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    step(expected, mini_batch())
    engine = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    tried = limit_memory(engine, 30, where)
    with caplog.at_level(logging.WARNING):
        metrics = step(engine, mini_batch())
    assert tried[0] > 60, "half of it does not fit either"
    assert metrics["token_budget"] <= 30
    assert "out of memory" in caplog.text
    assert f"at most {int(metrics['token_budget'])} tokens" in caplog.text
    ours, reference = gradients(engine), gradients(expected)
    for name in reference:
        assert (ours[name] - reference[name]).abs().max() <= 1e-6, name
    tried.clear()
    step(engine, mini_batch())
    assert max(tried) <= 30, "the smaller budget is kept"


def test_out_of_memory_in_a_forward_pass_without_gradient_is_survived_too():
    engine = TrainingEngine(tiny_policy())
    expected, _ = engine.log_probs(mini_batch(), 1.0, BUDGET)
    limit_memory(engine, 40, "forward")
    ours, _ = engine.log_probs(mini_batch(), 1.0, BUDGET)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)


def test_a_single_row_that_does_not_fit_ends_the_run_with_advice():
    engine = TrainingEngine(tiny_policy(), optim=sgd_like())
    limit_memory(engine, 2, "forward")
    with pytest.raises(WorkerError, match="a single row of 12 tokens") as caught:
        step(engine, mini_batch())
    assert "gradient_checkpointing" in caught.value.fix


def test_a_pair_that_does_not_fit_ends_the_run_too():
    engine = TrainingEngine(tiny_policy(), optim=sgd_like())
    data = mini_batch()
    data = data[list(range(len(data) // 2 * 2))]
    limit_memory(engine, 13, "forward")  # each row fits, the longest pair does not
    with pytest.raises(WorkerError, match="out of memory"):
        engine.train_mini_batch(data, ppo_loss(), BUDGET, rows_together=2)


def test_another_error_in_the_model_is_not_taken_for_memory():
    engine = TrainingEngine(tiny_policy(), optim=sgd_like())

    def broken(*_):
        raise RuntimeError("something else")

    engine.model.huggingface.model.layers[0].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="something else"):
        step(engine, mini_batch())
