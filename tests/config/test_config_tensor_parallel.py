"""Sets of slots that generate together: what cannot be is refused before the start, with a size that can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quadriga.commands.plan import show_plan
from quadriga.config import Config
from quadriga.config.parallel import unplanned
from quadriga.config.plan import make_plan
from quadriga.errors import ConfigError

Load = Callable[[dict[str, Any]], Config]
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def write(**changes: Any) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE, **changes}))
        return {
            "actor_rollout_ref.model.path": str(tmp_path),
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.n": 8,
            "data.train_batch_size": 48,
        }

    return write


@pytest.mark.parametrize(("size", "slots"), [(1, 3), (2, 2), (2, 8), (4, 4), (8, 8)])
def test_sizes_that_divide_slots_and_heads_are_taken(load: Load, model: Any, size: int, slots: int) -> None:
    config = load({**model(), SIZE: size, "trainer.n_gpus_per_node": slots})
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == size


@pytest.mark.parametrize(
    ("size", "slots", "shape", "what", "fix"),
    [
        (4, 6, {}, r"does not divide the slots of each node of global_pool, \[6\]", f"{SIZE}=2"),
        (16, 8, {}, r"does not divide the slots of each node of global_pool, \[8\]", f"{SIZE}=8"),
        (3, 6, {}, "does not share out 8 attention heads and 4 key and value heads", f"{SIZE}=2"),
        (4, 4, {"num_attention_heads": 12, "num_key_value_heads": 3}, "12 attention heads and 3 key", f"{SIZE}=1"),
        (2, 2, {"model_type": "gpt2"}, "no tensor parallel plan", f"{SIZE}=1"),
        (2, 2, {"model_type": "phi3"}, "rowwise_split_input", f"{SIZE}=1"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_a_size_that_can(
    load: Load, model: Any, size: int, slots: int, shape: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=what) as raised:
        load({**model(**shape), SIZE: size, "trainer.n_gpus_per_node": slots})
    assert fix in str(raised.value)


def test_a_set_never_spans_nodes(load: Load, model: Any) -> None:
    with pytest.raises(ConfigError, match="a set never spans two nodes"):
        load({**model(), SIZE: 4, "trainer.n_gpus_per_node": 2, "trainer.nnodes": 2})


def test_the_pool_that_generates_decides(load: Load, model: Any) -> None:
    roles = {"actor_rollout": "training", "rollout": "generation"}
    placement = {"pools": {"training": [3], "generation": [4, 2]}, "roles": roles}
    load({**model(), SIZE: 2, "trainer.placement": placement})
    with pytest.raises(ConfigError, match=r"the slots of each node of generation, \[4, 2\]"):
        load({**model(), SIZE: 4, "trainer.placement": placement})


def test_a_set_beside_training_cannot_run_ahead_in_order(load: Load, model: Any) -> None:
    ahead = {**model(), SIZE: 2, "trainer.n_gpus_per_node": 2, "async_training.staleness": 1}
    with pytest.raises(ConfigError, match="cannot take weights while it trains"):
        load(ahead)


def test_the_plan_shows_who_generates_together_and_what_that_saves(load: Load, model: Any) -> None:
    settings = {**model(), "trainer.n_gpus_per_node": 4, "trainer.nnodes": 2, "trainer.device": "cuda"}
    whole, shared = make_plan(load(settings)), make_plan(load({**settings, SIZE: 2}))
    assert shared.pools["global_pool"].sets == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]

    def rollout(plan: Any, what: str) -> int:
        return next(i.size for i in plan.memory[0].items if (i.role, i.what) == ("rollout", what))

    assert rollout(shared, "weights") == rollout(whole, "weights") // 2
    console = Console(record=True, width=140)
    show_plan(shared, console)
    assert "4-5, 6-7" in console.export_text()


def test_families_with_and_without_a_plan() -> None:
    for known in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"):
        assert unplanned(known) == "", known
    assert unplanned("gpt2")
    assert unplanned("of a user's own") == ""
