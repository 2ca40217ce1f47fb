"""`trainer.deterministic=exact`: settings under which it does not hold are refused together, each with a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dotted import nest

from quadriga.config import load_config
from quadriga.errors import ConfigError

POLICY = "actor_rollout_ref"
EXACT = {"trainer.deterministic": "exact", "trainer.device": "cuda", "trainer.n_gpus_per_node": 1}


def refusal(keys: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(nest(EXACT | keys))
    return str(error.value)


def test_one_gpu_and_a_known_family_are_accepted() -> None:
    assert load_config(nest(EXACT)).trainer.deterministic == "exact"


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"trainer.device": "cpu"}, "trainer.device=cpu", "remove trainer.deterministic"),
        ({"trainer.n_gpus_per_node": 2}, "2 slots add gradients up", "trainer.n_gpus_per_node=1"),
        ({f"{POLICY}.model.lora_rank": 8}, "merges the adapter", f"{POLICY}.model.lora_rank=0"),
        ({f"{POLICY}.rollout.top_p": 0.9}, "another distribution", f"{POLICY}.rollout.top_p=1.0"),
        ({f"{POLICY}.model.override_config": {"attention_dropout": 0.1}}, "at random", "override_config"),
    ],
)
def test_what_is_not_exact_is_refused(keys: dict[str, Any], what: str, fix: str) -> None:
    message = refusal(keys)
    assert what in message
    assert fix in message


def test_another_family_is_refused_and_the_exact_ones_are_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    message = refusal({f"{POLICY}.model.path": str(tmp_path)})
    assert "gemma2" in message
    assert "llama, mistral, qwen2, qwen3" in message


def test_all_reasons_are_told_at_once() -> None:
    message = refusal({f"{POLICY}.model.lora_rank": 8, f"{POLICY}.rollout.top_k": 20, "trainer.device": "cpu"})
    assert message.count("does not hold") == 3
