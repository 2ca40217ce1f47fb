from __future__ import annotations

import pytest
import torch
from engine_cases import BUDGET, mini_batch, ppo_loss, tiny_policy

from quadriga.config.schema_models import OptimConfig
from quadriga.engine import TrainingEngine
from quadriga.engine.optimizer import lr_factor, make_optimizer
from quadriga.errors import ConfigError


def factors(total, **settings):
    config = OptimConfig(betas=[0.9, 0.999], **settings)
    return [round(lr_factor(step, config, total), 6) for step in range(total)]


def test_warm_up_is_linear_and_ends_at_the_full_rate():
    assert factors(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_can_be_a_share_of_all_steps():
    assert factors(10, lr_warmup_steps_ratio=0.2)[:3] == [0.5, 1.0, 1.0]


def test_an_explicit_number_of_warm_up_steps_beats_the_share():
    assert factors(10, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5)[0] == 1.0


def test_linear_and_cosine_fall_to_the_lowest_rate():
    assert factors(4, lr_scheduler_type="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(4, lr_scheduler_type="linear", min_lr_ratio=0.5) == [1.0, 0.875, 0.75, 0.625]
    cosine = factors(4, lr_scheduler_type="cosine")
    assert cosine[0] == 1.0
    assert cosine[2] == 0.5
    assert cosine == sorted(cosine, reverse=True)


def test_wsd_is_stable_until_the_last_tenth():
    rates = factors(20, lr_scheduler_type="wsd", lr_warmup_steps=2)
    assert rates[1:19] == [1.0] * 18
    assert rates[19] == 0.5


def test_a_schedule_that_ends_needs_the_number_of_steps():
    with pytest.raises(ConfigError, match="cosine"):
        lr_factor(0, OptimConfig(lr_scheduler_type="cosine"), None)
    with pytest.raises(ConfigError, match="ratio"):
        lr_factor(0, OptimConfig(lr_warmup_steps_ratio=0.1), None)


def test_the_rate_advances_per_trainer_step_and_not_per_mini_batch():
    config = OptimConfig(lr=1.0e-3, lr_scheduler_type="linear", betas=[0.9, 0.999])
    engine = TrainingEngine(tiny_policy(), optim=config, total_steps=4)
    rates = []
    for _ in range(2):
        rates += [engine.train_mini_batch(mini_batch(), ppo_loss(), BUDGET, with_entropy=True)["lr"] for _ in range(2)]
        engine.end_step()
    assert rates == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.75e-3])
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-3)


def test_biases_and_norms_are_not_decayed():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(weight_decay=0.1, betas=[0.9, 0.999]))
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.1, 1), (0.0, 3)]


def test_a_frozen_model_cannot_be_trained():
    with pytest.raises(ConfigError, match="no weights to train"):
        TrainingEngine(tiny_policy().requires_grad_(False), optim=OptimConfig(betas=[0.9, 0.999]))
