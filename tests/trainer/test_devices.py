"""What the configuration says about devices and host memory is what the workers do."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import write_task

from quadriga.engine import TrainingEngine
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.trainer.main_ppo import run_ppo
from quadriga.workers import ActorRolloutRefWorker


@pytest.fixture
def config(tmp_path):
    settings = write_task(tmp_path)
    settings["algorithm"] = {"adv_estimator": "grpo"}
    settings["trainer"] |= {"total_training_steps": 1, "test_freq": -1}
    return settings


def test_the_reference_keeps_its_weights_where_it_is_told_to(config, monkeypatch):
    made = {}
    start = TrainingEngine.__init__

    def note(self, model, **settings):
        start(self, model, **settings)
        made["ref" if self.optimizer is None else "actor"] = self.fsdp.param_offload

    monkeypatch.setattr(TrainingEngine, "__init__", note)
    config["actor_rollout_ref"]["actor"]["use_kl_loss"] = True
    config["actor_rollout_ref"]["ref"] = {"fsdp_config": {"param_offload": True}}
    del config["trainer"]["device"]
    run_ppo(config)
    assert made == {"actor": False, "ref": True}


@pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="this machine has a device")
def test_offloading_that_a_cpu_has_no_use_for_costs_it_no_second_model(config, monkeypatch):
    """The same file serves a GPU, where these keys mean something."""
    shared = []
    start = ActorRolloutRefWorker.start_service

    def note(self, module, tokenizer):
        shared.append(module is self.engine.model.huggingface)
        start(self, module, tokenizer)

    monkeypatch.setattr(ActorRolloutRefWorker, "start_service", note)
    config["actor_rollout_ref"]["actor"]["fsdp_config"] = {"param_offload": True, "optimizer_offload": True}
    with pytest.raises(ConfigError, match=r"param_offload=True have no effect: trainer.device=cpu"):
        run_ppo(config)
    del config["trainer"]["device"]
    run_ppo(config)
    assert shared == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_a_local_run_on_a_device_that_is_not_there_is_refused(config, device):
    config["trainer"]["device"] = device
    with pytest.raises(QuadrigaError, match=f"cannot use {device}") as caught:
        run_ppo(config)
    if torch.accelerator.current_accelerator() is None:
        assert f"it was built without support for {device}" in caught.value.what
