"""Everything with state is in a checkpoint: a trainer that was resumed is, object by object, the one that was saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tiny_policy import write_task

from quadriga.errors import QuadrigaError
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer

NO_STATE = (
    r"config(\.|$)",  # the same in both, by construction of the test
    r"tracking\.",  # the run directory's own memory: its files are cut to the step on resume
    r"metrics(\.|\[|$)",  # of the step that is over
    r"scores(\.|$)",  # samples of the generation that is over
    r"generations$",  # numbers the generations of one process
    r"stream\.(_names$|_first_version$|_seconds_before|router\._seats)",  # requests, weights and times of one process
    r"saver\.",  # the checkpoint that is being written
    r".*\.export\.",  # how a checkpoint is written; it has no weights of its own
    r".*\._copied",
    r".*\._writing",
    r".*\._calls",  # for the timeline
    r".*\.service\.",  # a cache and statistics; it takes the weights over before the first step
    r"(val_)?reward_fn\._pool\.",  # scoring processes and their statistics
    r".*_finished",
    r".*\._generation$",
    r"steering\._since$",  # when the process began: older orders were for another one
)
"""Where two trainers at the same step may differ."""


def leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Every number, text and tensor that hangs on `value`, through our own objects, torch modules and optimisers."""
    if value is None or isinstance(value, (bool, int, float, str)):
        yield path, value
    elif isinstance(value, torch.Tensor) and value.is_meta:
        return
    elif isinstance(value, torch.Tensor):
        yield path, value.detach().cpu().numpy().tobytes() if value.dtype != torch.bfloat16 else value.float().numpy()
    elif isinstance(value, np.ndarray):
        yield path, value.tolist()
    elif id(value) in seen:
        return
    else:
        seen.add(id(value))
        if isinstance(value, Mapping):
            inner = ((f"{path}[{number}]", item) for number, item in enumerate(value.values()))
        elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
            inner = ((f"{path}[{number}]", item) for number, item in enumerate(value))
        elif isinstance(value, torch.nn.Module):
            inner = iter(value.state_dict().items())
        elif isinstance(value, torch.optim.Optimizer):
            inner = iter({"state": value.state, "param_groups": value.param_groups}.items())
            inner = ((f"{path}.{name}", item) for name, item in inner)
        elif type(value).__module__.startswith("quadriga"):
            names = {*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())}
            inner = ((f"{path}.{name}" if path else name, getattr(value, name, None)) for name in sorted(names))
        else:
            return
        for name, item in inner:
            yield from leaves(item, name, seen)


def snapshot(trainer: RayPPOTrainer) -> dict[str, Any]:
    found = {name: value for name, value in leaves(trainer, "", set()) if not any(re.match(p, name) for p in NO_STATE)}
    return found | {"torch's random numbers": torch.get_rng_state().numpy().tobytes()}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_resumed_trainer_is_the_saved_one(tmp_path, monkeypatch, lora_rank):
    seen: list[dict[str, Any]] = []
    shut_down = RayPPOTrainer.shutdown

    def look_first(self: RayPPOTrainer) -> None:
        seen.append(snapshot(self))
        shut_down(self)

    def stop_at_step_four(method):
        def then_stop(self: RayPPOTrainer, *args: Any) -> None:
            method(self, *args)
            self.stop_requested = self.step == 4

        return then_stop

    monkeypatch.setattr(RayPPOTrainer, "shutdown", look_first)
    for name in ("update", "resume"):  # the second run does nothing but to take up the state of the first
        monkeypatch.setattr(RayPPOTrainer, name, stop_at_step_four(getattr(RayPPOTrainer, name)))
    changes = {
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.01, "horizon": 64},
        },
        "actor_rollout_ref": {"model": {"lora_rank": lora_rank}, "actor": {"optim": {"lr_warmup_steps": 4}}},
        "trainer": {"total_training_steps": 5, "default_local_dir": str(tmp_path / "run")},
    }
    config = OmegaConf.to_container(OmegaConf.merge(write_task(tmp_path / "task"), changes))
    for seed in (0, 99):  # a new process has another state
        torch.manual_seed(seed)
        with pytest.raises(QuadrigaError, match="stopped after step 4 of 5"):
            run_ppo(config)
    saved, resumed = seen
    assert len(saved) > 60, "the walk sees the trainer"
    for part in ("kl_controller", "loader.sampler.cursor", "optimizer.state", "schedule", "step"):
        assert any(part in name for name in saved), f"the walk does not see {part}"
    different = [name for name in saved.keys() | resumed.keys() if saved.get(name) != resumed.get(name)]
    assert not different, f"not in the checkpoint: {sorted(different)[:20]}"
