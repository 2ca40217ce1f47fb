"""Keys of verl's that mean something else here: turned, replaced, counted anew, or refused; and every default that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verl_keys import all_verl_defaults, all_verl_sft_defaults

from quadriga.algorithms.correction import correct_rollout
from quadriga.compat.translation import Translation, Verdict, translate
from quadriga.config import load_config
from quadriga.config.foreign_keys import foreign_table
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SFTConfig
from quadriga.config.typed import all_keys, default_of

A = "actor_rollout_ref"
ACTOR, ROLLOUT, MODEL = f"{A}.actor", f"{A}.rollout", f"{A}.model"
LOSS, CORRECTION = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8", "trainer.n_gpus_per_node=8")
GAE = ("algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=8")
TEACHING = "distillation.distillation_loss"
TEACHER = (*GRPO, "distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=teacher")


def told(translation: Translation, key: str) -> tuple[Verdict, str]:
    return translation.rows[key].verdict, translation.rows[key].note


def accepted(arguments: list[str]) -> Translation:
    """A translation that is refused nowhere, and whose settings load."""
    translation = translate(arguments)
    assert translation.refusals == []
    load_config(translation.nested())
    return translation


# ---- Defaults

LAYOUT = "it says how rows are cut, where things run or what is printed; no result depends on it"
FOLLOWS = "it follows another key, as it does in verl"
SEEDS = "verl's runs are not repeatable; ours are, from a seed of their own"
SAME_DIFFERENCES = {
    f"{ACTOR}.use_dynamic_bsz": LAYOUT,
    f"{ACTOR}.ppo_max_token_len_per_gpu": LAYOUT,
    f"{ACTOR}.clip_ratio_low": "null is clip_ratio, which is 0.2",
    f"{ACTOR}.clip_ratio_high": "null is clip_ratio, which is 0.2",
    f"{ACTOR}.clip_ratio_c": "null is 3.0 for vanilla; for dppo_* the translation sets it",
    f"{ACTOR}.loss_agg_mode": "null is token-mean, but for losses that verl averages over rows whatever it says",
    f"{CORRECTION}.bypass_mode": "null is False, but for older samples, where the translation sets it",
    f"{ACTOR}.calculate_sum_pi_squared": "null: where an estimator needs it; a figure otherwise",
    f"{A}.ref.log_prob_use_dynamic_bsz": FOLLOWS,
    f"{A}.ref.log_prob_max_token_len_per_gpu": FOLLOWS,
    f"{A}.ref.ulysses_sequence_parallel_size": FOLLOWS,
    f"{A}.ref.fsdp_config.ulysses_sequence_parallel_size": FOLLOWS,
    f"{A}.ref.fsdp_config.fsdp_size": FOLLOWS,
    f"{ROLLOUT}.name": "the native engine generates",
    f"{ROLLOUT}.seed": SEEDS,
    f"{ROLLOUT}.prompt_length": FOLLOWS,
    f"{ROLLOUT}.response_length": FOLLOWS,
    f"{ROLLOUT}.tensor_model_parallel_size": LAYOUT,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": FOLLOWS,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": FOLLOWS,
    f"{ROLLOUT}.agent.num_workers": LAYOUT,
    f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent is another name of single_turn",
    f"{MODEL}.lora.alpha": "the translation sets it beside lora.rank",
    f"{MODEL}.lora.target_modules": "Megatron's names of all linear layers",
    "critic.ppo_mini_batch_size": FOLLOWS,
    "critic.ppo_micro_batch_size": FOLLOWS,
    "critic.ppo_micro_batch_size_per_gpu": FOLLOWS,
    "critic.use_dynamic_bsz": FOLLOWS,
    "critic.ppo_max_token_len_per_gpu": LAYOUT,
    "critic.ppo_epochs": FOLLOWS,
    "critic.shuffle": FOLLOWS,
    "critic.loss_agg_mode": FOLLOWS,
    "critic.optim.lr": "verl's is 1e-5 too: the list has the optimiser's own",
    "critic.model.path": "verl's default is a model of one of its authors' machines; the policy's is taken",
    "critic.model.trust_remote_code": FOLLOWS,
    "critic.model.enable_gradient_checkpointing": LAYOUT,
    "reward_model.model.trust_remote_code": FOLLOWS,
    "reward_model.forward_max_token_len_per_gpu": LAYOUT,
    "reward_model.n_gpus_per_node": LAYOUT,
    "reward_model.num_workers": LAYOUT,
    "reward.num_workers": LAYOUT,
    "reward.reward_model.n_gpus_per_node": LAYOUT,
    "reward.reward_model.nnodes": LAYOUT,
    "reward.reward_model.model_path": "none; with reward_model.enable one must be given",
    "data.seed": SEEDS,
    "algorithm.filter_groups.metric": "verl demands one",
    "algorithm.filter_groups.max_num_gen_batches": "the translation sets it beside filter_groups.enable",
    f"{TEACHING}.loss_mode": "the translation sets it beside distillation.enabled",
    f"{TEACHING}.topk": "the translation sets it beside a loss on the top k",
    "distillation.n_gpus_per_node": LAYOUT,
    "trainer.project_name": LAYOUT,
    "trainer.experiment_name": LAYOUT,
    "trainer.logger": LAYOUT,
    "trainer.default_local_dir": LAYOUT,
    "trainer.device": LAYOUT,
    "global_profiler.save_path": LAYOUT,
    **{
        f"{role}.profiler.{name}": LAYOUT
        for role in (ACTOR, f"{A}.ref", "critic", "reward_model")
        for name in ("ranks", "tool_config.torch.contents")
    },
}
SFT_DIFFERENCES = {
    "data.micro_batch_size_per_gpu": LAYOUT,
    "data.max_token_len_per_gpu": LAYOUT,
    "trainer.default_local_dir": LAYOUT,
    "trainer.project_name": LAYOUT,
    "trainer.experiment_name": LAYOUT,
    "trainer.logger": LAYOUT,
    "trainer.device": LAYOUT,
    "model.path": "none; one must be given",
    "model.lora.alpha": "the key of Megatron's LoRA, which verl's other engines do not read",
}


@pytest.mark.parametrize(
    ("kind", "schema", "defaults", "reasons"),
    [
        ("rl", Config, all_verl_defaults(), SAME_DIFFERENCES),
        ("sft", SFTConfig, all_verl_sft_defaults(), SFT_DIFFERENCES),
    ],
    ids=["rl", "sft"],
)
def test_every_default_that_differs_from_verls_is_assumed_or_has_a_reason(
    kind: Any, schema: type, defaults: dict[str, Any], reasons: dict[str, str]
) -> None:
    keys, table = all_keys(schema), foreign_table(kind)
    differ = set()
    for key, value in defaults.items():
        row = None if key in keys else table.row(key)
        path = row.target(key) if row is not None and row.to is not None else key
        if path in keys and path not in table.defaults and default_of(schema, path) != value:
            differ.add(key)
    assert differ == set(reasons)


def test_defaults_that_hang_on_a_choice_hold_with_it() -> None:
    assert accepted([*GRPO, f"{LOSS}=dppo_tv"]).settings[f"{ACTOR}.clip_ratio_c"] == 3.0
    assert accepted([*GRPO, f"{LOSS}=dppo_kl", f"{ACTOR}.clip_ratio_c=9"]).settings[f"{ACTOR}.clip_ratio_c"] == 9
    assert f"{ACTOR}.clip_ratio_c" not in accepted(list(GRPO)).settings
    filtered = accepted([*GRPO, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"])
    assert filtered.settings["algorithm.filter_groups.max_num_gen_batches"] >= 1_000_000
    lora = accepted([*GRPO, f"+{MODEL}.lora.rank=8"])
    assert (lora.settings[f"{MODEL}.lora_rank"], lora.settings[f"{MODEL}.lora_alpha"]) == (8, 32)
    assert f"{MODEL}.lora_alpha" not in accepted([*GRPO, f"{MODEL}.lora_rank=8"]).settings


# ---- Rollout correction


@pytest.mark.parametrize("log_ratio", [-1.2, -0.9, -0.5, 0.0, 0.5, 0.8, 1.2])
def test_bounds_of_k1_accept_the_ratios_that_verl_accepts(log_ratio: float) -> None:
    """verl keeps what has rollout/trainer within [0.5, 3]; `log_ratio` is trainer − rollout."""
    settings = accepted(
        [*GRPO, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_3.0"]
    ).settings
    got = correct_rollout(
        old_log_prob=torch.tensor([[log_ratio, 0.0]]),
        rollout_log_prob=torch.zeros(1, 2),
        response_mask=torch.ones(1, 2),
        rollout_rs="token_k1",
        rollout_rs_threshold=settings[f"{CORRECTION}.rollout_rs_threshold"],
    )
    assert bool(got.mask[0, 0]) == (0.5 <= torch.tensor(-log_ratio).exp() <= 3.0)


def test_bounds_are_turned_one_by_one_and_a_single_one_is_left_alone() -> None:
    key = f"{CORRECTION}.rollout_rs_threshold"
    several = accepted([*GRPO, f"{CORRECTION}.rollout_rs='seq_mean_k1,token_k3'", f"{key}='0.5_4.0,0.01'"])
    assert several.settings[key] == "0.25_2.0,0.01"
    assert "rollout/trainer in verl" in told(several, key)[1]
    single = accepted([*GRPO, f"{CORRECTION}.rollout_rs=token_k1", f"{key}=2.0"])
    assert single.settings[key] == 2.0
    assert told(single, key) == (Verdict.TAKEN, "")


def test_rejection_by_its_names_of_late_2025() -> None:
    key = f"{CORRECTION}.rollout_rs_threshold"
    old = accepted([*GRPO, f"{CORRECTION}.rollout_rs=geometric", f"{key}=1.001", f"{key}_lower=0.99"])
    assert old.settings[f"{CORRECTION}.rollout_rs"] == "seq_mean_k1"
    assert old.settings[key] == "0.99_1.001"
    assert "late 2025" in told(old, f"{CORRECTION}.rollout_rs")[1]
    assert accepted([*GRPO, f"{CORRECTION}.rollout_rs=sequence", f"{key}=2"]).settings[f"{CORRECTION}.rollout_rs"] == (
        "seq_sum_k1"
    )


def test_a_cap_of_weights_is_truncated_importance_sampling() -> None:
    translation = accepted([*GRPO, f"+{ACTOR}.tis_imp_ratio_cap=3"])
    assert translation.settings[f"{CORRECTION}.rollout_is"] == "token"
    assert translation.settings[f"{CORRECTION}.rollout_is_threshold"] == 3.0
    assert f"{CORRECTION}.rollout_is" not in accepted([*GRPO, f"+{ACTOR}.tis_imp_ratio_cap=-1"]).settings
    both = accepted([*GRPO, f"+{ACTOR}.tis_imp_ratio_cap=3", f"{CORRECTION}.rollout_is=sequence"])
    assert both.settings[f"{CORRECTION}.rollout_is"] == "sequence"
    assert f"{CORRECTION}.rollout_is_threshold" not in both.settings


def test_rollout_correction_by_its_keys_of_2025() -> None:
    old = ["algorithm.rollout_is_threshold=2.0", "algorithm.rollout_is_level=sequence"]
    on = accepted([*GRPO, "algorithm.rollout_is=True", *old, "algorithm.rollout_is_mode=truncate"]).settings
    assert (on[f"{CORRECTION}.rollout_is"], on[f"{CORRECTION}.rollout_is_threshold"]) == ("sequence", 2.0)
    veto = "algorithm.rollout_is_veto_threshold=1e-4"
    for without in (["algorithm.rollout_is=False"], []):
        off = accepted([*GRPO, *without, *old, veto, "algorithm.rollout_is_mode=mask"]).settings
        assert not any(key.startswith(CORRECTION) for key in off)
    assert (
        accepted([*GRPO, "algorithm.rollout_is=True", *old, veto]).settings[f"{CORRECTION}.rollout_rs"] == "seq_max_k1"
    )
    masked = translate([*GRPO, "algorithm.rollout_is=True", *old, "algorithm.rollout_is_mode=mask"]).refusals
    assert {row.key for row in masked} == {"algorithm.rollout_is_mode", "algorithm.rollout_is_level"}
    bypass = [f"{CORRECTION}.use_policy_gradient=True", f"{CORRECTION}.rollout_is=sequence"]
    settings = accepted([*GRPO, f"{CORRECTION}.bypass_mode=True", *bypass]).settings
    assert (settings[f"{CORRECTION}.loss_type"], settings[f"{CORRECTION}.rollout_is"]) == ("reinforce", "sequence")
    assert [row.key for row in translate([*GRPO, *bypass]).refusals] == [f"{CORRECTION}.use_policy_gradient"]


def test_a_veto_leaves_out_the_rows_with_a_token_that_the_trainer_would_hardly_write() -> None:
    veto = f"{CORRECTION}.rollout_token_veto_threshold=1e-4"
    geometric = [f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs_threshold=1.01"]
    after = accepted([*GRPO, *geometric, veto]).settings
    assert after[f"{CORRECTION}.rollout_rs"] == "seq_mean_k1,seq_max_k1"
    assert after[f"{CORRECTION}.rollout_rs_threshold"].startswith("1.01,0.0001_")
    alone = accepted([*GRPO, veto]).settings
    old = torch.zeros(3, 2)
    rollout = torch.tensor([[0.0, 9.5], [0.0, 9.0], [-30.0, -400.0]])  # exp(-9.5) < 1e-4 < exp(-9)
    kept = correct_rollout(
        old_log_prob=old,
        rollout_log_prob=rollout,
        response_mask=torch.ones(3, 2),
        rollout_rs=alone[f"{CORRECTION}.rollout_rs"],
        rollout_rs_threshold=alone[f"{CORRECTION}.rollout_rs_threshold"],
    ).mask
    assert kept.tolist() == [[False, False], [True, True], [True, True]]


def test_bypass_mode_replaces_the_loss() -> None:
    by_name = accepted([*GRPO, f"{LOSS}=bypass_mode"])
    assert by_name.settings[f"{CORRECTION}.bypass_mode"] is True
    assert LOSS not in by_name.settings
    both = accepted([*GRPO, f"{LOSS}=gspo", f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=token"])
    assert LOSS not in both.settings
    assert "replaces the loss" in told(both, LOSS)[1]
    assert told(both, f"{CORRECTION}.rollout_is")[0] is Verdict.ASIDE


# ---- Losses, estimators, optimiser


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_losses_over_sequences_are_averaged_over_them_as_in_verl(loss: str) -> None:
    translation = accepted([*GRPO, f"{LOSS}={loss}", f"{ACTOR}.loss_agg_mode=token-mean"])
    assert f"{ACTOR}.loss_agg_mode" not in translation.settings
    assert "always averages over sequences" in told(translation, f"{ACTOR}.loss_agg_mode")[1]


def test_a_constant_divisor_says_which_version_is_followed() -> None:
    key = f"{ACTOR}.loss_agg_mode"
    assert "August 2026" in told(accepted([*GRPO, f"{key}=seq-mean-token-sum-norm"]), key)[1]


def test_pf_ppo_and_a_critic_beside_another_estimator_than_gae_change_nothing_in_verl() -> None:
    idle = accepted([*GRPO, "algorithm.use_pf_ppo=True", "critic.enable=True"])
    assert not {"algorithm.use_pf_ppo", "critic.enable"} & set(idle.settings)
    assert accepted([*GAE, "algorithm.use_pf_ppo=True"]).settings["algorithm.use_pf_ppo"] is True


def test_verls_actor_learns_in_the_step_that_critic_warmup_names() -> None:
    assert accepted([*GAE, "trainer.critic_warmup=5"]).settings["trainer.critic_warmup"] == 4
    assert accepted([*GAE, "trainer.critic_warmup=1"]).settings["trainer.critic_warmup"] == 0
    assert accepted([*GAE, "trainer.critic_warmup=0"]).settings["trainer.critic_warmup"] == 0


def test_groups_cannot_be_compared_by_a_reward_with_its_kl() -> None:
    filtered = [*GRPO, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_final_reward"]
    assert accepted(filtered).settings["algorithm.filter_groups.metric"] == "score"
    refused = translate([*filtered, "algorithm.use_kl_in_reward=True"]).refusals
    assert [row.key for row in refused] == ["algorithm.filter_groups.metric"]


def test_adamw_with_moments_of_8_bits_has_its_name_here() -> None:
    package = [f"{ACTOR}.optim.optimizer=AdamW8bit", f"{ACTOR}.optim.optimizer_impl=bitsandbytes.optim"]
    assert accepted([*GRPO, *package]).settings[f"{ACTOR}.optim.name"] == "adamw_8bit"
    other = translate([*GRPO, f"{ACTOR}.optim.optimizer=Adafactor"]).refusals
    assert [row.key for row in other] == [f"{ACTOR}.optim.optimizer"]
    supervised = [
        "data.train_files=t",
        "model.path=m",
        "optim.optimizer=AdamW8bit",
        "optim.optimizer_impl=torchao.optim",
    ]
    translation = translate(supervised, "sft")
    assert (translation.refusals, translation.settings["optim.name"]) == ([], "adamw_8bit")


def test_torchaos_adamw_is_adamw_and_options_that_change_no_step_are_set_aside() -> None:
    optim = f"{ACTOR}.optim"
    options = (
        f"+{optim}.override_optimizer_config={{bf16_stochastic_round: true, fused: true, optimizer_cpu_offload: true}}"
    )
    translation = accepted([*GRPO, f"{optim}.optimizer=_AdamW", f"{optim}.optimizer_impl=torchao.optim", options])
    assert f"{optim}.name" not in translation.settings
    assert told(translation, f"{optim}.override_optimizer_config.bf16_stochastic_round")[0] is Verdict.ASIDE
    assert told(translation, f"{optim}.override_optimizer_config.fused")[0] is Verdict.ASIDE
    accepted([*GRPO, f"+{optim}.override_optimizer_config.eps=1e-8"])
    for option in ("eps=1e-15", "amsgrad=True", "block_size=64"):
        refused = translate([*GRPO, f"+{optim}.override_optimizer_config.{option}"]).refusals
        assert len(refused) == 1
    other = translate([*GRPO, f"{optim}.optimizer=Lion", f"{optim}.optimizer_impl=bitsandbytes.optim"]).refusals
    assert {row.key for row in other} == {f"{optim}.optimizer", f"{optim}.optimizer_impl"}


# ---- Sampling, rewards, adapters


def test_the_temperature_decides_whether_verls_servers_sample() -> None:
    assert f"{ROLLOUT}.do_sample" not in accepted([*GRPO, f"{ROLLOUT}.do_sample=False"]).settings
    greedy = accepted([*GAE, f"{ROLLOUT}.temperature=0"])
    assert greedy.settings[f"{ROLLOUT}.do_sample"] is False
    assert accepted([*GRPO, f"{ROLLOUT}.top_k=0"]).settings[f"{ROLLOUT}.top_k"] == -1


def test_greedy_validation_needs_one_response_and_no_limit_of_turns_is_null() -> None:
    assert accepted([*GRPO, f"{ROLLOUT}.val_kwargs.n=4"]).settings[f"{ROLLOUT}.val_kwargs.n"] == 1
    sampled = [*GRPO, f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.temperature=1.0"]
    assert accepted(sampled).settings[f"{ROLLOUT}.val_kwargs.n"] == 4
    turns = [f"{ROLLOUT}.multi_turn.max_assistant_turns=0", f"{ROLLOUT}.multi_turn.max_user_turns=0"]
    unlimited = accepted([*GRPO, *turns])
    assert not [path for path in unlimited.settings if "multi_turn" in path]


@pytest.mark.parametrize("key", ["custom_reward_function.path", "reward.custom_reward_function.path"])
def test_a_function_beside_a_reward_model_is_refused(key: str) -> None:
    model = ["reward_model.enable=True", "reward_model.model.path=rm"]
    assert [row.key for row in translate([*GRPO, *model, f"{key}=mine.py"]).refusals] == [key]
    assert translate([*GRPO, f"{key}=mine.py"]).refusals == []


def test_an_adapters_own_rank_wins_and_megatrons_layers_have_the_models_names() -> None:
    translation = translate([*GRPO, f"{MODEL}.lora_adapter_path=/adapter", f"{MODEL}.lora_rank=32"])
    assert f"{MODEL}.lora_rank" not in translation.settings
    assert "adapter" in told(translation, f"{MODEL}.lora_rank")[1]
    layers = accepted([*GRPO, f"+{MODEL}.lora.rank=8", f"+{MODEL}.lora.target_modules=[linear_qkv,linear_fc2]"])
    assert layers.settings[f"{MODEL}.target_modules"] == ["q_proj", "k_proj", "v_proj", "down_proj"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ACTOR}.grad_clip", "0.5"),
        (f"{ROLLOUT}.multi_turn.tool_response_truncate_side", "left"),
        ("algorithm.filter_groups.enable", "True"),
    ],
)
def test_keys_that_versions_of_verl_read_differently_say_which_is_assumed(key: str, value: str) -> None:
    verdict, note = told(translate([*GRPO, f"{key}={value}"]), key)
    assert verdict is Verdict.TAKEN
    assert "January 2026" in note


@pytest.mark.parametrize(
    ("model", "size", "slots", "kept"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 4, 8, None),
        ("Qwen/Qwen2.5-72B-Instruct", 4, 8, 4),
        ("Qwen/Qwen2.5-72B-Instruct", 16, 8, 8),
        ("Qwen/Qwen2.5-72B-Instruct", 4, 6, 3),
        ("Qwen/Qwen2.5-72B-Instruct", 4, 1, None),
        ("some/model", 4, 8, None),
    ],
)
def test_a_model_is_shared_out_where_it_would_not_fit_one_gpu(
    model: str, size: int, slots: int, kept: int | None
) -> None:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    nodes = [f"trainer.n_gpus_per_node={slots}", "data.train_batch_size=96", f"{ACTOR}.ppo_mini_batch_size=48"]
    translation = accepted([*GRPO, *nodes, f"{MODEL}.path={model}", f"{key}={size}"])
    assert translation.settings.get(key) == kept
    assert ("GB of weights" in told(translation, key)[1]) == (kept is not None)


# ---- Distillation


def test_distillation_by_verls_defaults() -> None:
    settings = accepted(list(TEACHER)).settings
    assert settings[f"{TEACHING}.loss_mode"] == "k3"
    top = accepted([*TEACHER, f"{TEACHING}.loss_mode=forward_kl_topk", f"{TEACHING}.log_prob_min_clamp=-10"]).settings
    assert (top[f"{TEACHING}.topk"], top[f"{TEACHING}.tail"]) == (32, "dropped")
    assert top[f"{TEACHING}.log_prob_min_clamp"] == -10
    whole = accepted([*TEACHER, f"{TEACHING}.loss_mode=forward_kl_topk_tail"]).settings
    assert (whole[f"{TEACHING}.loss_mode"], whole[f"{TEACHING}.tail"]) == ("forward_kl_topk", "bucket")


def test_teachers_advantages_are_bounded_and_clipped_as_in_verl() -> None:
    alone = [*TEACHER, f"{TEACHING}.use_policy_gradient=True", f"{TEACHING}.use_task_rewards=False"]
    plain = accepted([*alone, f"{TEACHING}.loss_mode=k1", f"{ACTOR}.clip_ratio_high=0.28", f"{LOSS}=gspo"])
    assert plain.settings[f"{TEACHING}.loss_max_clamp"] >= 1_000_000, "verl does not bound them by itself"
    assert plain.settings[f"{ACTOR}.clip_ratio_high"] == 0.2
    assert LOSS not in plain.settings
    bounded = accepted([*alone, f"{TEACHING}.loss_max_clamp=2.0", f"{TEACHING}.log_prob_min_clamp=-10"])
    assert bounded.settings[f"{TEACHING}.loss_mode"] == "k3", "minus its estimate is the advantage, in both"
    assert bounded.settings[f"{TEACHING}.loss_max_clamp"] == 2.0
    assert told(bounded, f"{TEACHING}.log_prob_min_clamp")[0] is Verdict.ASIDE, "verl reads it on the top k alone"


def test_a_task_and_teachers_of_different_clips_cannot_share_a_loss() -> None:
    both = [*TEACHER, f"{TEACHING}.use_policy_gradient=True", f"{TEACHING}.loss_mode=k1"]
    assert accepted(both)
    refused = translate([*both, f"{ACTOR}.clip_ratio_high=0.28"]).refusals
    assert [row.key for row in refused] == [f"{TEACHING}.use_policy_gradient"]
    assert accepted([*both, f"{ACTOR}.clip_ratio_high=0.28", f"{TEACHING}.clip_ratio_high=0.28"])


def test_what_tools_give_is_told_and_not_learnt_from_as_in_verl() -> None:
    tools = [f"{ROLLOUT}.agent.default_agent_loop=tool_agent", f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml"]
    assert accepted([*GRPO, *tools]).settings[f"{ROLLOUT}.multi_turn.tool_rewards"] is False
    assert f"{ROLLOUT}.multi_turn.tool_rewards" not in accepted(list(GRPO)).settings
