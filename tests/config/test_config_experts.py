"""What is asked of the routers of a mixture of experts is refused where the model is known to have none."""

from __future__ import annotations

import json

import pytest

from quadriga.config import load_config
from quadriga.errors import ConfigError

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
MIXTURES = [{"num_experts": 8}, {"num_local_experts": 8}, {"n_routed_experts": 8}]


def config(folder, shape, **actor):
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    return load_config({"actor_rollout_ref": {"model": {"path": str(folder)}, "actor": actor}})


@pytest.mark.parametrize("shape", [{}, {"num_experts": 0}, {"num_local_experts": 1}])
def test_a_loss_of_routers_needs_a_mixture_of_experts(tmp_path, shape):
    config(tmp_path, shape)
    with pytest.raises(ConfigError, match="has no router") as raised:
        config(tmp_path, shape, router_aux_loss_coef=0.01)
    assert "leave actor_rollout_ref.actor.router_aux_loss_coef at 0" in str(raised.value)


@pytest.mark.parametrize("shape", MIXTURES)
def test_it_is_taken_for_one_and_for_a_model_that_is_not_here(tmp_path, shape):
    assert config(tmp_path, shape, router_aux_loss_coef=0.01).actor_rollout_ref.actor.router_aux_loss_coef == 0.01
    elsewhere = {"model": {"path": "org/name"}, "actor": {"router_aux_loss_coef": 0.01}}
    load_config({"actor_rollout_ref": elsewhere})
