"""Sequence parallelism and hybrid sharding that cannot be are refused before anything starts, with the nearest valid number."""

from __future__ import annotations

import json

import pytest

from quadriga.config import load_config
from quadriga.errors import ConfigError

A = "actor_rollout_ref"
SIZE = "ulysses_sequence_parallel_size"


@pytest.fixture
def model(tmp_path):
    """A model of which only the shape is known: 28 heads, 4 of keys and values."""
    shape = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 152064, "intermediate_size": 18944}))
    return str(tmp_path)


def config(model, workers=8, n=8, actor=None, critic=None, ref=None, **data):
    changes = {
        "data": {"train_files": "t.parquet", "val_files": "v.parquet", "train_batch_size": 8, **data},
        "trainer": {"n_gpus_per_node": workers, "device": "cpu"},
        A: {"model": {"path": model}, "rollout": {"n": n}, "actor": actor or {}, "ref": ref or {}},
        "algorithm": {"adv_estimator": "grpo"},
    }
    if critic is not None:
        changes |= {"critic": critic, "algorithm": {"adv_estimator": "gae"}}
    return load_config(changes)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_divides_workers_and_heads_is_taken(model, size):
    assert config(model, actor={SIZE: size}).actor_rollout_ref.ref.ulysses_sequence_parallel_size == size


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"actor": {SIZE: 3}}, f"{A}.actor.{SIZE}=3 does not divide the 8 workers", "set it to 2 or 4"),
        ({"actor": {SIZE: 8}}, "does not share out 28 attention heads with 4 heads of keys", "set it to 4 or 28"),
        ({"critic": {SIZE: 8}}, f"critic.{SIZE}=8 does not share out", "set it to 4 or 28"),
        ({"actor": {"fsdp_config": {"fsdp_size": 3}}}, "fsdp_size=3 does not divide the 8 workers", "2 or 4, or -1"),
        ({"actor": {"fsdp_config": {"fsdp_size": 0}}}, "fsdp_size=0 does not divide", "1, or -1"),
        (
            {
                "actor": {SIZE: 2, "ppo_max_token_len_per_gpu": 700},
                "max_prompt_length": 512,
                "max_response_length": 1024,
            },
            "tokens cannot hold one sequence .* = 1536 tokens, which 2 workers share",
            "ppo_max_token_len_per_gpu=768 or more",
        ),
        (
            {"actor": {SIZE: 2, "ppo_micro_batch_size_per_gpu": 20}},
            "more than the 16 rows that each of 4 sets of 2 workers gets",
            "=16 or less",
        ),
    ],
)
def test_what_does_not_divide_is_refused(model, changes, what, fix):
    with pytest.raises(ConfigError, match=f"(?s){what}.*{fix}"):
        config(model, **changes)


def test_a_budget_is_that_of_one_worker(model):
    lengths = {"max_prompt_length": 512, "max_response_length": 1024}
    config(model, actor={SIZE: 4, "ppo_max_token_len_per_gpu": 384}, **lengths)
