"""What a loss knows of a whole mini-batch: choices add up to what corrections dropped before, and nothing may be left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import gradients, mini_batch, sgd_like, tiny_policy
from omegaconf import OmegaConf

from quadriga.config import load_config
from quadriga.config.schema import Config
from quadriga.engine import TrainingEngine
from quadriga.workers.losses import actor_loss
from quadriga.workers.mini_batch_view import MiniBatchView


def config_of(**changes: Any) -> Config:
    base = {"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"rollout": {"n": 2}}}
    return load_config(OmegaConf.to_container(OmegaConf.merge(base, changes)))


def loss_of(**policy_loss: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"actor": {"policy_loss": policy_loss}}}


@pytest.fixture
def engine() -> TrainingEngine:
    return TrainingEngine(tiny_policy(), optim=sgd_like(1e-4), grad_clip=None)


def test_tokens_that_m2po_dropped_stay_dropped_among_those_of_highest_entropy(engine: TrainingEngine) -> None:
    config = config_of(**loss_of(entropy_top_ratio=0.5))
    part = mini_batch()
    MiniBatchView(config, engine).add(part, draw=3)
    chosen = part.batch["token_weights"].clone()
    dropped = torch.ones_like(chosen)
    dropped[:, ::2] = 0
    again = mini_batch()
    again.batch["token_weights"] = dropped.clone()
    MiniBatchView(config, engine).add(again, draw=3)
    assert torch.equal(again.batch["token_weights"], chosen * dropped)
    assert 0 < again.batch["token_weights"].sum() < chosen.sum()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "algorithm": {
                "rollout_correction": {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2}
            }
        },
        loss_of(loss_mode="clip_cov"),
        loss_of(loss_mode="kl_cov"),
        loss_of(entropy_top_ratio=0.5),
    ],
    ids=["rejection", "clip_cov", "kl_cov", "entropy"],
)
def test_a_mini_batch_of_which_nothing_is_left_changes_nothing(engine: TrainingEngine, changes: dict[str, Any]) -> None:
    config, part = config_of(**changes), mini_batch()
    part.batch["response_mask"] = torch.zeros_like(part.batch["response_mask"])
    assert MiniBatchView(config, engine).add(part, draw=3) == {}
    metrics = engine.train_mini_batch(part, actor_loss(config.actor_rollout_ref.actor), 100, with_entropy=True)
    assert metrics["actor/pg_loss" if "actor/pg_loss" in metrics else "pg_loss"] == 0
    assert all((gradient == 0).all() for gradient in gradients(engine).values())
