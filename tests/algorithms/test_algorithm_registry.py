from __future__ import annotations

import sys

import pytest
import torch

from quadriga.algorithms import (
    Aggregation,
    Registry,
    compute_advantage,
    compute_policy_loss,
    get_adv_estimator,
    kl_estimate,
    register_adv_est,
    register_kl_estimator,
    register_policy_loss,
)
from quadriga.algorithms import advantages as advantage_module
from quadriga.algorithms import kl as kl_module
from quadriga.algorithms import policy_losses as loss_module
from quadriga.errors import ConfigError, DataError

REWARDS, MASK = torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])

MY_MODULE = """
def half_score(token_level_rewards, response_mask, gamma=1.0):
    advantages = token_level_rewards.sum(-1, keepdim=True) / 2 * response_mask * gamma
    return advantages, advantages

def mean_log_prob(*, log_prob, response_mask, loss_agg):
    return loss_agg(-log_prob, response_mask), {}

class Estimators:
    half = staticmethod(half_score)

def one(token_level_rewards, response_mask):
    return token_level_rewards

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def registries_as_they_were(monkeypatch):
    for registry in (advantage_module._ESTIMATORS, loss_module._LOSSES, kl_module._ESTIMATORS):
        monkeypatch.setattr(registry, "_functions", dict(registry._functions))


@pytest.fixture
def my_file(tmp_path):
    path = tmp_path / "my_rl_module.py"
    path.write_text(MY_MODULE)
    return path


@pytest.fixture
def my_module(my_file, monkeypatch):
    monkeypatch.syspath_prepend(str(my_file.parent))
    yield "my_rl_module"
    sys.modules.pop("my_rl_module", None)


def advantages(name, **kw):
    return compute_advantage(name, token_level_rewards=REWARDS, response_mask=MASK, **kw)[0].tolist()


def test_a_decorated_estimator_is_used_by_name_with_only_what_it_takes():
    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask):
        return token_level_rewards * 2, response_mask.float()

    assert advantages("mine", gamma=0.5, values=torch.zeros(2, 2)) == [[0, 6], [2, 0]]
    assert get_adv_estimator("mine") is mine


def test_an_estimator_with_open_keywords_gets_everything():
    seen = {}

    @register_adv_est("curious")
    def curious(token_level_rewards, **others):
        seen.update(others)
        return token_level_rewards, token_level_rewards

    advantages("curious", gamma=0.5, my_own_key="x", values=None)
    assert set(seen) == {"response_mask", "gamma", "my_own_key"}


def test_an_estimator_by_module_and_function(my_module):
    assert advantages(f"{my_module}:half_score") == [[1.5, 1.5], [0.5, 0]]
    assert advantages(f"{my_module}:half_score", gamma=2.0) == [[3, 3], [1, 0]]
    assert advantages(f"{my_module}:Estimators.half") == [[1.5, 1.5], [0.5, 0]]


def test_an_estimator_by_file_and_function_whose_file_runs_once(my_file):
    assert advantages(f"{my_file}:half_score") == [[1.5, 1.5], [0.5, 0]]
    assert advantages(f"{my_file}:half_score") == [[1.5, 1.5], [0.5, 0]]
    assert get_adv_estimator(f"{my_file}:half_score") is get_adv_estimator(f"{my_file}:half_score")


def test_a_policy_loss_of_ones_own(my_module):
    @register_policy_loss("mine")
    def mine(*, log_prob, response_mask, loss_agg, clip_ratio=0.2):
        return loss_agg(log_prob * clip_ratio, response_mask), {"mine": loss_agg.token_mean(log_prob, response_mask)}

    inputs = {
        "log_prob": -REWARDS,
        "old_log_prob": REWARDS,
        "advantages": REWARDS,
        "response_mask": MASK,
        "loss_agg": Aggregation.of_batch("token-sum", MASK),
    }
    loss, metrics = compute_policy_loss("mine", **inputs, clip_ratio=0.5)
    assert loss.item() == -2
    assert metrics["mine"].item() == pytest.approx(-4 / 3)
    assert compute_policy_loss(f"{my_module}:mean_log_prob", **inputs)[0].item() == 4


def test_a_kl_estimator_of_ones_own():
    @register_kl_estimator("cube")
    def cube(difference):
        return difference**3

    logp = torch.tensor([2.0], requires_grad=True)
    value = kl_estimate(logp, torch.zeros(1), "cube+")
    value.backward()
    assert value.item() == 8
    assert logp.grad.item() == 2


def test_an_estimator_that_returns_something_else_is_told_what_to_return(my_module):
    with pytest.raises(DataError, match=r"two tensors of shape \(2, 2\)"):
        advantages(f"{my_module}:one")


def test_a_loss_that_returns_something_else_is_told_what_to_return():
    register_policy_loss("bare")(lambda log_prob: log_prob.sum())
    with pytest.raises(DataError, match=r"return \(loss, metrics\)"):
        compute_policy_loss("bare", log_prob=REWARDS, response_mask=MASK)


def test_an_input_that_nobody_has_is_named():
    @register_adv_est("greedy")
    def greedy(token_level_rewards, crystal_ball):
        return token_level_rewards, token_level_rewards

    with pytest.raises(ConfigError, match="'greedy' needs 'crystal_ball'"):
        advantages("greedy")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module_at_all:fn", "no_such_module_at_all"),
        ("no_such_package.module:fn", r"no_such_package\.module"),
        ("/no/such/file.py:fn", "does not exist"),
        ("{module}:no_such_function", "has no 'no_such_function'"),
        ("{module}:not_a_function", "is no function"),
        ("{file}:no_such_function", "has no 'no_such_function'"),
    ],
)
def test_a_wrong_place_is_named(spec, message, my_module, my_file):
    with pytest.raises(ConfigError, match=message):
        get_adv_estimator(spec.format(module=my_module, file=my_file))


def test_an_import_error_inside_the_users_module_is_shown_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "broken_rl_module.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for spec in ("broken_rl_module:fn", f"{tmp_path}/broken_rl_module.py:fn"):
        with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
            get_adv_estimator(spec)


def test_a_taken_name_is_refused_and_a_reload_is_not():
    registry: Registry = Registry("thing", "a.key")

    def define():
        @registry.register("one", "uno")
        def fn():
            return 1

        return fn

    define()
    again = define()  # the same definition, as after a reload
    assert registry.get("uno") is again
    with pytest.raises(ConfigError, match="'one' is already registered"):
        registry.register("one")(lambda: 2)


def test_an_enum_as_a_name_is_its_value_and_leaves_every_other_look_up_whole():
    from enum import Enum

    class Own(Enum):
        LOSS = "own_enum_loss"

    registry = Registry("loss", "some.key")
    registry.register("plain")(len)
    registry.register(Own.LOSS)(sorted)
    assert registry.get("own_enum_loss") is registry.get(Own.LOSS) is sorted
    with pytest.raises(ConfigError, match="Known: own_enum_loss, plain"):
        registry.get("nothing_like_it")
