"""verl's command lines under --from-verl: taken over, translated, set aside or refused, each for a reason."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from verl_keys import all_verl_defaults, all_verl_sft_defaults

from quadriga.cli import run
from quadriga.compat.translation import Translation, Verdict, as_argument, translate
from quadriga.config import load_config
from quadriga.config.plan import make_plan
from quadriga.config.supervised_schema import SFTConfig
from quadriga.errors import ConfigError

A = "actor_rollout_ref"
ACTOR, ROLLOUT, REF = f"{A}.actor", f"{A}.rollout", f"{A}.ref"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8", "trainer.n_gpus_per_node=8")
NEEDS = ("tool_config_path", "interaction_config_path")
"""Keys for which a recorded command line may be refused: tools."""


def row(translation: Translation, key: str) -> tuple[str, str]:
    found = translation.rows[key]
    return found.verdict.value, found.note


def test_recorded_command_lines_plan_unless_they_need_what_is_not_there(commands: list[dict[str, Any]]) -> None:
    in_scope = [command for command in commands if command["in_scope"]]
    refused = {}
    for command in in_scope:
        translation = translate(command["overrides"])
        if translation.refusals:
            refused[command["script"]] = [key for key, row in translation.rows.items() if row in translation.refusals]
        else:
            make_plan(load_config(translation.nested()))
    unexplained = {script: keys for script, keys in refused.items() if not all(key.endswith(NEEDS) for key in keys)}
    assert unexplained == {}
    assert len(refused) <= len(in_scope) / 20, refused


@pytest.mark.slow
def test_every_refusal_of_a_recorded_command_line_has_a_reason_and_a_way_out(commands: list[dict[str, Any]]) -> None:
    for command in commands:
        for refused in translate(command["overrides"]).refusals:
            assert "neither Quadriga nor" not in refused.note, (command["script"], refused.key)
            assert refused.note, refused
            assert refused.instead, refused


@pytest.mark.parametrize(("kind", "defaults"), [("rl", all_verl_defaults()), ("sft", all_verl_sft_defaults())])
def test_every_key_of_verl_is_known_and_its_default_refused_nowhere(kind: Any, defaults: dict[str, Any]) -> None:
    translation = translate([f"{key}={as_argument(value)}" for key, value in defaults.items()], kind)
    assert translation.refusals == []
    assert set(translation.rows) >= set(defaults)
    assert len(defaults) > 100


SCRIPT = f"""algorithm.adv_estimator=grpo data.train_files=t.parquet data.val_files=v.parquet data.train_batch_size=256
data.max_prompt_length=1024 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
{A}.model.path=Qwen/Qwen2.5-7B-Instruct {A}.model.use_remove_padding=True {ACTOR}.optim.lr=1e-6
{ACTOR}.ppo_mini_batch_size=64 {ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=20480 {ROLLOUT}.name=vllm
{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.gpu_memory_utilization=0.6 {ROLLOUT}.n=8 trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.logger=['console','wandb'] trainer.critic_warmup=0 trainer.save_freq=20 trainer.total_epochs=15"""
"""What nearly every script of verl's says."""
LATE = f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio_c=10.0 {ACTOR}.loss_agg_mode=token-mean"
GROUPS = "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=10"
APART = "actor_rollout_ref.hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=2 data.train_batch_size=0 data.gen_batch_size=1"
OWN = {
    "ppo with pf-ppo": "algorithm.adv_estimator=gae algorithm.use_pf_ppo=True algorithm.pf_ppo.weight_pow=2.0 critic.model.path=c",
    "ppo with sequence parallelism": f"""algorithm.adv_estimator=gae {ACTOR}.ulysses_sequence_parallel_size=2
        critic.ulysses_sequence_parallel_size=2 critic.optim.lr=1e-5 critic.model.path=c critic.ppo_micro_batch_size_per_gpu=64""",
    "ppo of the smoke test": f"""algorithm.adv_estimator=gae {A}.model.lora_rank=0 {A}.model.lora_alpha=0
        {A}.model.exclude_modules=DONT_EXCLUDE {ACTOR}.strategy=fsdp2 critic.fsdp.param_offload=True model_engine=dp
        {ACTOR}.checkpoint.save_contents=['model','hf_model'] reward.custom_reward_function.path=null critic.model.path=c
        reward.custom_reward_function.name=null trainer.test_freq=False trainer.device=cuda""",
    "adaptive kl in the reward": """algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_penalty=low_var_kl
        algorithm.kl_ctrl.horizon=10000 algorithm.kl_ctrl.target_kl=0.1""",
    "reinforce++": f"algorithm.adv_estimator=reinforce_plus_plus {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=mse",
    "remax": "algorithm.adv_estimator=remax algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl",
    "rloo": "algorithm.adv_estimator=rloo_vectorized",
    "pass@k": "algorithm.adv_estimator=grpo_passk",
    "optimal token baseline": f"algorithm.adv_estimator=optimal_token_baseline {ACTOR}.calculate_sum_pi_squared=True",
    "gdpo": """algorithm.adv_estimator=gdpo +algorithm.gdpo_reward_keys='["accuracy_reward","format_reward"]'
        reward.custom_reward_function.path=f.py reward.reward_manager.name=gdpo""",
    "gspo": f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=0.0003 {ACTOR}.entropy_checkpointing=True",
    "sapo": f"{ACTOR}.policy_loss.loss_mode=sapo +{ACTOR}.policy_loss.tau_pos=1.0 +{ACTOR}.policy_loss.tau_neg=1.05 {LATE}",
    "clip-cov": f"{ACTOR}.policy_loss.loss_mode=clip_cov {ACTOR}.clip_ratio_low=1 {GROUPS} data.gen_batch_size=768",
    "kl-cov": f"{ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.policy_loss.ppo_kl_coef=1 {LATE} {GROUPS}",
    "dppo": f"{ACTOR}.policy_loss.loss_mode=dppo_tv {ACTOR}.clip_ratio=0.15 {ACTOR}.clip_ratio_c=20.0",
    "dr. grpo": f"""algorithm.norm_adv_by_std_in_grpo=False {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm
        {ACTOR}.loss_scale_factor=1024""",
    "dapo of 2025": f"""{LATE} {GROUPS} reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True
        reward_model.overlong_buffer.len=512 reward_model.overlong_buffer.penalty_factor=1.0 {ROLLOUT}.val_kwargs.n=1
        {ROLLOUT}.val_kwargs.temperature=1.0 {ROLLOUT}.val_kwargs.top_p=0.7 {ROLLOUT}.val_kwargs.do_sample=True
        +reward_model.reward_kwargs.max_resp_len=1024 {ROLLOUT}.mode=sync""",
    "several rejections": """algorithm.rollout_correction.rollout_rs="'token_k1,seq_max_k2'" hydra.run.dir=out
        algorithm.rollout_correction.rollout_rs_threshold="'0.6_1.6,2.5'" algorithm.rollout_correction.bypass_mode=true""",
    "tools": f"""{ROLLOUT}.name=sglang_async {ROLLOUT}.multi_turn.enable=True {ROLLOUT}.multi_turn.max_user_turns=16
        {ROLLOUT}.multi_turn.max_assistant_turns=16 {ROLLOUT}.multi_turn.tool_config_path=t.yaml {ROLLOUT}.trace.backend=mlflow
        {ROLLOUT}.multi_turn.format=hermes data.custom_cls.path=d.py data.custom_cls.name=D data.return_raw_chat=True
        {ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.agent.num_workers=8 {ROLLOUT}.max_model_len=15000""",
    "a service that scores": """reward_model.reward_manager=rate_limited +reward_model.max_concurrent=8 +reward_model.max_rpm=500
        custom_reward_function.path=f.py +reward_model.timeout=300 +custom_reward_function.reward_kwargs.alpha=0.5""",
    "rewards by the batch": "reward_model.reward_manager=batch custom_reward_function.path=f.py custom_reward_function.name=b",
    "one step off": f"{APART} data.train_batch_size=64 {ROLLOUT}.checkpoint_engine.backend=nccl {ACTOR}.fsdp_config.strategy=fsdp2",
    "fully asynchronous": f"""{APART} rollout.total_rollout_steps=51200 async_training.staleness_threshold=0.5
        async_training.trigger_parameter_sync_step=4 async_training.require_batches=4 async_training.partial_rollout=True
        algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=seq_mean_k1
        algorithm.rollout_correction.rollout_rs_threshold=0.99_1.001 rollout.test_freq=20""",
    "apart": f"""trainer.use_v1=True trainer.v1.trainer_mode=separate_async {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=4
        transfer_queue.enable=True trainer.v1.separate_async.hybrid_rollout.enable_switch=True data.gen_batch_size=1""",
    "lora from an adapter": f"{A}.model.lora_adapter_path=a {A}.model.use_shm=True {ROLLOUT}.load_format=safetensors",
    "profiles": f"""global_profiler.tool=torch global_profiler.steps=[2,4] {ACTOR}.profiler.enable=True
        {ACTOR}.profiler.all_ranks=True {ACTOR}.profiler.tool_config.torch.contents=[cpu,cuda]""",
    "a teacher's top k": """distillation.enabled=True distillation.nnodes=1 distillation.n_gpus_per_node=4
        distillation.teacher_models.teacher_model.model_path=T distillation.distillation_loss.loss_mode=forward_kl_topk
        distillation.distillation_loss.use_task_rewards=False distillation.distillation_loss.log_prob_min_clamp=-10.0""",
    "validation alone": f"trainer.val_only=True {ROLLOUT}.val_kwargs.n=16 {ROLLOUT}.val_kwargs.temperature=0.6",
}
"""What scripts that are not among the recorded ones say besides, by what they are about."""


@pytest.mark.parametrize("about", OWN)
def test_what_other_scripts_of_verls_say_can_be_planned(about: str) -> None:
    translation = translate(shlex.split(f"{SCRIPT} {OWN[about]}"))
    assert [(row.key, row.note) for row in translation.refusals] == []
    make_plan(load_config(translation.nested()))


def test_global_micro_batches_are_divided_by_the_gpus_that_do_not_share_a_sequence() -> None:
    command = [
        *GRPO,
        f"{ACTOR}.ppo_micro_batch_size=64",
        f"{REF}.log_prob_micro_batch_size=128",
        f"{ACTOR}.use_kl_loss=True",
    ]
    settings = translate([*command, f"{ACTOR}.ulysses_sequence_parallel_size=2"]).settings
    assert settings[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == 64 // (8 // 2)
    assert settings[f"{REF}.log_prob_micro_batch_size_per_gpu"] == 128 // (8 // 2)
    assert translate(command).settings[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == 8


def test_token_budgets_hold_one_sequence_over_the_gpus_that_share_it() -> None:
    long = ["data.max_prompt_length=1000", "data.max_response_length=9000", f"{ACTOR}.use_dynamic_bsz=True"]
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    assert translate([*GRPO, *long, f"{key}=2000", f"{ACTOR}.ulysses_sequence_parallel_size=4"]).settings[key] == 2500
    assert translate([*GRPO, *long, f"{key}=3000", f"{ACTOR}.ulysses_sequence_parallel_size=4"]).settings[key] == 3000
    assert translate([*GRPO, *long, f"{key}=2000"]).settings[key] == 10000


def test_layout_and_engine_options_are_set_aside_with_a_word() -> None:
    translation = translate(
        [
            *GRPO,
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.tensor_model_parallel_size=4",
            f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
            f"{A}.model.use_remove_padding=False",
            f"{ACTOR}.fsdp_config.model_dtype=bf16",
        ]
    )
    assert translation.refusals == []
    assert translation.settings[f"{ROLLOUT}.name"] == "native"
    assert row(translation, f"{ROLLOUT}.tensor_model_parallel_size")[0] == "set aside"
    assert "layout" in row(translation, f"{ROLLOUT}.tensor_model_parallel_size")[1]
    assert "always packed" in row(translation, f"{A}.model.use_remove_padding")[1]
    assert "float32" in row(translation, f"{ACTOR}.fsdp_config.model_dtype")[1]


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (f"{ACTOR}.strategy=megatron", "FSDP2"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8", "changes the weights"),
        (f"+{ROLLOUT}.engine_kwargs.sglang.top_k=3", "changes what is sampled"),
        (f"{ROLLOUT}.max_model_len=600", "would be cut"),
        (f"{ACTOR}.optim.optimizer=Muon", "AdamW"),
        ("critic.model.external_lib=my_code", "imported by every worker"),
        ("data.gen_batch_size=96", "trains on that many prompts"),
        (f"{ACTOR}.optim.num_cycles=2", "falls once"),
        ("trainer.totl_epochs=3", "neither Quadriga nor"),
    ],
)
def test_what_would_change_the_result_is_refused(argument: str, why: str) -> None:
    translation = translate([*GRPO, argument])
    assert [why in refused.note for refused in translation.refusals] == [True]
    with pytest.raises(ConfigError, match="fix: "):
        translation.raise_if_refused()


def test_what_hangs_on_a_switch_that_is_off_is_set_aside() -> None:
    translation = translate(
        [
            "algorithm.adv_estimator=gae",
            f"{REF}.fsdp_config.param_offload=True",
            f"{REF}.log_prob_micro_batch_size_per_gpu=16",
            f"{ACTOR}.kl_loss_type=mse",
            f"{A}.model.lora_rank=0",
            f"{A}.model.lora_alpha=0",
            "reward_model.nnodes=0",
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        ]
    )
    assert translation.refusals == []
    for key in (f"{REF}.log_prob_micro_batch_size_per_gpu", f"{A}.model.lora_alpha", "reward_model.nnodes"):
        assert row(translation, key)[0] == "set aside"
    assert row(translation, f"{ACTOR}.ppo_micro_batch_size_per_gpu") == (
        "set aside",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
    )


def test_what_only_a_device_reads_is_set_aside_where_the_run_has_none() -> None:
    keys = {f"{ACTOR}.fsdp_config.param_offload": True, f"{ROLLOUT}.gpu_memory_utilization": 0.6}
    command = [*GRPO, *(f"{key}={value}" for key, value in keys.items())]
    for device in (None, "cuda"):
        assert keys.items() <= translate(command, device=device).settings.items()
    here = translate(command, device="cpu")
    assert [row(here, key)[0] for key in keys] == ["set aside"] * 2
    assert "trainer.device=cpu" in row(here, f"{ACTOR}.fsdp_config.param_offload")[1]
    assert load_config(here.nested()).trainer.device == "cpu"
    chosen = translate([*command, "trainer.device=cuda"], device="cpu").settings
    assert chosen["trainer.device"] == "cuda"
    assert keys.items() <= chosen.items()


def test_old_and_new_spellings_of_rewards_mean_the_same() -> None:
    old = translate(
        [
            *GRPO,
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.max_resp_len=512",
            "custom_reward_function.path=r.py",
            "reward_model.num_workers=4",
        ]
    )
    new = translate(
        [
            *GRPO,
            "reward.reward_manager.name=dapo",
            "+reward.reward_kwargs.max_resp_len=512",
            "reward.custom_reward_function.path=r.py",
            "reward.num_workers=4",
        ]
    )
    assert old.settings == new.settings
    assert not old.refusals


def test_own_reward_manager_of_either_spelling_becomes_module_and_class() -> None:
    new = [
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.module.path=pkg://my.managers",
        "reward.reward_manager.name=Mine",
    ]
    old = [
        "reward_model.reward_loop_source=importlib",
        "reward_model.reward_loop_module_path=managers.py",
        "reward_model.reward_loop_class_name=Mine",
    ]
    january = [argument.removeprefix("reward.") for argument in new]
    assert translate([*GRPO, *new]).settings["reward_model.reward_manager"] == "my.managers:Mine"
    assert translate([*GRPO, *january]).settings["reward_model.reward_manager"] == "my.managers:Mine"
    assert translate([*GRPO, "reward_manager.name=dapo"]).settings["reward_model.reward_manager"] == "dapo"
    assert translate([*GRPO, *old]).settings["reward_model.reward_manager"] == "managers.py:Mine"


def test_classifier_options_are_set_aside_but_a_judge_is_refused() -> None:
    model = ["reward_model.enable=True", "reward_model.model.path=rm", "reward_model.rollout.name=vllm"]
    assert row(translate([*GRPO, *model]), "reward_model.rollout.name")[0] == "set aside"
    judge = translate([*GRPO, *model, "custom_reward_function.path=judge.py"])
    assert row(judge, "reward_model.rollout.name")[0] == "refused"


def test_keys_that_changed_their_meaning_say_which_version_is_assumed() -> None:
    both = translate([*GRPO, f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip=1.0"])
    assert both.settings[f"{ACTOR}.grad_clip"] == 1.0
    assert "August 2026 reads optim.clip_grad" in row(both, f"{ACTOR}.optim.clip_grad")[1]
    alone = translate([*GRPO, f"{ACTOR}.optim.clip_grad=0.5"])
    assert alone.settings[f"{ACTOR}.grad_clip"] == 0.5
    assert "January 2026" in row(alone, f"{ACTOR}.optim.clip_grad")[1]
    clip = translate([*GRPO, f"{ACTOR}.clip_ratio=0.1"])
    assert "stay 0.2" in row(clip, f"{ACTOR}.clip_ratio")[1]


def test_a_lone_response_keeps_verls_raw_score() -> None:
    import torch

    from quadriga.algorithms import compute_advantage

    settings = translate(["algorithm.adv_estimator=rloo", "trainer.n_gpus_per_node=1"]).settings
    rewards, mask = torch.tensor([[0.0, 2.0], [3.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    advantages, _ = compute_advantage(
        settings["algorithm.adv_estimator"], token_level_rewards=rewards, response_mask=mask, group_ids=["a", "b"]
    )
    assert advantages.tolist() == [[2.0, 2.0], [3.0, 0.0]]


def test_defaults_of_verl_that_decide_the_result_hold() -> None:
    settings = translate(list(GRPO)).settings
    assert settings["data.train_batch_size"] == 1024
    assert settings[f"{ACTOR}.ppo_mini_batch_size"] == 256
    assert (
        translate([*GRPO, "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64"]).settings[
            "data.train_batch_size"
        ]
        == 64
    )


def test_signs_of_hydra_and_empty_shell_variables_are_read() -> None:
    translation = translate(
        [
            *GRPO,
            f"{ACTOR}.use_kl_loss=",
            "++trainer.total_epochs=3",
            "trainer.logger=console",
            "trainer.save_freq=5",
            "~trainer.save_freq",
        ]
    )
    assert translation.settings[f"{ACTOR}.use_kl_loss"] is False
    assert translation.settings["trainer.total_epochs"] == 3
    assert "trainer.save_freq" not in translation.settings
    with pytest.raises(ConfigError, match="cannot read the argument"):
        translate(["a b c"])
    with pytest.raises(ConfigError, match="unknown flag"):
        translate(["--nonsense"])


def test_true_and_false_are_numbers_where_a_number_is_wanted() -> None:
    assert translate([*GRPO, "trainer.test_freq=False"]).settings["trainer.test_freq"] == 0
    assert translate([*GRPO, "trainer.save_freq=True"]).settings["trainer.save_freq"] == 1


def test_an_adapter_that_lies_elsewhere_can_be_planned() -> None:
    translation = translate([*GRPO, f"{A}.model.lora_adapter_path=/elsewhere/adapter", f"{A}.model.lora_rank=8"])
    assert translation.refusals == []
    plan = make_plan(load_config(translation.nested()))
    assert any("no folder /elsewhere/adapter here" in warning for warning in plan.warnings())


def test_sinks_that_are_not_there_leave_the_list() -> None:
    translation = translate([*GRPO, 'trainer.logger=["console","tensorboard","file","swanlab"]'])
    assert translation.settings["trainer.logger"] == ["console", "tensorboard"]
    assert translate([*GRPO, "trainer.logger=file"]).rows["trainer.logger"].verdict is Verdict.ASIDE


def test_validation_samples_at_the_temperature_that_is_given() -> None:
    key = f"{ROLLOUT}.val_kwargs"
    settings = translate([*GRPO, f"{key}.temperature=1.0", f"{key}.top_p=0.6", f"{key}.n=30"]).settings
    assert (settings[f"{key}.do_sample"], settings[f"{key}.n"], settings[f"{key}.top_p"]) == (True, 30, 0.6)
    assert f"{key}.do_sample" not in translate([*GRPO, f"{key}.temperature=0"]).settings
    assert translate([*GRPO, f"{key}.temperature=1.0", f"{key}.do_sample=False"]).settings[f"{key}.do_sample"] is False


def test_a_sink_whose_package_is_missing_does_not_stop_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    translation = translate([*GRPO, 'trainer.logger=["console","wandb"]'])
    assert translation.settings["trainer.logger"] == ["console"]
    row = translation.rows["trainer.logger"]
    assert row.verdict is Verdict.TRANSLATED
    assert "wandb is not installed" in row.note
    assert "metrics.jsonl" in row.note


def test_a_configuration_file_of_verls_is_read_before_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nhydra: {run: {dir: x}}\n"
        "data: {train_batch_size: 16}\nactor_rollout_ref: {rollout: {name: vllm, n: 4}, actor: {ppo_mini_batch_size: 16}}\n"
    )
    where = [f"--config-path={tmp_path}", "--config-name", "mine"]
    settings = translate([*where, f"{ROLLOUT}.n=2", "algorithm.adv_estimator=grpo"]).settings
    assert (settings["data.train_batch_size"], settings[f"{ROLLOUT}.n"], settings[f"{ROLLOUT}.name"]) == (
        16,
        2,
        "native",
    )
    with pytest.raises(ConfigError, match="there is no file"):
        translate([f"--config-path={tmp_path}", "--config-name=other"])
    assert translate(["--config-path=config", "--config-name=dapo_trainer.yaml", *GRPO]).refusals == []


@pytest.mark.parametrize(("file", "mode"), [("one_step_off", "ordered"), ("fully_async", "free")])
def test_the_name_of_verls_configuration_file_says_which_trainer_is_meant(file: str, mode: str) -> None:
    where = ["--config-path=config", f"--config-name={file}_ppo_trainer.yaml"]
    translation = translate([*where, *GRPO])
    assert translation.refusals == []
    ahead = load_config(translation.nested()).async_training
    assert (ahead.staleness, ahead.mode) == (1, mode)
    refused = translate([*where[:1], f"--config-name={file}_ppo_megatron_trainer", *GRPO]).refusals
    assert [(row.key, row.note) for row in refused] == [(f"{ACTOR}.strategy", "Quadriga trains with FSDP2")]


def test_supervised_trainers_of_both_versions_carry_over() -> None:
    old = translate(
        ["data.train_files=t.parquet", "model.partial_pretrain=m", "data.micro_batch_size=8", "optim.lr=1e-4"], "sft"
    )
    new = translate(
        ["data.train_files=t.parquet", "model.path=m", "engine.strategy=fsdp2", "optim.lr_scheduler_type=cosine"], "sft"
    )
    assert old.refusals == new.refusals == []
    configs = [load_config(t.nested(), SFTConfig) for t in (old, new)]
    assert [c.model.partial_pretrain for c in configs] == ["m", "m"]
    assert configs[0].optim.betas == [0.9, 0.95]
    assert configs[1].optim.betas == [0.9, 0.999]
    assert configs[1].optim.lr == 1e-3, "the newer trainer's default"
    assert configs[1].data.messages_key == "messages"
    warm = ["data.train_files=t.parquet", "model.path=m", "optim.lr_warmup_steps=10", "optim.lr_warmup_steps_ratio=0.1"]
    translation = translate(warm, "sft")
    assert row(translation, "optim.lr_warmup_steps_ratio") == ("set aside", "optim.lr_warmup_steps decides")
    assert load_config(translation.nested(), SFTConfig).optim.lr_warmup_steps == 10


def test_plan_prints_the_table_and_writes_a_clean_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "my.yaml"
    command = [
        *GRPO,
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        "data.train_files='it''s ~/x.parquet'",
        "trainer.experiment_name=named",  # else called after the time, which goes on between the two loads
    ]
    assert run(["plan", "--from-verl", "--write", str(file), *command]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 set aside" in said
    assert "layout only" in said
    assert "responses per prompt" in said
    written = yaml.safe_load(file.read_text())
    assert load_config(written) == load_config(translate(command).nested())
    assert run(["plan", "--config-dir", str(file.parent), "--config-name", "my"]) == 0


def test_a_refused_command_line_exits_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--from-verl", *GRPO, f"{ACTOR}.strategy=megatron"]) == 1
    assert "Quadriga trains with FSDP2" in capsys.readouterr().err
    assert run(["plan", "--write", "my.yaml"]) == 1
    assert run(["eval", "--from-verl"]) == 1
    assert run(["plan", "--from-verl", "--write", "my.txt", *GRPO]) == 1
