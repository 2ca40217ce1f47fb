"""Actor and critic in pools of their own: as configuration, and as the example script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_policy import write_task

from quadriga.config import load_config
from quadriga.config.placement import placement_of
from quadriga.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]


def placement(**trainer):
    return placement_of(load_config({"trainer": trainer}))


@pytest.mark.parametrize(
    ("nodes", "slots", "actor", "critic"),
    [
        (1, 2, [1], [1]),
        (1, 8, [4], [4]),
        (1, 5, [3], [2]),
        (2, 4, [4], [4]),
        (4, 8, [8, 8], [8, 8]),
        (3, 2, [2, 2], [2]),
    ],
)
def test_split_divides_nodes_or_slots_and_gives_the_actor_the_larger_half(nodes, slots, actor, critic):
    from math import lcm

    batch = {"data": {"train_batch_size": lcm(sum(actor), sum(critic)) * 4}}
    config = load_config({"trainer": {"placement": "split", "nnodes": nodes, "n_gpus_per_node": slots}, **batch})
    placed = placement_of(config)
    assert placed.pools == {"actor_rollout_ref_pool": actor, "critic_pool": critic}
    assert placed.role_pool == {"actor_rollout": "actor_rollout_ref_pool", "critic": "critic_pool"}


def test_reference_lives_with_the_actor_and_reward_model_with_the_critic():
    config = load_config(
        {
            "trainer": {"placement": "split", "n_gpus_per_node": 2},
            "actor_rollout_ref": {"actor": {"use_kl_loss": True}},
            "reward_model": {"enable": True, "model": {"path": "a-reward-model"}},
        }
    )
    assert placement_of(config).role_pool == {
        "actor_rollout": "actor_rollout_ref_pool",
        "ref": "actor_rollout_ref_pool",
        "critic": "critic_pool",
        "rm": "critic_pool",
    }


def test_one_slot_cannot_be_split():
    with pytest.raises(ConfigError, match="there is one slot"):
        placement(placement="split")


def test_explicit_pools():
    chosen = {"pools": {"policy": [2], "value": [1]}, "roles": {"actor_rollout": "policy", "critic": "value"}}
    placed = placement(placement=chosen)
    assert (placed.slots("actor_rollout"), placed.slots("critic")) == (2, 1)


def test_a_rollout_may_have_a_pool_of_its_own():
    roles = {"actor_rollout": "policy", "critic": "policy", "rollout": "engines"}
    placed = placement(placement={"pools": {"policy": [1], "engines": [4]}, "roles": roles})
    assert (placed.generator, placed.slots(placed.generator)) == ("rollout", 4)
    with_the_actor = {"pools": {"policy": [1]}, "roles": {**roles, "rollout": "policy"}}
    assert placement(placement=with_the_actor).generator == "actor_rollout"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"pools": {"a": [1]}, "roles": {"actor_rollout": "a", "critic": "b"}}, "'b', which does not exist"),
        (
            {"pools": {"a": [1]}, "roles": {"actor_rollout": "a", "critic": "a", "rollout": "b"}},
            "rollout is to live in the pool 'b', which does not exist",
        ),
        (
            {"pools": {"a": [1], "b": [1]}, "roles": {"actor_rollout": "a", "critic": "a"}},
            "no role is placed in the pool 'b'",
        ),
        ({"pools": {"a": [1]}, "roles": {"actor_rollout": "a"}}, "does not say where critic lives"),
        ({"pools": {"a": [0]}, "roles": {"actor_rollout": "a", "critic": "a"}}, "not a list of slots per node"),
        ({"pools": {"a": [1]}}, "keys pools and roles"),
        ("somewhere", "is unknown"),
    ],
)
def test_impossible_placements_are_refused(chosen, message):
    with pytest.raises(ConfigError, match=message):
        placement(placement=chosen)


def test_the_example_runs_as_seed_003_says(tmp_path):
    """Two pools, real Ray, real updates; the timeline shows both updates under way at the same time."""
    task = write_task(tmp_path / "task")
    overrides = [
        f"data.train_files={task['data']['train_files']}",
        f"data.val_files={task['data']['val_files']}",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={task['actor_rollout_ref']['model']['path']}",
        "actor_rollout_ref.rollout.n=4",
        f"custom_reward_function.path={task['custom_reward_function']['path']}",
        "custom_reward_function.name=share_of_vowels",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "+ray_kwargs.ray_init.num_cpus=2",
    ]
    script = "examples/split_placement/main_ppo_split.py"
    run = subprocess.run(
        [sys.executable, script, "--config-path=config", "--config-name=ppo_trainer_split", *overrides],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "actor_rollout_ref_pool [1]: actor_rollout in 1 processes" in run.stdout
    assert "critic_pool [1]: critic in 1 processes" in run.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all("critic/vf_loss" in m and "actor/pg_loss" in m for m in metrics if m["step"] > 0)
    assert together(tmp_path / "run" / "timeline.json") == {1, 2}


def together(timeline: Path) -> set[int]:
    """The steps in which actor and critic were updated at the same time, by their own clocks."""
    events = json.loads(timeline.read_text())
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    updates = {
        (e["args"]["step"], e["name"]): (e["ts"], e["ts"] + e["dur"])
        for e in events
        if (e["name"], lanes[e["tid"]]) in {("update_actor", "actor_rollout 0"), ("update_critic", "critic 0")}
    }
    steps = {step for step, _ in updates}
    pairs = {step: (updates[step, "update_actor"], updates[step, "update_critic"]) for step in steps}
    return {step for step, (a, b) in pairs.items() if max(a[0], b[0]) < min(a[1], b[1])}


def test_reward_manager_of_the_example_scores_a_batch(shared_dir):
    code = (
        "import torch, numpy as np\n"
        "from examples.split_placement.main_ppo_split import RewardManager, main_task\n"
        "from transformers import AutoTokenizer\n"
        "from quadriga import DataProto\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(shared_dir / 'data/tokenizers/qwen2_5')!r})\n"
        "reward_mgr = RewardManager(tokenizer=tokenizer, num_examine=1)\n"
        "ids = tokenizer('so #### 72')['input_ids']\n"
        "data = DataProto.from_dict(tensors={'prompts': torch.tensor([[ids[0]]]), 'responses': torch.tensor([ids + [0, 0]]),\n"
        "    'attention_mask': torch.tensor([[1] + [1] * len(ids) + [0, 0]])},\n"
        "    non_tensors={'data_source': np.array(['openai/gsm8k'], dtype=object),\n"
        "                 'reward_model': np.array([{'ground_truth': '72'}], dtype=object)})\n"
        "reward_tensor = reward_mgr(data)\n"
        "assert reward_tensor.shape == data.batch['responses'].shape\n"
        "assert reward_tensor[0, len(ids) - 1] == 1 and reward_tensor.sum() == 1\n"
        "assert set(reward_mgr(data, return_dict=True)) >= {'reward_tensor'}\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
