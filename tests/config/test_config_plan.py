"""The plan: batch arithmetic, pools, dataset sizes and the memory estimate, without starting anything."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quadriga.commands.plan import main, show_plan
from quadriga.config import Config
from quadriga.config.memory import GENERATE, UPDATE_ACTOR, UPDATE_CRITIC, WorkerMemory
from quadriga.config.model_shape import find_model_folder, read_model_shape
from quadriga.config.plan import format_bytes, make_plan
from quadriga.errors import ConfigError

Load = Callable[[dict[str, Any]], Config]
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
GRPO = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 8}


def write_model(folder: Path, *, weights: bool = True, **changes: Any) -> Path:
    """A model folder with real headers: hidden 64, 2 layers, 4 heads of 16 with 2 for keys, ffn 128, vocab 100, tied."""
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "tie_word_embeddings": True,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        tensors = {"embed": [100, 64], "layers": [2, 64 * (2 * 64 + 2 * 32 + 3 * 128)]}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        header |= {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
        raw = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return folder


PARAMETERS = 100 * 64 + 2 * 64 * (2 * 64 + 2 * 32 + 3 * 128)


def test_batch_arithmetic_of_a_grpo_step(load: Load) -> None:
    plan = make_plan(
        load(
            {
                **GRPO,
                "data.train_batch_size": 128,
                f"{ACTOR}.ppo_mini_batch_size": 32,
                f"{ACTOR}.ppo_epochs": 2,
                f"{ACTOR}.ppo_max_token_len_per_gpu": 5000,
                "data.max_prompt_length": 500,
                "data.max_response_length": 1500,
                "trainer.n_gpus_per_node": 4,
                "trainer.nnodes": 2,
            }
        )
    )
    assert (plan.prompts, plan.rows, plan.workers, plan.tokens) == (128, 1024, 8, 1024 * 2000)
    actor = plan.actor
    assert (actor.mini_batch_rows, actor.mini_batches, actor.optimiser_steps) == (256, 4, 8)
    assert (actor.rows_per_worker, actor.micro_batch_rows, actor.micro_batches) == (32, 2, 16)
    assert plan.critic is None
    assert not plan.strictly_on_policy


def test_fixed_rows_per_micro_batch_with_a_rest(load: Load) -> None:
    plan = make_plan(load({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 10}))
    assert plan.actor.token_budget is None
    assert (plan.actor.rows_per_worker, plan.actor.micro_batches) == (64, 7)
    assert plan.critic is not None
    assert plan.critic.micro_batches == 7
    assert plan.strictly_on_policy


def test_pools_and_the_roles_in_them(load: Load) -> None:
    plan = make_plan(load({"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2}))
    assert {name: pool.slots_per_node for name, pool in plan.pools.items()} == {"global_pool": [8, 8]}
    assert plan.pools["global_pool"].roles == ["actor", "rollout", "critic"]

    reward_model = {"reward_model.enable": True, "reward_model.model.path": "m"}
    plan = make_plan(load({**GRPO, **reward_model, f"{ACTOR}.use_kl_loss": True}))
    assert plan.pools["global_pool"].roles == ["actor", "rollout", "ref", "rm"]

    own_pool = {"reward_model.enable_resource_pool": True, "reward_model.n_gpus_per_node": 2}
    plan = make_plan(load({**GRPO, **reward_model, **own_pool}))
    assert {name: (pool.slots_per_node, pool.roles) for name, pool in plan.pools.items()} == {
        "global_pool": ([1], ["actor", "rollout"]),
        "reward_pool": ([2], ["rm"]),
    }


def test_steps_from_the_sizes_of_local_files(load: Load, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": list(range(150))}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n' * 49 + "\n" + '{"prompt": "x"}')
    files = {"data.train_files": [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]}
    plan = make_plan(load({**files, "trainer.total_epochs": 10}))
    assert (plan.train_rows, plan.steps_per_epoch, plan.total_steps) == (200, 3, 30)
    assert make_plan(load({**files, "trainer.total_training_steps": 7})).total_steps == 7
    assert make_plan(load({**files, "data.train_max_samples": 64})).steps_per_epoch == 1
    too_few = make_plan(load({**files, "data.train_batch_size": 256}))
    assert any("fewer than one step" in warning for warning in too_few.warnings())


@pytest.mark.parametrize("file", ["builtin:arithmetic/train", "/no/such/file.parquet", "org/dataset"])
def test_size_that_cannot_be_known_says_why(load: Load, file: str) -> None:
    plan = make_plan(load({"data.train_files": file}))
    assert plan.total_steps is None
    assert file in plan.train_rows_unknown_because


def test_model_shape_from_headers_and_from_config_alone(tmp_path: Path) -> None:
    with_weights = read_model_shape(write_model(tmp_path / "a"))
    assert (with_weights.parameters, with_weights.layers, with_weights.rest) == (PARAMETERS, 2, 100 * 64)
    widths = (
        with_weights.hidden,
        with_weights.ffn,
        with_weights.query_width,
        with_weights.kv_width,
        with_weights.vocab,
    )
    assert widths == (64, 128, 64, 32, 100)
    assert read_model_shape(write_model(tmp_path / "b", weights=False)) == with_weights
    untied = read_model_shape(write_model(tmp_path / "c", weights=False, tie_word_embeddings=False))
    assert untied.parameters == PARAMETERS + 100 * 64


@pytest.mark.parametrize("damage", ["config", "weights", "shape"])
def test_damaged_model_folder_is_said_to_be_unknown(load: Load, tmp_path: Path, damage: str) -> None:
    folder = write_model(tmp_path / "m", hidden_size=None if damage == "shape" else 64)
    if damage == "config":
        (folder / "config.json").write_text("{")
    if damage == "weights":
        (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    memory = make_plan(load({**GRPO, f"{MODEL}.path": str(folder)})).memory[0]
    assert memory.items == []
    assert memory.unknown[0].startswith("policy: unknown")


def test_hub_model_is_found_in_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_model_folder("org/name") is None
    cached = tmp_path / "models--org--name"
    folder = write_model(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert find_model_folder("org/name") == folder


def test_memory_of_a_model_that_is_not_local_is_unknown(load: Load) -> None:
    memory = make_plan(load({**GRPO, f"{MODEL}.path": "org/no-such-model"})).memory[0]
    assert memory.unknown == ["policy: unknown, the model folder of org/no-such-model is not local"]


def size(memory: WorkerMemory, role: str, what: str) -> int:
    return next(item.size for item in memory.items if (item.role, item.what) == (role, what))


def test_memory_of_weights_optimiser_and_cache(load: Load, tmp_path: Path) -> None:
    keys = {**GRPO, f"{MODEL}.path": str(write_model(tmp_path / "m")), "trainer.device": "cuda"}
    one = make_plan(load(keys)).memory[0]
    assert size(one, "actor", "weights") == size(one, "actor", "gradients") == 4 * PARAMETERS
    assert size(one, "actor", "optimiser") == 8 * PARAMETERS
    assert size(one, "rollout", "weights") == 2 * PARAMETERS
    assert size(one, "rollout", "KV cache") == 2 * 2 * 2 * 32 * 256 * 1024
    four = make_plan(load({**keys, "trainer.n_gpus_per_node": 4})).memory[0]
    assert size(four, "actor", "optimiser") == 2 * PARAMETERS
    assert size(four, "rollout", "weights") == 2 * PARAMETERS, "every worker generates with the whole model"
    on_cpu = make_plan(load({**keys, "trainer.device": "cpu"})).memory[0]
    assert size(on_cpu, "rollout", "weights") == 0, "float32 on one worker: shared with the actor"


def test_options_that_save_memory_do_so_in_the_phase_they_are_for(load: Load, tmp_path: Path) -> None:
    path = {f"{MODEL}.path": str(write_model(tmp_path / "m")), "trainer.device": "cuda"}
    plain = make_plan(load(path)).memory[0]

    def phase(phase: str, **keys: Any) -> int:
        return make_plan(load({**path, **{k.replace("__", "."): v for k, v in keys.items()}})).memory[0].in_phase(phase)

    fsdp = "actor_rollout_ref__actor__fsdp_config__"
    assert phase(GENERATE, **{f"{fsdp}optimizer_offload": True}) == plain.in_phase(GENERATE) - 8 * PARAMETERS
    assert phase(UPDATE_ACTOR, **{f"{fsdp}optimizer_offload": True}) == plain.in_phase(UPDATE_ACTOR)
    assert phase(GENERATE, **{f"{fsdp}param_offload": True}) == plain.in_phase(GENERATE) - 4 * PARAMETERS
    checkpointing = {"actor_rollout_ref__model__enable_gradient_checkpointing": True}
    assert phase(UPDATE_ACTOR, **checkpointing) < plain.in_phase(UPDATE_ACTOR)
    assert phase(UPDATE_CRITIC, **checkpointing) < plain.in_phase(UPDATE_CRITIC)
    assert phase(UPDATE_ACTOR, actor_rollout_ref__rollout__free_cache_engine=False) > plain.in_phase(UPDATE_ACTOR)
    lora = make_plan(load({**path, f"{MODEL}.lora_rank": 4})).memory[0]
    assert size(lora, "actor", "optimiser") < size(plain, "actor", "optimiser") / 4


def test_local_teachers_lie_where_they_are_placed(load: Load, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "m"))
    teachers = {"a": {"model_path": folder, "key": "x"}, "b": {"endpoint": "http://host/v1", "model": "big"}}
    keys = {**GRPO, f"{MODEL}.path": folder, "distillation.enabled": True, "distillation.teacher_models": teachers}
    shared = make_plan(load({**keys, "trainer.device": "cuda"})).memory[0]
    assert size(shared, "teacher a", "weights") == 2 * PARAMETERS
    assert not [item for item in shared.items if item.role == "teacher b"]
    apart = make_plan(load({**keys, "trainer.device": "cuda", "distillation.nnodes": 1}))
    by_pool = {memory.pool: {item.role for item in memory.items} for memory in apart.memory}
    assert by_pool["teacher_pool"] == {"teacher a"}


LARGE = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4} | {
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def large(tmp_path: Path) -> dict[str, Any]:
    return {**GRPO, f"{MODEL}.path": str(write_model(tmp_path / "7b", weights=False, **LARGE))}


@pytest.mark.parametrize(
    ("name", "bytes_a_weight"), [("adamw", 8), ("adamw_8bit", 2.03), ("adamw_bf16", 4), ("muon", 4)]
)
def test_an_optimiser_takes_the_memory_of_its_name(
    load: Load, tmp_path: Path, name: str, bytes_a_weight: float
) -> None:
    keys = {**GRPO, f"{MODEL}.path": str(write_model(tmp_path / "m")), f"{ACTOR}.optim.name": name}
    assert size(make_plan(load(keys)).memory[0], "actor", "optimiser") == int(bytes_a_weight * PARAMETERS)


def test_frozen_weights_under_an_adapter_are_not_kept_in_float32(load: Load, tmp_path: Path) -> None:
    keys = {**GRPO, f"{MODEL}.path": str(write_model(tmp_path / "m")), f"{MODEL}.lora_rank": 2}
    trained = size(make_plan(load({**keys, "trainer.device": "cpu"})).memory[0], "actor", "gradients")
    on_gpu = make_plan(load({**keys, "trainer.device": "cuda"})).memory[0]
    assert size(on_gpu, "actor", "weights") == 2 * PARAMETERS + trained


def test_hybrid_sharding_divides_by_the_workers_that_share_a_copy(load: Load, tmp_path: Path) -> None:
    keys = {**GRPO, f"{MODEL}.path": str(write_model(tmp_path / "m")), "trainer.n_gpus_per_node": 8}
    hybrid = make_plan(load({**keys, f"{ACTOR}.fsdp_config.fsdp_size": 4})).memory[0]
    assert size(hybrid, "actor", "weights") == PARAMETERS


def test_a_7b_model_does_not_fit_one_h100_and_the_keys_that_help_make_it(load: Load, tmp_path: Path) -> None:
    plan = make_plan(load(large(tmp_path)), "h100-80g")
    assert plan.fits is False
    assert plan.savings.fits
    changes = dict(setting.split("=") for setting in plan.savings.keys)
    values = {k: True if v == "True" else int(v) if v.isdigit() else v for k, v in changes.items()}
    assert make_plan(load({**large(tmp_path), **values}), "h100-80g").fits
    text = StringIO()
    show_plan(plan, Console(file=text, width=200))
    assert "does not fit h100-80g" in text.getvalue()
    assert plan.savings.keys[0] in text.getvalue()


def test_a_7b_model_fits_eight_of_them(load: Load, tmp_path: Path) -> None:
    plan = make_plan(
        load({**large(tmp_path), "trainer.n_gpus_per_node": 8, f"{MODEL}.enable_gradient_checkpointing": True}),
        "h100-80g",
    )
    assert plan.fits
    assert plan.savings.keys == []


def test_activations_are_recomputed_by_themselves_where_they_would_not_fit(load: Load, tmp_path: Path) -> None:
    keys = {**large(tmp_path), "trainer.n_gpus_per_node": 4, f"{ACTOR}.ppo_max_token_len_per_gpu": 12288}
    kept, recomputed = (
        size(
            make_plan(load({**keys, f"{MODEL}.enable_gradient_checkpointing": value}), "h100-80g").memory[0],
            "actor",
            "activations",
        )
        for value in (False, True)
    )
    auto = {**keys, f"{MODEL}.enable_gradient_checkpointing": "auto"}
    found = {gpu: make_plan(load(auto), gpu).memory[0] for gpu in ("h100-80g", "b200-180g")}
    assert size(found["h100-80g"], "actor", "activations") == recomputed
    assert size(found["b200-180g"], "actor", "activations") == kept


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100-80g"):
        main(["--gpu", "h100-80gb"])


def test_plan_command_takes_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu=l4-24g"]) == 0
    assert "fits l4-24g" in capsys.readouterr().out


def test_cpu_run_that_does_not_fit_the_machine_is_warned_about(load: Load, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", weights=False, hidden_size=16384, num_hidden_layers=200, vocab_size=200000)
    plan = make_plan(load({**GRPO, f"{MODEL}.path": str(folder), "trainer.device": "cpu"}))
    assert any("this machine has" in warning for warning in plan.warnings())


def test_shown_plan_has_all_numbers(load: Load, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    text = StringIO()
    show_plan(make_plan(load({f"{MODEL}.path": str(folder), "trainer.nnodes": 2})), Console(file=text, width=140))
    for expected in (
        "65,536",
        "global_pool",
        "[1, 1]",
        "actor, rollout, critic",
        "KV cache",
        "optimiser steps",
        "unknown",
    ):
        assert expected in text.getvalue()


def test_bytes_are_readable() -> None:
    assert [format_bytes(n) for n in (12, 3_400, 5_600_000, 7_890_000_000)] == ["12 B", "3 kB", "6 MB", "7.9 GB"]


def test_plan_command_prints_and_returns_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.nnodes=2", "data.train_files=~/x.parquet"]) == 0
    assert "[1, 1]" in capsys.readouterr().out


def test_plan_command_refuses_a_configuration_that_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.nnodes"):
        main(["trainer.nodes=2"])


def test_plan_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from quadriga.commands.plan import main; main(['trainer.nnodes=2']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
