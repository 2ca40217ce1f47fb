"""What a plan says of memory: of models by their config.json alone, of engines, of hosts, and of keys that would make a run fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM

from quadriga.commands.plan import show_plan
from quadriga.config import Config
from quadriga.config.host_memory import host_items, require_host_memory
from quadriga.config.memory import GENERATE, PHASES, UPDATE_ACTOR, USABLE, MemoryItem
from quadriga.config.model_shape import read_model_shape
from quadriga.config.plan import Plan, make_plan
from quadriga.errors import ResourceError
from quadriga.models.outline import outline_of
from quadriga.trainer import before_start

Load = Callable[[dict[str, Any]], Config]
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
H100 = 80 << 30
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2} | {
    "intermediate_size": 320,
    "vocab_size": 1000,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, Callable[[], Any]] = {
    "dense": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "experts": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=16, head_dim=32),
    "every other layer": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=16, decoder_sparse_step=2),
    "shared experts": lambda: transformers.Qwen2MoeConfig(
        **SMALL, **EXPERTS, num_experts=16, shared_expert_intermediate_size=96
    ),
    "dense layers first": lambda: transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4}, **EXPERTS, **LATENT, n_routed_experts=16, first_k_dense_replace=1
    ),
}
M32 = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8} | {
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "model_type": "qwen2",
}
M70 = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8} | {
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "model_type": "llama",
}
M7 = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4} | {
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "model_type": "qwen2",
}


def write(folder: Path, described: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)


@pytest.fixture
def plan_of(load: Load, tmp_path: Path) -> Callable[..., Plan]:
    def plan(described: dict[str, Any], gpu: str | None = "h100-80g", **keys: Any) -> Plan:
        common = {f"{MODEL}.path": write(tmp_path / "m", described), "algorithm.adv_estimator": "grpo"}
        common |= {"data.train_batch_size": 128, f"{ROLLOUT}.n": 8, "trainer.device": "cuda"}
        return make_plan(load({**common, **{key.replace("__", "."): value for key, value in keys.items()}}), gpu)

    return plan


def item(plan: Plan, role: str, what: str) -> MemoryItem:
    return next(i for memory in plan.memory for i in memory.items if (i.role, i.what) == (role, what))


# ---- models by their files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_from_config_json_alone(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    config.save_pretrained(tmp_path)
    shape, module = read_model_shape(tmp_path), outline_of(AutoModelForCausalLM, config)
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in module.model.layers)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in module.parameters()), rel=0.01)
    assert shape.layer_parameters == pytest.approx(largest, rel=0.01)
    assert shape.rest == pytest.approx(
        sum(p.numel() for n, p in module.named_parameters() if "layers" not in n), rel=0.01
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_with_weight_files_they_are_counted_exactly(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    shape = read_model_shape(tmp_path)
    assert shape.parameters == sum(tensor.numel() for tensor in model.state_dict(keep_vars=True).values()) - (
        model.lm_head.weight.numel() if model.config.tie_word_embeddings else 0
    )
    layers = [sum(tensor.numel() for tensor in layer.state_dict().values()) for layer in model.model.layers]
    assert shape.layer_parameters == max(layers)


def test_a_token_goes_through_a_few_experts_only(plan_of: Callable[..., Plan]) -> None:
    mixture = FAMILIES["shared experts"]().to_dict()
    dense = mixture | {"num_experts": 0, "intermediate_size": 2 * 48 + 96, "model_type": "qwen2"}
    kept, of_dense = (item(plan_of(shape), "actor", "activations").size for shape in (mixture, dense))
    assert of_dense < kept < 2 * of_dense
    gathered = item(plan_of(mixture), "actor", "gathered weights").size
    assert gathered < 2 * read_size(mixture), "two layers of experts and the rest, not all layers"


def read_size(described: dict[str, Any]) -> int:
    module = outline_of(AutoModelForCausalLM, transformers.AutoConfig.for_model(**described))
    return sum(p.numel() for p in module.parameters())


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_an_engine_keeps_its_weights_on_the_device_while_it_rests(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(M7)
    assert item(plan, "rollout", "weights").phases == PHASES
    assert item(plan, "rollout", "KV cache").phases == (GENERATE,)
    assert item(plan, "rollout", "weights").size == pytest.approx(15.2e9, rel=0.01)


def test_a_cache_is_what_the_engine_takes_and_at_least_one_sequence(plan_of: Callable[..., Plan]) -> None:
    long = {"data__max_response_length": 8192}
    eight = plan_of(
        M70, **long, trainer__nnodes=4, trainer__n_gpus_per_node=8, **{f"{ROLLOUT}.tensor_model_parallel_size": 8}
    )
    cache = item(eight, "rollout", "KV cache")
    assert re.fullmatch(r"\d+ of 256 sequences of the greatest length", cache.note)
    assert eight.memory[0].in_phase(GENERATE) < USABLE * H100, "it is no larger than what is free"
    alone = item(plan_of(M70, **long, trainer__n_gpus_per_node=8), "rollout", "KV cache")
    assert alone.held == 1
    assert alone.size == 2 * 2 * 80 * 8 * 128 * (8192 + 512)
    assert item(plan_of(M7, gpu=None), "rollout", "KV cache").note == "", "of an unknown device, all that is wanted"


def test_few_sequences_at_a_time_are_warned_about(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(M70, data__max_response_length=8192, trainer__n_gpus_per_node=8)
    assert any("KV cache holds 1 of 256 sequences" in warning for warning in plan.warnings())
    assert not any("KV cache" in warning for warning in plan_of(FAMILIES["tied"]().to_dict()).warnings())


def test_a_cpu_generates_with_packed_weights_beside_those_that_are_trained(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(FAMILIES["tied"]().to_dict(), gpu=None, trainer__device="cpu")
    assert item(plan, "rollout", "packed weights").size == pytest.approx(
        4 * read_size(FAMILIES["tied"]().to_dict()), rel=0.01
    )
    large = plan_of(M7, gpu=None, trainer__device="cpu")
    assert not [i for i in large.memory[0].items if i.what == "packed weights"]


# ---- the update ------------------------------------------------------------------------------------------------------


def test_a_row_longer_than_the_budget_is_a_micro_batch_by_itself(plan_of: Callable[..., Plan]) -> None:
    def activations(**keys: Any) -> int:
        return item(plan_of(M7, data__max_prompt_length=768, **keys), "actor", "activations").size

    long = {"data__max_response_length": 32000}
    assert activations(**long, **{f"{ACTOR}.ppo_max_token_len_per_gpu": 32768}) == activations(**long)
    assert activations(**long) == pytest.approx(2 * activations(data__max_response_length=8192), rel=1e-6)
    shared = {f"{ACTOR}.ulysses_sequence_parallel_size": 2, "trainer__n_gpus_per_node": 2}
    assert activations(**long, **shared) == pytest.approx(activations(**long) / 2, rel=1e-6)


def test_a_large_tensor_is_a_bucket_of_an_offloaded_optimiser_by_itself(plan_of: Callable[..., Plan]) -> None:
    offloaded = plan_of(M7, **{f"{ACTOR}.fsdp_config.optimizer_offload": True})
    embedding, mlp = 152064 * 3584, 18944 * 3584
    assert item(offloaded, "actor", "optimiser").size == 8 * (embedding + 2 * mlp)


# ---- keys that would make it fit -------------------------------------------------------------------------------------


def test_a_model_larger_than_a_device_is_told_to_share_it_out(plan_of: Callable[..., Plan], load: Load) -> None:
    keys = {"trainer__n_gpus_per_node": 8, "trainer__nnodes": 4, "data__max_response_length": 8192}
    plan = plan_of(M32, **keys, **{f"{ACTOR}.ppo_max_token_len_per_gpu": 16384})
    assert plan.fits is False
    assert plan.savings.fits
    chosen = dict(setting.split("=") for setting in plan.savings.keys)
    assert int(chosen[f"{ROLLOUT}.tensor_model_parallel_size"]) > 1
    values = {k: True if v == "True" else int(v) if v.isdigit() else v for k, v in chosen.items()}
    assert plan_of(M32, **keys, **{f"{ACTOR}.ppo_max_token_len_per_gpu": 16384}, **values).fits
    text = StringIO()
    show_plan(plan, Console(file=text, width=2000))
    assert "with them it fits" in text.getvalue()


def test_keys_that_do_not_suffice_are_said_not_to(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(M70)
    assert not plan.savings.fits
    text = StringIO()
    show_plan(plan, Console(file=text, width=2000))
    assert "even with them it needs" in text.getvalue()


def test_more_nodes_are_named_only_where_they_would_do(plan_of: Callable[..., Plan]) -> None:
    recomputed = {f"{MODEL}.enable_gradient_checkpointing": True, "trainer__n_gpus_per_node": 2}
    plan = plan_of(M7, **recomputed)
    assert plan.savings.nodes > 1
    assert plan_of(M7, **recomputed, trainer__nnodes=plan.savings.nodes).fits
    assert plan_of(M70, trainer__n_gpus_per_node=8).savings.nodes == 0, "a whole copy to generate fits no H100"


# ---- hosts -----------------------------------------------------------------------------------------------------------

OFFLOADING = {f"{ACTOR}.fsdp_config.optimizer_offload": True, "trainer__n_gpus_per_node": 8}


def test_what_workers_keep_in_host_memory(plan_of: Callable[..., Plan], load: Load) -> None:
    plan = plan_of(M7, **OFFLOADING, trainer__save_freq=5)
    sizes = {(i.role, i.what): (i.each, i.first) for i in plan.host}
    weights = 7.61e9
    assert sizes["actor_rollout", "offloaded optimiser"][0] == pytest.approx(8 * weights / 8, rel=0.01)
    each, first = sizes["actor_rollout", "checkpoint while it is written"]
    assert each == pytest.approx(12 * weights / 8, rel=0.01)
    assert first == pytest.approx(4 * weights, rel=0.01), (
        "the first worker gathers the policy for its Hugging Face folder"
    )
    text = StringIO()
    show_plan(plan, Console(file=text, width=200))
    assert "offloaded optimiser" in text.getvalue()


def test_too_little_host_memory_names_the_key_and_what_is_there(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(M7, **OFFLOADING)
    require_host_memory(plan.host, {"actor_rollout": 8}, True, 100 << 30, "node-7")
    with pytest.raises(
        ResourceError, match=r"node-7 has 64 GB of host memory left, and the workers there need 78 GB"
    ) as raised:
        require_host_memory(plan.host, {"actor_rollout": 8}, True, 60 << 30, "node-7")
    assert f"set {ACTOR}.fsdp_config.optimizer_offload=False" in raised.value.fix
    with pytest.raises(ResourceError, match="use more nodes"):
        require_host_memory(plan.host, {"actor_rollout": 8}, True, 10 << 30, "node-7")


def test_a_run_that_this_machine_cannot_hold_is_refused_before_it_starts(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = {f"{MODEL}.path": write(tmp_path / "7b", M7), "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 8}
    offloading = load({**path, "trainer.device": "cuda", f"{ACTOR}.fsdp_config.optimizer_offload": True})
    on_cpu = load({**path, "trainer.device": "cpu"})
    for total in (1 << 30, 1 << 40):
        monkeypatch.setattr(before_start, "usable_memory", lambda total=total: (total, total))
        refused = []
        for config in (offloading, on_cpu):
            try:
                before_start._memory(config)
            except ResourceError as error:
                refused.append(error.what)
        assert len(refused) == (2 if total < 1 << 35 else 0)
    assert host_items(on_cpu, "cpu") == []


def test_the_phases_of_an_update_do_not_hold_what_only_generation_needs(plan_of: Callable[..., Plan]) -> None:
    memory = plan_of(M7, **{f"{ROLLOUT}.free_cache_engine": True}).memory[0]
    assert "KV cache" not in {i.what for i in memory.items if UPDATE_ACTOR in i.phases}
