"""Profiles of the calls of roles, ranks and steps that were asked for, and of no others."""

from __future__ import annotations

import gzip
import json

import pytest
from omegaconf import OmegaConf
from tiny_policy import write_task

from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.trainer.main_ppo import run_ppo


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def test_chosen_roles_leave_a_trace_of_every_call_in_chosen_steps(task, tmp_path):
    contents = {"tool_config": {"torch": {"contents": ["cpu", "shapes"]}}}
    config = {
        "global_profiler": {"tool": "torch", "steps": [2]},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"actor": {"use_kl_loss": True, "profiler": {"enable": True, **contents}}},
        "trainer": {"default_local_dir": str(tmp_path / "run"), "total_training_steps": 3},
    }
    run_ppo(OmegaConf.to_container(OmegaConf.merge(task, config)))
    profile = tmp_path / "run" / "profile"
    assert [folder.name for folder in profile.iterdir()] == ["step_2"]
    names = {file.name for file in (profile / "step_2").iterdir()}
    assert "actor_rollout_0_update_actor.json.gz" in names
    assert not any(name.startswith("ref_") for name in names), "the reference's profiler is off"
    with gzip.open(profile / "step_2" / "actor_rollout_0_update_actor.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") for event in events)
    assert any("Input Dims" in event.get("args", {}) for event in events), "shapes were asked for"


def test_a_rank_that_was_not_named_leaves_nothing(task, tmp_path):
    config = {
        "global_profiler": {"tool": "torch", "steps": [1], "save_path": str(tmp_path / "elsewhere")},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"actor": {"profiler": {"enable": True, "ranks": [5]}}},
        "trainer": {"default_local_dir": str(tmp_path / "run"), "total_training_steps": 1},
    }
    run_ppo(OmegaConf.to_container(OmegaConf.merge(task, config)))
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tool": "torch", "steps": [1]}, "no role of this run is to be profiled"),
        ({"tool": "torch"}, "names no step"),
        ({"tool": "torch_memory"}, "must be one of"),
    ],
)
def test_a_profile_that_nobody_would_write_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"global_profiler": given})


def test_nsys_ranges_need_a_gpu(task, tmp_path):
    config = {
        "global_profiler": {"tool": "nsys", "steps": [1]},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"actor": {"profiler": {"enable": True}}},
        "trainer": {"default_local_dir": str(tmp_path / "run"), "total_training_steps": 1},
    }
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        run_ppo(OmegaConf.to_container(OmegaConf.merge(task, config)))
