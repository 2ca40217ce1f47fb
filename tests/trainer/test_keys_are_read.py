"""A key that a section has from a class it shares with others is read there too, not just elsewhere."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest
from test_reward_model import write_reward_model
from tiny_policy import write_task

import quadriga.config
from quadriga.config import schema_models, schema_roles, schema_rollout
from quadriga.trainer.main_ppo import run_ppo

SECTIONS = (
    schema_models.ModelConfig,
    schema_models.CriticModelConfig,
    schema_models.RewardModelPathConfig,
    schema_models.OptimConfig,
    schema_models.FSDPConfig,
    schema_models.RefFSDPConfig,
    schema_roles.ActorConfig,
    schema_roles.RefConfig,
    schema_roles.CriticConfig,
    schema_roles.RewardModelConfig,
    schema_rollout.ValKwargsConfig,
    schema_rollout.RolloutConfig,
)
DECIDES = ("needs.py", "placement.py")
"""Rooms of `config` that do what a key says; the others look at it, write it down or refuse it."""
NOT_IN_THIS_RUN = {
    "ModelConfig": {"lora_alpha", "target_modules", "exclude_modules"},
    "FSDPConfig": {"fsdp_size"},  # of several workers
    "RewardModelConfig": {"n_gpus_per_node", "nnodes"},  # of a pool of its own
    "RolloutConfig": {
        "gpu_memory_utilization",
        "enforce_eager",
        "free_cache_engine",
        "enable_chunked_prefill",
        "engine_kwargs",
        "multi_turn",
        "log_prob_max_token_len_per_gpu",  # of a pass that a strictly on-policy run leaves out
    },
}
"""What another run would read: with LoRA, on a GPU, with vLLM, with agents."""


@pytest.fixture
def reads(monkeypatch) -> dict[str, set[str]]:
    """Section → the keys that anybody but the loader, the checks and the printers has read."""
    found: dict[str, set[str]] = defaultdict(set)
    config_room = str(Path(quadriga.config.__file__).parent)

    def recording(plain):
        def read(self, name):
            caller = sys._getframe(1).f_code.co_filename
            about = caller.endswith("dataclasses.py") or (
                caller.startswith(config_room) and not caller.endswith(DECIDES)
            )
            if not about:
                found[type(self).__name__].add(name)
            return plain(self, name)

        return read

    for section in SECTIONS:
        monkeypatch.setattr(section, "__getattribute__", recording(section.__getattribute__))
    return found


def test_every_key_of_a_shared_section_is_read_in_it(tmp_path, reads):
    config = write_task(tmp_path)
    write_reward_model(tmp_path / "rm", tmp_path / "model")
    config["reward_model"] = {"enable": True, "model": {"path": str(tmp_path / "rm")}}
    config["actor_rollout_ref"]["actor"]["use_kl_loss"] = True
    config["algorithm"] = {"adv_estimator": "gae"}
    config["trainer"] |= {"total_training_steps": 1, "test_freq": 1}
    run_ppo(config)
    unread = {
        section.__name__: left
        for section in SECTIONS
        if (left := {f.name for f in fields(section)} - reads[section.__name__])
    }
    assert unread == NOT_IN_THIS_RUN
