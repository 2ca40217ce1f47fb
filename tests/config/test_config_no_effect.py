"""A value that would have no effect is refused, and only then."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest

from quadriga.config import Config, load_config
from quadriga.config.no_effect import RULES, needs_of
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.config.typed import all_keys, check_value
from quadriga.errors import ConfigError

Load = Callable[[dict[str, Any]], Config]
Problem = Callable[[dict[str, Any]], str]

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, VAL = "actor_rollout_ref.model", "actor_rollout_ref.rollout.val_kwargs"
IS, RS = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs"
CORRECTION = "algorithm.rollout_correction"
POLICY_LOSS = f"{ACTOR}.policy_loss"
LOSS = f"{POLICY_LOSS}.loss_mode"
TEACHER = {"distillation.enabled": True, "distillation.teacher_models": {"one": {"model_path": "some/model"}}}
SERVER = {
    "distillation.enabled": True,
    "distillation.teacher_models": {"one": {"endpoint": "http://host:8000/v1", "model": "big"}},
}
TEACHING = "distillation.distillation_loss"
GRPO = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 4}
KL_LOSS = {f"{ACTOR}.use_kl_loss": True}
KL_REWARD = {"algorithm.use_kl_in_reward": True}
REWARD_MODEL = {"reward_model.enable": True, "reward_model.model.path": "some/model"}
ROWS = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4}

# (keys under test, what makes them idle, what makes them work)
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"critic.optim.lr": 1e-4, "critic.grad_clip": 0.5}, GRPO, {}),
    ({"trainer.critic_warmup": 3}, GRPO, {}),
    ({"async_training.mode": "free"}, {}, {"async_training.staleness": 1}),
    ({"async_training.staleness": 1}, {"episodes.read_from": "some/folder"}, {}),
    (
        {"async_training.partial_rollout": False},
        {"async_training.staleness": 1},
        {"async_training.staleness": 1, "async_training.mode": "free"},
    ),
    (
        {"async_training.partial_rollout_recompute": True},
        {"async_training.staleness": 1, "async_training.mode": "free", "async_training.partial_rollout": False},
        {"async_training.staleness": 1, "async_training.mode": "free"},
    ),
    ({f"{REF}.log_prob_max_token_len_per_gpu": 20000}, {}, KL_LOSS),
    ({f"{MODEL}.exclude_modules": ["q_proj"]}, {}, {f"{MODEL}.lora_rank": 8}),
    ({"reward_model.model.trust_remote_code": True}, {}, REWARD_MODEL),
    ({"reward_model.micro_batch_size_per_gpu": 4}, {}, REWARD_MODEL),
    ({"reward_model.max_token_len_per_gpu": 20000}, {}, REWARD_MODEL),
    ({"reward_model.enable_resource_pool": True}, {}, REWARD_MODEL),
    (
        {"reward_model.n_gpus_per_node": 2, "reward_model.nnodes": 2},
        REWARD_MODEL,
        {**REWARD_MODEL, "reward_model.enable_resource_pool": True},
    ),
    ({"trainer.watchdog.soft_s": 9.0, "trainer.max_restarts": 1}, {"trainer.executor": "local"}, {}),
    ({"trainer.watchdog.soft_factor": 9.0}, {"trainer.watchdog.soft_s": None}, {}),
    ({"trainer.watchdog.hard_factor": 9.0}, {"trainer.watchdog.hard_s": None}, {}),
    ({"algorithm.lam": 0.95}, GRPO, {}),
    ({"algorithm.lam": 0.95}, {"algorithm.adv_estimator": "remax"}, {}),
    ({"algorithm.gamma": 0.9}, GRPO, {"algorithm.adv_estimator": "reinforce_plus_plus"}),
    ({"algorithm.norm_adv_by_std_in_grpo": False}, {}, GRPO),
    ({"algorithm.f_norm": 2.0}, GRPO, {**GRPO, "algorithm.adv_estimator": "gpg"}),
    ({"algorithm.filter_groups.metric": "acc"}, GRPO, {**GRPO, "algorithm.filter_groups.enable": True}),
    ({f"{IS}_threshold": 3.0}, {}, {IS: "token"}),
    (
        {IS: "token"},
        {f"{CORRECTION}.bypass_mode": True},
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"},
    ),
    ({f"{IS}_batch_normalize": True}, {}, {IS: "sequence"}),
    ({f"{RS}_threshold": 3.0}, {}, {RS: "token_k1"}),
    ({f"{ACTOR}.kl_loss_coef": 0.1}, {}, KL_LOSS),
    ({f"{ACTOR}.kl_loss_type": "k1"}, {}, KL_LOSS),
    ({"algorithm.kl_ctrl.kl_coef": 0.1}, {}, KL_REWARD),
    ({"algorithm.kl_penalty": "k3"}, {}, KL_REWARD),
    ({"algorithm.kl_ctrl.target_kl": 0.2}, KL_REWARD, {**KL_REWARD, "algorithm.kl_ctrl.type": "adaptive"}),
    ({f"{ACTOR}.clip_ratio": 0.3}, {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.28}, {}),
    ({f"{ACTOR}.clip_ratio_c": 5.0}, {f"{ACTOR}.policy_loss.loss_mode": "gspo"}, {}),
    ({f"{ACTOR}.clip_ratio_high": 0.3}, {f"{ACTOR}.policy_loss.loss_mode": "gpg"}, {}),
    ({f"{ACTOR}.clip_ratio_c": 9.0}, {f"{ACTOR}.policy_loss.loss_mode": "luspo"}, {LOSS: "dppo_tv"}),
    ({f"{ACTOR}.clip_ratio": 0.3}, {LOSS: "luspo"}, {LOSS: "dppo_kl"}),
    ({f"{POLICY_LOSS}.tau_pos": 2.0}, {}, {LOSS: "sapo"}),
    ({f"{POLICY_LOSS}.clip_cov_lb": 2.0}, {LOSS: "kl_cov"}, {LOSS: "clip_cov"}),
    ({f"{POLICY_LOSS}.kl_cov_ratio": 0.1}, {LOSS: "clip_cov"}, {LOSS: "kl_cov"}),
    ({f"{POLICY_LOSS}.ppo_kl_coef": 0.2}, {}, {LOSS: "kl_cov"}),
    ({f"{POLICY_LOSS}.dro_beta": 0.2}, {}, {LOSS: "dro"}),
    ({f"{POLICY_LOSS}.vespo_k_pos": 1.0}, {}, {LOSS: "vespo"}),
    ({f"{POLICY_LOSS}.prime_kl_coef": 0.2}, {}, {LOSS: "prime_rl", f"{CORRECTION}.bypass_mode": True}),
    ({f"{POLICY_LOSS}.behaviour_cap": 2.0}, {}, {LOSS: "decoupled"}),
    ({f"{POLICY_LOSS}.proximal": "loglinear"}, {}, {LOSS: "decoupled"}),
    ({f"{ACTOR}.adaptive_entropy.target": 0.5}, {}, {f"{ACTOR}.adaptive_entropy.enable": True}),
    ({"algorithm.gdpo_reward_keys": ["a"]}, GRPO, {**GRPO, "algorithm.adv_estimator": "gdpo"}),
    ({"algorithm.gigpo.gamma": 0.5}, GRPO, {**GRPO, "algorithm.adv_estimator": "gigpo"}),
    ({"algorithm.handle_zero_tail": False}, GRPO, {**GRPO, "algorithm.adv_estimator": "optimal_token_baseline"}),
    ({"algorithm.pf_ppo.weight_pow": 3.0}, {}, {"algorithm.use_pf_ppo": True}),
    ({"distillation.hint": "sibling", f"{TEACHING}.loss_max_clamp": 9.0}, {}, {**GRPO, **TEACHER}),
    ({f"{TEACHING}.topk": 9, f"{TEACHING}.tail": "dropped"}, TEACHER, {**TEACHER, f"{TEACHING}.loss_mode": "jsd_topk"}),
    (
        {f"{TEACHING}.jsd_beta": 0.3},
        {**TEACHER, f"{TEACHING}.loss_mode": "forward_kl_topk"},
        {**TEACHER, f"{TEACHING}.loss_mode": "jsd_topk"},
    ),
    (
        {f"{TEACHING}.distillation_loss_coef": 0.5},
        {**TEACHER, f"{TEACHING}.use_task_rewards": False},
        TEACHER,
    ),
    ({"distillation.n_gpus_per_node": 4}, TEACHER, {**TEACHER, "distillation.nnodes": 1}),
    ({"distillation.hint_template": "so: {hint}"}, TEACHER, {**TEACHER, "distillation.hint": "solution"}),
    (
        {"distillation.hint_min_score": 0.5},
        {**TEACHER, "distillation.hint": "solution"},
        {**GRPO, **TEACHER, "distillation.hint": "sibling"},
    ),
    ({"distillation.timeout_s": 5.0, "distillation.max_concurrent": 2}, TEACHER, SERVER),
    ({f"{ACTOR}.profiler.enable": True, "global_profiler.steps": [2]}, {}, {"global_profiler.tool": "torch"}),
    ({"algorithm.length_reward_weight": 3.0}, {}, {"algorithm.length_reward": "kimi"}),
    ({f"{ACTOR}.loss_scale_factor": 100.0}, {}, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}),
    ({f"{MODEL}.lora_alpha": 32, f"{MODEL}.target_modules": ["q_proj"]}, {}, {f"{MODEL}.lora_rank": 8}),
    ({f"{ACTOR}.optim.min_lr_ratio": 0.1}, {}, {f"{ACTOR}.optim.lr_scheduler_type": "cosine"}),
    ({"critic.optim.min_lr_ratio": 0.1}, {}, {"critic.optim.lr_scheduler_type": "cosine"}),
    ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}, {f"{ACTOR}.use_dynamic_bsz": True}, {}),
    ({f"{ACTOR}.ppo_max_token_len_per_gpu": 20000}, ROWS, {}),
    ({f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4}, {f"{ACTOR}.use_dynamic_bsz": True}, {}),
    ({f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 20000}, ROWS, {}),
    ({f"{REF}.log_prob_micro_batch_size_per_gpu": 4}, {**KL_LOSS, f"{ACTOR}.use_dynamic_bsz": True}, KL_LOSS),
    (
        {f"{REF}.log_prob_max_token_len_per_gpu": 20000},
        {**KL_LOSS, f"{REF}.log_prob_micro_batch_size_per_gpu": 4},
        KL_LOSS,
    ),
    ({"critic.ppo_micro_batch_size_per_gpu": 8}, {"critic.use_dynamic_bsz": True}, {}),
    ({"critic.ppo_max_token_len_per_gpu": 20000}, {"critic.ppo_micro_batch_size_per_gpu": 4}, {}),
    (
        {"reward_model.max_token_len_per_gpu": 20000},
        {**REWARD_MODEL, "reward_model.micro_batch_size_per_gpu": 4},
        REWARD_MODEL,
    ),
    ({f"{ROLLOUT}.top_p": 0.9}, {f"{ROLLOUT}.do_sample": False}, {}),
    ({f"{ROLLOUT}.temperature": 0.9}, {f"{ROLLOUT}.do_sample": False}, {}),
    ({f"{VAL}.temperature": 0.7, f"{VAL}.top_p": 0.9}, {}, {f"{VAL}.do_sample": True, f"{VAL}.temperature": 1.0}),
    ({"data.seed": 7}, {"data.shuffle": False}, {}),
    ({"data.truncation": "left"}, {"data.filter_overlong_prompts": True}, {}),
    ({"data.sampler.class_name": "Mine"}, {}, {"data.sampler.class_path": "my.module"}),
    ({"data.custom_cls.name": "Mine"}, {}, {"data.custom_cls.path": "my.module"}),
    ({"custom_reward_function.name": "score"}, {}, {"custom_reward_function.path": "rewards.py"}),
    (
        {"custom_reward_function.name": "score"},
        {"custom_reward_function.path": "my.module:other"},
        {"custom_reward_function.path": "rewards.py"},
    ),
    ({"reward.max_error_rate": 0.1}, {"reward.on_error": "stop"}, {}),
    ({f"{ROLLOUT}.max_model_len": 2048}, {}, {f"{ROLLOUT}.name": "vllm"}),
    ({f"{ROLLOUT}.enable_chunked_prefill": False}, {}, {f"{ROLLOUT}.name": "vllm"}),
    ({"trainer.resume_from_path": "runs/1"}, {}, {"trainer.resume_mode": "resume_path"}),
    ({f"{IS}": "token"}, {f"{CORRECTION}.bypass_mode": True}, {}),
    ({f"{ROLLOUT}.engine_kwargs.vllm": {"block_size": 16}}, {}, {f"{ROLLOUT}.name": "vllm"}),
    (
        {f"{ACTOR}.fsdp_config.param_offload": True, f"{ACTOR}.fsdp_config.optimizer_offload": True},
        {"trainer.device": "cpu"},
        {},
    ),
    ({f"{REF}.fsdp_config.param_offload": True}, {"trainer.device": "cpu"}, {}),
    ({"critic.fsdp_config.param_offload": True}, {"trainer.device": "cpu"}, {}),
    (
        {f"{ROLLOUT}.gpu_memory_utilization": 0.7, f"{ROLLOUT}.free_cache_engine": False},
        {"trainer.device": "cpu"},
        {"trainer.device": "cpu", f"{ROLLOUT}.name": "vllm"},
    ),
    ({f"{ROLLOUT}.enforce_eager": True}, {"trainer.device": "cpu"}, {}),
    ({"critic.model.enable_gradient_checkpointing": True}, GRPO, {}),
]


@pytest.mark.parametrize(("keys", "idle", "works"), CASES, ids=lambda d: ",".join(d))
def test_value_is_refused_exactly_when_it_has_no_effect(
    load: Load, problem: Problem, keys: dict[str, Any], idle: dict[str, Any], works: dict[str, Any]
) -> None:
    message = problem({**idle, **keys})
    assert "no effect" in message
    assert "problems" not in message, "one problem names all the keys"
    for path in keys:
        assert f"{path}={keys[path]}" in message
    assert "fix: remove " in message
    load({**keys, **works})


def test_every_rule_and_condition_has_a_case() -> None:
    tested = {path for keys, _, _ in CASES for path in keys}
    for rule in RULES:
        assert any(fnmatchcase(path, pattern) for path in tested for pattern in rule.keys.split()), rule.keys
    covered = {need for path in tested for need in needs_of(Config).get(path, ())}
    profiles = {need for path, needs in needs_of(Config).items() for need in needs if ".profiler." in path}
    assert {need for needs in needs_of(Config).values() for need in needs} - covered - profiles == set()


@pytest.mark.parametrize("schema", [Config, *SCHEMAS.values()])
def test_conditions_ask_for_keys_and_values_that_there_are(schema: type) -> None:
    keys = all_keys(schema)
    for needs in needs_of(schema).values():
        for atom in (atom for need in needs for atom in need.atoms):
            for value in atom.values:
                known = {"True": True, "False": False, "null": None}.get(value, value)
                check_value(known, keys[atom.key].spec)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("dpo", {"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}, "dpo.loss_type=ipo"),
        ("sft", {"data": {"multiturn": {"messages_key": "chat"}}}, "data.multiturn.enable=False"),
        ("sft", {"model": {"lora_alpha": 32}}, "model.lora_rank=0 and model.lora_adapter_path=null"),
        ("rm", {"optim": {"lr_scheduler": "constant", "min_lr_ratio": 0.1}}, "optim.lr_scheduler=constant"),
        (
            "sft",
            {"trainer": {"device": "cpu"}, "model": {"fsdp_config": {"param_offload": True}}},
            "trainer.device=cpu",
        ),
        ("dpo", {"data": {"shuffle": False, "seed": 3}}, "data.shuffle=False"),
    ],
)
def test_supervised_runs_refuse_such_values_too(kind: str, keys: dict[str, Any], message: str) -> None:
    needed = {"data": {"train_files": "rows.jsonl"}, "model": {"partial_pretrain": "some/model"}}
    merged = {name: {**needed.get(name, {}), **keys.get(name, {})} for name in {**needed, **keys}}
    with pytest.raises(ConfigError, match=f"no effect: {message}"):
        load_config(merged, SCHEMAS[kind])


@pytest.mark.parametrize(
    "harmless",
    [
        {f"{ACTOR}.kl_loss_coef": 0.0},
        {"algorithm.kl_ctrl.kl_coef": 0},
        {f"{ROLLOUT}.do_sample": False, f"{ROLLOUT}.temperature": 0},
        {**GRPO, "trainer.critic_warmup": 0},
        {**GRPO, "critic.enable": False},
        {**GRPO, "critic.model.path": "builtin:arithmetic"},
        {f"{REF}.log_prob_max_token_len_per_gpu": "auto"},
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 20000, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4},
        {"custom_reward_function.reward_kwargs": {"method": "flexible"}},
    ],
    ids=str,
)
def test_value_that_changes_nothing_by_itself_is_let_through(load: Load, harmless: dict[str, Any]) -> None:
    load(harmless)


def test_own_estimator_and_loss_may_use_every_key(load: Load) -> None:
    load(
        {
            "algorithm.adv_estimator": "my.module:estimator",
            f"{ACTOR}.policy_loss.loss_mode": "my.module:loss",
            "algorithm.lam": 0.9,
            "algorithm.gamma": 0.9,
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{ACTOR}.clip_ratio_c": 4.0,
        }
    )
