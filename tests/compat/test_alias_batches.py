"""verl's functions of batches and its losses that look at all rows, as recipes call them in a step of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import quadriga.compat.verl  # noqa: F401
from quadriga.algorithms import compute_advantage as own_advantage
from quadriga.protocol import DataProto


def batch() -> DataProto:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    scores = torch.zeros(4, 4)
    scores[range(4), mask.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.5, 0.0])
    tensors = {
        "responses": torch.randint(5, (4, 4)),
        "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), mask], 1),
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
        "old_log_probs": -torch.rand(4, 4),
        "ref_log_prob": -torch.rand(4, 4),
        "values": torch.rand(4, 4),
        "sum_pi_squared": torch.rand(4, 4),
    }
    extra = {"uid": np.array(["a", "a", "b", "b"], object), "fluent": np.array([1.0, 0.0, 0.0, 1.0], object)}
    return DataProto.from_dict(tensors, extra)


@pytest.mark.parametrize(
    "name", ["gae", "grpo", "grpo_vectorized", "rloo", "optimal_token_baseline", "tir_optimal_token_baseline"]
)
def test_compute_advantage_adds_what_the_estimator_of_that_name_says(name: str) -> None:
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask

    data = batch()
    mask = compute_response_mask(data)
    assert mask.tolist() == data.batch["attention_mask"][:, 2:].tolist()
    told = compute_advantage(data, adv_estimator=AdvantageEstimator(name), gamma=0.9, lam=0.8)
    tensors = told.batch
    inputs = {key: tensors[key] for key in ("values", "sum_pi_squared")} | {"old_log_prob": tensors["old_log_probs"]}
    if name == "gae":
        inputs |= {"gamma": 0.9, "lam": 0.8}
    advantages, returns = own_advantage(
        name.removesuffix("_vectorized"),
        token_level_rewards=tensors["token_level_rewards"],
        response_mask=mask,
        group_ids=data.non_tensor_batch["uid"],
        **inputs,
    )
    assert torch.equal(tensors["advantages"], advantages)
    assert torch.equal(tensors["returns"], returns)
    assert bool(tensors["advantages"].any())


def test_compute_advantage_finds_the_rewards_of_gdpo_and_an_estimator_of_ones_own() -> None:
    from verl.trainer.ppo.core_algos import register_adv_est
    from verl.trainer.ppo.ray_trainer import compute_advantage

    config = OmegaConf.create({"gdpo_reward_keys": ["fluent"], "gdpo_reward_weights": [1.0]})
    advantages = compute_advantage(batch(), "gdpo", config=config).batch["advantages"]
    assert advantages[0, 0] > 0 > advantages[1, 0]
    config.gdpo_reward_keys = ["absent"]
    with pytest.raises(KeyError, match="absent"):
        compute_advantage(batch(), "gdpo", config=config)

    @register_adv_est("recipes_own")
    def own(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray) -> tuple[Tensor, Tensor]:
        assert list(index) == ["a", "a", "b", "b"]
        return 2.0 * response_mask, 3.0 * response_mask

    told = compute_advantage(batch(), "recipes_own").batch
    assert told["advantages"].sum() == 2.0 * 10
    assert told["returns"].sum() == 3.0 * 10


def test_apply_kl_penalty_changes_rewards_and_moves_the_controller_on() -> None:
    from verl.trainer.ppo.core_algos import AdaptiveKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_response_mask

    data, controller = batch(), AdaptiveKLController(0.1, target_kl=0.01, horizon=10)
    data.batch["response_mask"] = compute_response_mask(data)
    data, figures = apply_kl_penalty(data, controller, kl_penalty="kl")
    tensors = data.batch
    kl = (tensors["old_log_probs"] - tensors["ref_log_prob"]) * tensors["response_mask"]
    assert torch.allclose(tensors["token_level_rewards"], tensors["token_level_scores"] - 0.1 * kl)
    assert figures["actor/reward_kl_penalty_coeff"] == 0.1
    rows = kl.sum(1) / tensors["response_mask"].sum(1)
    assert figures["actor/reward_kl_penalty"] == pytest.approx(float(rows.mean()))
    assert controller.value != 0.1


def loss_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    old = -torch.rand(3, 8)
    new = (old + 0.3 * torch.randn(3, 8)).requires_grad_()
    return old, new, torch.randn(3, 8), torch.ones(3, 8)


def test_losses_by_covariance_choose_among_the_rows_of_the_call() -> None:
    from verl.trainer.ppo.core_algos import (
        compute_policy_loss_clip_cov,
        compute_policy_loss_kl_cov,
        compute_policy_loss_vanilla,
        get_policy_loss_fn,
    )

    old, new, advantages, mask = loss_inputs()
    options = {"clip_ratio": 10.0, "clip_ratio_low": 10.0, "clip_ratio_high": 10.0, "clip_ratio_c": 100.0}
    held = {
        "clip_cov_ratio": 0.25,
        "clip_cov_lb": -100.0,
        "clip_cov_ub": 100.0,
        "kl_cov_ratio": 0.25,
        "ppo_kl_coef": 1.0,
    }
    config = OmegaConf.create({**options, "policy_loss": held})
    loss, told = compute_policy_loss_clip_cov(old, new, advantages, mask, "token-mean", config)
    (gradient,) = torch.autograd.grad(loss, new)
    assert int((gradient == 0).sum()) == 6  # a quarter of the tokens is held
    assert told["actor/pg_clipfrac"] == pytest.approx(0.25)
    plain, _ = compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", config)
    punished, _ = compute_policy_loss_kl_cov(old, new, advantages, mask, "token-mean", config)
    d = (new - old).detach()
    covariance = (advantages - advantages.mean()) * (new.detach() - new.detach().mean())
    chosen = covariance.flatten().topk(6).indices
    assert float((punished - plain).detach()) == pytest.approx(float(d.abs().flatten()[chosen].sum() / 24), rel=1e-4)
    assert get_policy_loss_fn("kl_cov") is not None


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_bypass_mode_corrects_by_the_ratio_or_by_weights(kind: str) -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_bypass_mode, compute_policy_loss_vanilla
    from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode

    old, new, advantages, mask = loss_inputs()
    data = DataProto.from_dict({"rollout_log_probs": old, "response_mask": mask})
    correction = OmegaConf.create({"loss_type": kind, "rollout_is": "token", "rollout_is_threshold": 1.1})
    config = OmegaConf.create({"clip_ratio": 0.2, "policy_loss": {"loss_mode": "vanilla"}})
    with pytest.raises(ValueError, match="apply_bypass_mode"):
        compute_policy_loss_bypass_mode(old, new, advantages, mask, config=config)
    OmegaConf.set_struct(config, True)
    apply_bypass_mode(data, correction, config.policy_loss)
    assert torch.equal(data.batch["old_log_probs"], old)
    assert config.policy_loss.loss_mode == "bypass_mode"
    loss, told = compute_policy_loss_bypass_mode(old, new, advantages, mask, "token-mean", config)
    (gradient,) = torch.autograd.grad(loss, new)
    if kind == "reinforce":
        weights = (new - old).detach().exp().clamp(max=1.1)
        assert torch.allclose(gradient, -advantages * weights / mask.sum(), atol=1e-6)
    else:
        plain, _ = compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", config)
        assert torch.allclose(gradient, torch.autograd.grad(plain, new)[0])
    assert "rollout_corr/rollout_is_mean" in told
    config.policy_loss.rollout_correction.loss_type = "nonsense"
    with pytest.raises(ValueError, match="nonsense"):
        compute_policy_loss_bypass_mode(old, new, advantages, mask, "token-mean", config)
