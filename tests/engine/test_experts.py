"""Mixtures of experts: they train, their experts are computed grouped, and routers can be evened."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from engine_cases import VOCABULARY, mini_batch, ppo_loss, tiny_policy

from quadriga.config.schema_models import OptimConfig
from quadriga.engine import TrainingEngine
from quadriga.errors import ConfigError
from quadriga.models.attention import register_packed_attention
from quadriga.models.token_model import PolicyModel

SHAPE = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=8, moe_intermediate_size=16),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=8),
}


def policy(family: str) -> PolicyModel:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention())
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if "gate.weight" in name else 0.1)
    return PolicyModel(model)


def train(engine: TrainingEngine, steps: int, budget: int = 1000) -> list[dict[str, float]]:
    return [engine.train_mini_batch(mini_batch(), ppo_loss(), budget, with_entropy=True) for _ in range(steps)]


class Calls(torch.overrides.TorchFunctionMode):
    """Counts the calls of torch's functions, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count[getattr(function, "__name__", "")] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_computed_grouped_not_one_by_one(family):
    engine = TrainingEngine(policy(family))
    with Calls() as calls:
        engine.log_probs(mini_batch(), 1.0, 1000)
    grouped = sum(count for name, count in calls.count.items() if "grouped_mm" in name)
    assert grouped == 2 * SHAPE["num_hidden_layers"], "into the experts' width and back, once a layer"


def test_a_loss_of_routers_that_a_model_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        TrainingEngine(tiny_policy(), optim=OptimConfig(), router_aux_loss_coef=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_of_experts_trains_and_tells_of_its_routers(family):
    model = policy(family)
    told = train(TrainingEngine(model, optim=OptimConfig(lr=1e-2, name="adamw")), 8)
    assert told[-1]["loss"] < told[0]["loss"]
    first = told[0]
    assert 2 <= first["router_aux_loss"] < 8
    assert 0 < first["router_entropy"] < torch.tensor(8.0).log()
    assert 1 < first["router_load_max"] <= 4
    assert 0 <= first["router_idle"] < 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_auxiliary_loss_evens_the_load(checkpointing):
    plain, evened = (
        TrainingEngine(
            policy("qwen3_moe"),
            optim=OptimConfig(lr=1e-2),
            router_aux_loss_coef=weight,
            gradient_checkpointing=checkpointing,
        )
        for weight in (0.0, 1.0)
    )
    without, with_it = train(plain, 12), train(evened, 12)
    assert without[0]["router_aux_loss"] == with_it[0]["router_aux_loss"]
    assert with_it[-1]["router_aux_loss"] < without[-1]["router_aux_loss"] - 0.02


def test_what_routers_tell_is_a_mean_over_micro_batches():
    whole = train(TrainingEngine(policy("mixtral"), optim=OptimConfig(lr=1e-3)), 1)[0]
    cut = train(TrainingEngine(policy("mixtral"), optim=OptimConfig(lr=1e-3)), 1, budget=40)[0]
    assert cut["micro_batches"] > 1
    assert cut["router_entropy"] == pytest.approx(whole["router_entropy"], rel=0.15)
    assert cut["loss"] == pytest.approx(whole["loss"], abs=1e-6)
