"""Command lines of verl users: what works as it is, and what is refused with the way to write it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dotted import nest

from quadriga.config import Config, compose, load_config, screen_overrides
from quadriga.config.foreign_keys import carry_over, foreign_table, kind_of
from quadriga.config.supervised_schema import SFTConfig
from quadriga.config.typed import Problems, all_keys, is_free_form, is_known
from quadriga.errors import ConfigError

Problem = Callable[[dict[str, Any]], str]
A = "actor_rollout_ref"

GRPO_GSM8K = f"""
algorithm.adv_estimator=grpo
data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error'
{A}.model.path=Qwen/Qwen2.5-3B-Instruct {A}.model.use_remove_padding=True
{A}.model.enable_gradient_checkpointing=True
{A}.actor.optim.lr=1e-6 {A}.actor.ppo_mini_batch_size=256 {A}.actor.ppo_micro_batch_size_per_gpu=40
{A}.actor.use_kl_loss=True {A}.actor.kl_loss_coef=0.001 {A}.actor.kl_loss_type=low_var_kl
{A}.actor.entropy_coeff=0 {A}.actor.fsdp_config.param_offload=False {A}.actor.fsdp_config.optimizer_offload=False
{A}.rollout.log_prob_micro_batch_size_per_gpu=40 {A}.rollout.tensor_model_parallel_size=1
{A}.rollout.gpu_memory_utilization=0.6 {A}.rollout.n=5
{A}.ref.log_prob_micro_batch_size_per_gpu=40 {A}.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"]
trainer.project_name=gsm8k trainer.experiment_name=qwen trainer.n_gpus_per_node=8 trainer.nnodes=1
trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""

PPO_WITH_CRITIC = f"""
algorithm.adv_estimator=gae data.train_files=[/data/a.parquet,/data/b.parquet] data.val_files=/data/t.parquet
data.train_batch_size=512 data.return_raw_chat=True data.seed=42
{A}.model.path=/models/llm {A}.model.use_remove_padding=True {A}.actor.strategy=fsdp2
{A}.actor.optim.lr=1e-6 {A}.actor.optim.lr_warmup_steps_ratio=0.285 {A}.actor.ppo_mini_batch_size=128
{A}.actor.use_dynamic_bsz=True {A}.actor.ppo_max_token_len_per_gpu=24000 {A}.actor.ulysses_sequence_parallel_size=1
{A}.rollout.log_prob_use_dynamic_bsz=True {A}.rollout.log_prob_max_token_len_per_gpu=24000
{A}.rollout.mode=async {A}.rollout.enable_chunked_prefill=True {A}.rollout.free_cache_engine=True
{A}.rollout.calculate_log_probs=True {A}.rollout.max_num_batched_tokens=10000 {A}.hybrid_engine=True
critic.optim.lr=1e-5 critic.model.path=/models/llm critic.model.use_remove_padding=True critic.strategy=fsdp2
critic.optim.lr_warmup_steps_ratio=0.05 critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=98304
critic.model.enable_gradient_checkpointing=True critic.model.fsdp_config.param_offload=False
critic.model.fsdp_config.optimizer_offload=False
algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 algorithm.gamma=1.0
trainer.use_legacy_worker_impl=auto trainer.critic_warmup=0 trainer.n_gpus_per_node=8 trainer.nnodes=2
trainer.val_before_train=False trainer.device=cuda trainer.resume_mode=auto trainer.balance_batch=True
ray_kwargs.ray_init.num_cpus=96
"""

DAPO = f"""
algorithm.adv_estimator=grpo {A}.rollout.n=16 data.train_batch_size=512 {A}.actor.ppo_mini_batch_size=32
data.max_prompt_length=2048 data.max_response_length=8192 data.truncation=left data.prompt_key=prompt
{A}.actor.clip_ratio_low=0.2 {A}.actor.clip_ratio_high=0.28 {A}.actor.clip_ratio_c=10.0
algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 {A}.actor.use_kl_loss=False {A}.actor.kl_loss_coef=0.0
algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=10
{A}.actor.use_dynamic_bsz=True {A}.ref.log_prob_use_dynamic_bsz=True {A}.rollout.log_prob_use_dynamic_bsz=True
{A}.actor.ppo_max_token_len_per_gpu=10240 {A}.ref.log_prob_max_token_len_per_gpu=10240
{A}.actor.loss_agg_mode=token-mean {A}.actor.grad_clip=1.0 {A}.actor.optim.weight_decay=0.1
{A}.actor.optim.lr_warmup_steps=10 {A}.rollout.temperature=1.0 {A}.rollout.top_p=1.0 {A}.rollout.top_k=-1
{A}.rollout.val_kwargs.temperature=1.0 {A}.rollout.val_kwargs.top_p=0.7 {A}.rollout.val_kwargs.do_sample=True
{A}.rollout.val_kwargs.n=1 {A}.rollout.data_parallel_size=1 {A}.rollout.enable_prefix_caching=True
{A}.actor.fsdp_config.fsdp_size=-1 {A}.actor.entropy_from_logits_with_chunking=True
{A}.actor.checkpoint.save_contents=['model','optimizer','extra','hf_model']
reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward_model.reward_kwargs.max_resp_len=8192
trainer.n_gpus_per_node=8 trainer.nnodes=4 trainer.max_actor_ckpt_to_keep=2 trainer.log_val_generations=10
trainer.default_local_dir=/ckpts/dapo trainer.total_training_steps=200
"""

LORA_REWARD_MODEL = f"""
algorithm.adv_estimator=rloo {A}.rollout.n=4 {A}.model.lora_rank=32 {A}.model.lora_alpha=32
{A}.model.target_modules=all-linear {A}.rollout.load_format=safetensors {A}.rollout.layered_summon=True
{A}.actor.use_kl_loss=True {A}.actor.ppo_epochs=2 {A}.actor.clip_ratio=0.1 {A}.nccl_timeout=1200
{A}.rollout.multi_turn.enable=False {A}.model.use_shm=False {A}.model.use_fused_kernels=False
reward_model.enable=True reward_model.model.path=/models/rm reward_model.micro_batch_size_per_gpu=8
reward_model.strategy=fsdp reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=2 reward_model.nnodes=1
custom_reward_function.path=/code/reward.py custom_reward_function.name=score
+data.apply_chat_template_kwargs.enable_thinking=False +{A}.model.override_config.attention_dropout=0.0
global_profiler.tool=null trainer.rollout_data_dir=/dumps ray_kwargs.timeline_json_file=/tmp/ray.json
"""

SEED_000 = f"""
trainer.n_gpus_per_node=8 trainer.nnodes=1 {A}.model.path=Qwen/Qwen2.5-0.5B-Instruct
data.train_files=~/data/gsm8k/train.parquet data.val_files=~/data/gsm8k/test.parquet
"""


@pytest.mark.parametrize("line", [GRPO_GSM8K, PPO_WITH_CRITIC, DAPO, LORA_REWARD_MODEL, SEED_000])
def test_command_line_carries_over(line: str) -> None:
    config = load_config(compose(line.split()))
    for setting in line.split():
        path, _, text = setting.lstrip("+").partition("=")
        if path in all_keys(Config) and text in ("True", "False", "0.28", "1024", "dapo"):
            node: Any = config
            for part in path.split("."):
                node = getattr(node, part)
            assert str(node) == text, setting


def test_free_form_keys_of_the_command_line_arrive() -> None:
    config = load_config(compose(DAPO.split()))
    assert config.reward_model.reward_kwargs == {
        "overlong_buffer_cfg": {"enable": True, "len": 4096, "penalty_factor": 1.0},
        "max_resp_len": 8192,
    }
    assert load_config(compose(["ray_kwargs.ray_init.num_cpus=4"])).ray_kwargs.ray_init == {"num_cpus": 4}


@pytest.mark.parametrize(
    ("path", "value", "what", "fix"),
    [
        (f"{A}.rollout.name", "sglang", "must be one of native, vllm", "the training module itself"),
        (f"{A}.rollout.pipeline_model_parallel_size", 2, "by tensor_model_parallel_size alone", "set it to 1"),
        (f"{A}.actor.strategy", "megatron", "trains with FSDP2", "fsdp2"),
        (f"{A}.actor.megatron.tensor_model_parallel_size", 2, f"{A}.actor.megatron.*: ", "remove the section"),
        (f"{A}.actor.ppo_micro_batch_size", 64, "counted per GPU", f"{A}.actor.ppo_micro_batch_size_per_gpu="),
        (
            f"{A}.actor.fsdp_config.ulysses_sequence_parallel_size",
            2,
            "another name here",
            f"write {A}.actor.ulysses_sequence_parallel_size=2",
        ),
        (f"{A}.model.use_remove_padding", False, "always packed", "remove it"),
        (f"{A}.model.use_shm", True, "where they lie", "remove it"),
        (f"{A}.rollout.calculate_log_probs", False, "always recorded", "remove it"),
        (f"{A}.rollout.multi_turn.interaction_config_path", "i.yaml", "is an environment here", "reset and step"),
        (f"{A}.actor.optim.clip_grad", 0.5, "another name here", f"write {A}.actor.grad_clip=0.5"),
        (f"{A}.actor.optim.warmup_style", "cosine", "another name", f"{A}.actor.optim.lr_scheduler_type=cosine"),
        ("critic.model.fsdp_config.param_offload", True, "another name", "write critic.fsdp_config.param_offload=True"),
        ("critic.model.fsdp_config.fsdp_size", 2, "another name", "write critic.fsdp_config.fsdp_size=2"),
        ("critic.fsdp.optimizer_offload", True, "another name", "write critic.fsdp_config.optimizer_offload=True"),
        ("reward.custom_reward_function.path", "r.py", "another name", "write custom_reward_function.path=r.py"),
        ("reward.reward_manager.name", "dapo", "another name", "write reward_model.reward_manager=dapo"),
        ("reward.reward_model.enable", True, "another name", "write reward_model.enable=True"),
        ("reward.reward_model.model_path", "m", "another name", "write reward_model.model.path=m"),
        ("reward_model.overlong_buffer.len", 9, "another name", "reward_model.reward_kwargs.overlong_buffer_cfg.len=9"),
        ("data.filter_overlong_prompts_workers", 8, "tokenizer's threads", "remove it"),
        ("data.gen_batch_size", 96, "data.train_batch_size prompts", "max_num_gen_batches"),
        ("trainer.max_critic_ckpt_to_keep", 2, "another name", "write trainer.max_actor_ckpt_to_keep=2"),
        ("trainer.use_legacy_worker_impl", "enable", "one implementation", "remove it"),
        ("trainer.default_hdfs_dir", "hdfs://x", "file system", "trainer.default_local_dir"),
        ("ray_init.timeline_json_file", "t.json", "another name", "write ray_kwargs.timeline_json_file=t.json"),
        (f"{A}.actor.checkpoint.save_contents", ["model"], "always holds", "remove it"),
        ("trainer.logger", ["console", "file"], "must be one of", "always written"),
    ],
)
def test_foreign_key_is_refused_with_reason_and_way_out(
    problem: Problem, path: str, value: Any, what: str, fix: str
) -> None:
    message = problem({path: value})
    said, _, way_out = message.partition("\n  fix: ")
    assert what in said
    assert fix in way_out
    if not path.startswith(("algorithm.adv", "trainer.logger", f"{A}.rollout.name")):
        with pytest.raises(ConfigError) as caught:
            screen_overrides([f"{path}={value}"])
        assert str(caught.value) == message, "the command line says the same"


def test_a_refused_section_is_one_problem(problem: Problem) -> None:
    keys = {f"{A}.actor.megatron.{name}": 2 for name in ("tp", "pp", "ep", "cp")}
    assert "problems" not in problem(keys)
    assert "2 problems" in problem({**keys, f"{A}.ref.megatron.tp": 2})


def test_null_means_not_set(problem: Problem) -> None:
    assert (
        problem({f"{A}.actor.ppo_micro_batch_size": None, "global_profiler.steps": None, "data.tool_config_path": None})
        == ""
    )


def test_misspelt_keys_are_not_taken_for_foreign_ones(problem: Problem) -> None:
    for path in (f"{A}.actor.policy_loss.los_mode", "algorithm.rollout_correction.rollout_iss", "reward.max_retry"):
        assert problem({path: 1}).startswith(f"unknown key {path}")


@pytest.mark.parametrize(("kind", "schema"), [("rl", Config), ("sft", SFTConfig)])
def test_table_is_about_keys_that_the_schema_lacks(kind: Any, schema: type) -> None:
    shared_with_other_schemas = {"model.lora_rank"}  # a reward model has none
    hidden = {row.key for row in foreign_table(kind).keys} & set(all_keys(schema))
    assert hidden <= shared_with_other_schemas


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_every_row_has_a_reason_or_accepts_everything(kind: Any) -> None:
    for row in foreign_table(kind).keys:
        if row.to is None and row.same != "any":
            assert row.why, row
            assert row.instead, row
        if row.same == "any":
            assert row.note, row
    for value in foreign_table(kind).values:
        assert value.fix, value


@pytest.mark.parametrize(("kind", "schema"), [("rl", Config), ("sft", SFTConfig)])
def test_renamed_keys_lead_to_keys_that_exist(kind: Any, schema: type) -> None:
    for row in foreign_table(kind).keys:
        if row.to is not None and row.to.endswith("*"):
            section = row.to.removesuffix(".*")
            assert is_known(schema, section) or is_free_form(schema, section)
        elif row.to is not None:
            assert is_known(schema, row.to) or is_free_form(schema, row.to), row
    assert {row.key for row in foreign_table(kind).values} <= set(all_keys(schema))
    assert set(foreign_table(kind).defaults) <= set(all_keys(schema))


def test_what_is_done_anyway_and_an_idle_reference_are_no_contradictions(problem: Problem) -> None:
    wishes = ("entropy_checkpointing", "use_prefix_grouper", "entropy_from_logits_with_chunking", "use_fused_kernels")
    assert problem({f"{A}.actor.{name}": True for name in wishes}) == ""
    assert problem({f"{A}.ref.fsdp_config.param_offload": True}) == ""
    assert problem({f"{A}.ref.fsdp_config.param_offload": True, f"{A}.model.lora_rank": 8}) == ""


@pytest.mark.parametrize(
    ("schema", "key", "value", "words"),
    [
        (Config, f"{A}.rollout.nnodes", 1, "trainer.placement"),
        (Config, f"{A}.rollout.n_gpus_per_node", 2, "trainer.placement"),
        (Config, "trainer.profile_steps", [2], "write global_profiler.steps"),
        (Config, f"{A}.actor.optim.optimizer_impl", "torchao.optim", "optim.name"),
        (Config, f"{A}.actor.optim.override_optimizer_config.block_size", 64, "optim.name"),
        (SFTConfig, "optim.optimizer", "Muon", "optim.name"),
        (SFTConfig, "optim.optimizer_impl", "torchao.optim", "optim.name"),
        (SFTConfig, "optim.override_optimizer_config.block_size", 64, "optim.name"),
        (Config, f"{A}.model.use_liger", True, ""),
        (SFTConfig, "model.use_liger", True, ""),
        (Config, f"{A}.actor.checkpoint.async_save", True, ""),
    ],
)
def test_what_is_said_of_a_key_is_true_of_quadriga_as_it_is(schema: type, key: str, value: Any, words: str) -> None:
    """Optimisers, placement, fused layers and checkpoints beside the training are all there."""
    problems = Problems()
    assert carry_over(key, value, problems, schema, kind_of(schema))
    assert all(words in f"{what} {fix}" for what, fix in problems.found)
    assert bool(problems.found) == bool(words)


def test_groups_of_verls_configuration_files_are_set_aside() -> None:
    """`model=hf_model` picks one of its files; here that is a section."""
    rest = ["data.train_files=rows.jsonl", "model.path=a/b"]
    assert screen_overrides(["model=hf_model", "engine=fsdp", "optim=fsdp", *rest], SFTConfig) == rest
    with pytest.raises(
        ConfigError, match=r"(?s)model=other: a model is named by model.path.*trainer must be a section"
    ):
        screen_overrides(["model=other", "trainer=x", *rest], SFTConfig)


def test_default_of_a_renamed_key_is_accepted_under_its_old_name() -> None:
    problems = Problems()
    assert carry_over("critic.optim.clip_grad", 1.0, problems)
    assert problems.found == []


def test_accepted_values_leave_no_trace() -> None:
    assert load_config(nest({f"{A}.rollout.mode": "async", "data.return_raw_chat": True})) == load_config({})
    assert screen_overrides([f"{A}.rollout.mode=async", "trainer.nnodes=2"]) == ["trainer.nnodes=2"]
