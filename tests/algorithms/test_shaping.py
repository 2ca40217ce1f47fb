"""Length rewards, PF-PPO's draw and the adaptive entropy bonus."""

from __future__ import annotations

import pytest
import torch

from quadriga.algorithms.entropy import EntropyController
from quadriga.algorithms.shaping import length_reward, length_reward_names, pf_ppo_rows
from quadriga.config.names import LENGTH_REWARDS, PF_PPO_METHODS
from quadriga.errors import CheckpointError, ConfigError, DataError


def added(name, scores, lengths, groups, **options):
    tensors = {"scores": torch.tensor(scores), "lengths": torch.tensor(lengths), "group_ids": torch.tensor(groups)}
    return length_reward(name, **tensors, **options).tolist()


def test_the_configuration_knows_the_length_rewards():
    assert sorted(LENGTH_REWARDS) == length_reward_names()


def test_kimi_by_hand():
    # Lengths 2, 6, 10: λ = ½, 0, −½. A wrong short answer is not rewarded; a wrong long one is punished.
    assert added("kimi", [1.0, 1.0, 1.0], [2, 6, 10], [0] * 3) == pytest.approx([0.5, 0.0, -0.5])
    assert added("kimi", [0.0, 1.0, 0.0], [2, 6, 10], [0] * 3) == pytest.approx([0.0, 0.0, -0.5])
    assert added("kimi", [1.0, 1.0, 1.0], [2, 6, 10], [0] * 3, weight=2.0) == pytest.approx([1.0, 0.0, -1.0])


@pytest.mark.parametrize("name", LENGTH_REWARDS)
def test_equal_lengths_change_no_comparison_and_a_group_of_one_gets_nothing(name):
    got = added(name, [1.0, 0.0, 1.0, 1.0], [5, 5, 5, 9], [0, 0, 0, 1])
    assert got[0] == got[1] == got[2]
    assert got[3] == 0


def test_prime_rl_presses_in_proportion_to_what_is_solved():
    assert added("prime_rl", [1.0, 1.0], [5, 10], [0, 0]) == pytest.approx([-0.125, -0.25])
    assert added("prime_rl", [1.0, 0.0], [5, 10], [0, 0]) == pytest.approx([-0.0625, -0.125])
    assert added("prime_rl", [0.0, 0.0], [5, 10], [0, 0]) == [0, 0]  # all failed: left alone


def test_pf_ppo_draws_by_score_and_the_same_for_the_same_seed():
    scores = torch.tensor([0.0] * 50 + [1.0] * 50)
    drawn = pf_ppo_rows(scores, seed=3)
    assert len(drawn) == 100
    assert (drawn >= 50).all()  # 0² is no chance but 1e-8
    assert torch.equal(drawn, pf_ppo_rows(scores, seed=3))
    assert not torch.equal(drawn, pf_ppo_rows(scores, seed=4))


def test_pf_ppo_methods():
    scores = torch.tensor([-1.0, 0.2, 0.3, 2.0] * 200)
    kinds = {name: pf_ppo_rows(scores, reweight_method=name, seed=0) % 4 for name in PF_PPO_METHODS}
    share = {name: [(rows == k).double().mean().item() for k in range(4)] for name, rows in kinds.items()}
    assert share["max_min"] == pytest.approx([0.5, 0, 0, 0.5], abs=0.06)
    assert share["max_random"] == pytest.approx([1 / 7, 1 / 7, 1 / 7, 4 / 7], abs=0.06)
    total = 1 + 0.04 + 0.09 + 4
    assert share["pow"] == pytest.approx([1 / total, 0.04 / total, 0.09 / total, 4 / total], abs=0.06)
    with pytest.raises(ConfigError, match="reweight_method"):
        pf_ppo_rows(scores, reweight_method="rank")


def test_a_fixed_entropy_bonus_stays():
    fixed = EntropyController(0.01)
    fixed.update(0.0)
    assert fixed.value == 0.01
    fixed.load_state_dict(EntropyController(0.5).state_dict())
    assert fixed.value == 0.01  # the configuration is the truth


def test_an_adaptive_entropy_bonus_follows_the_entropy_of_the_step_before():
    bonus = EntropyController(0.0, adaptive=True, target=0.2, step_size=0.4, max_coeff=1.0)
    seen = []
    for entropy in (0.2, 0.1, 0.1, 0.3, 0.1, 0.5, 0.5, 0.5, 0.5):
        seen.append(bonus.value)
        bonus.update(entropy)
    assert seen == pytest.approx([0.0, 0.4, 0.8, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert bonus.coeff == 0.0  # never below
    with pytest.raises(DataError, match="entropy"):
        bonus.update(float("nan"))


def test_the_adaptive_entropy_bonus_is_kept_in_checkpoints():
    bonus = EntropyController(0.1, adaptive=True)
    bonus.update(0.0)
    again = EntropyController(0.0, adaptive=True)
    again.load_state_dict(bonus.state_dict())
    assert again.value == bonus.value == pytest.approx(0.105)
    with pytest.raises(CheckpointError, match="adaptive"):
        EntropyController(0.1).load_state_dict(bonus.state_dict())
    with pytest.raises(ConfigError, match="outside"):
        EntropyController(2.0, adaptive=True)
