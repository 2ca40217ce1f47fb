"""verl's importable names over Quadriga: they resolve, take verl's arguments and give verl's results."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import quadriga.compat.verl

os.environ.pop(quadriga.compat.verl.VARIABLE, None)  # other tests start processes too
SURFACE = {
    "verl": "DataProto __version__",
    "verl.protocol": """DataProto DataProtoItem DataProtoFuture DataProtoConfig pad_dataproto_to_divisor unpad_dataproto
        union_tensor_dict union_numpy_dict list_of_dict_to_dict_of_list fold_batch_dim unfold_batch_dim collate_fn
        all_gather_data_proto""",
    "verl.base_config": "BaseConfig",
    "verl.single_controller.base": "Worker WorkerGroup ResourcePool ClassWithInitArgs",
    "verl.single_controller.base.decorator": """register Dispatch Execute register_dispatch_mode update_dispatch_mode
        make_nd_compute_dataproto_dispatch_fn get_predefined_dispatch_fn get_predefined_execute_fn MAGIC_ATTR
        DISPATCH_MODE_FN_REGISTRY dispatch_one_to_all dispatch_all_to_all collect_all_to_all dispatch_dp_compute
        collect_dp_compute dispatch_dp_compute_data_proto collect_dp_compute_data_proto
        dispatch_dp_compute_data_proto_with_func""",
    "verl.single_controller.ray": "RayClassWithInitArgs RayResourcePool RayWorkerGroup create_colocated_worker_cls",
    "verl.single_controller.ray.base": """create_colocated_worker_raw_cls create_colocated_worker_cls_fused
        SubRayResourcePool merge_resource_pool split_resource_pool ResourcePoolManager""",
    "verl.trainer.main_ppo": """TaskRunner run_ppo main create_rl_dataset create_rl_sampler auto_set_device need_critic
        need_reference_policy get_custom_reward_fn""",
    "verl.trainer.main_ppo_v0": "TaskRunner run_ppo",
    "verl.trainer.constants_ppo": "get_ppo_ray_runtime_env PPO_RAY_RUNTIME_ENV",
    "verl.trainer.ppo.ray_trainer": """RayPPOTrainer ResourcePoolManager Role WorkerType AdvantageEstimator compute_advantage
        apply_kl_penalty compute_response_mask _timer""",
    "verl.trainer.ppo.utils": """Role WorkerType need_critic need_reference_policy need_reward_model need_teacher_policy
        create_rl_dataset create_rl_sampler""",
    "verl.trainer.ppo.core_algos": """AdvantageEstimator register_adv_est get_adv_estimator_fn register_policy_loss
        get_policy_loss_fn ADV_ESTIMATOR_REGISTRY POLICY_LOSS_REGISTRY PolicyLossFn AdaptiveKLController FixedKLController
        get_kl_controller agg_loss kl_penalty kl_penalty_forward
        compute_value_loss compute_entropy_loss compute_policy_loss compute_policy_loss_vanilla compute_policy_loss_gspo
        compute_policy_loss_gpg compute_policy_loss_sapo compute_policy_loss_dppo_tv compute_policy_loss_dppo_kl
        compute_policy_loss_dro compute_policy_loss_cispo compute_policy_loss_geo_mean compute_gae_advantage_return
        compute_grpo_outcome_advantage compute_grpo_passk_outcome_advantage compute_rloo_outcome_advantage
        compute_rloo_vectorized_outcome_advantage compute_grpo_vectorized_outcome_advantage compute_opo_outcome_advantage
        compute_gpg_outcome_advantage compute_reinforce_plus_plus_outcome_advantage compute_remax_outcome_advantage
        compute_reinforce_plus_plus_baseline_outcome_advantage compute_pf_ppo_reweight_data compute_rewards
        compute_optimal_token_baseline_advantage compute_multi_turn_optimal_token_baseline_advantage
        compute_gdpo_outcome_advantage compute_policy_loss_clip_cov compute_policy_loss_kl_cov
        compute_policy_loss_bypass_mode compute_policy_loss_reinforce""",
    "verl.trainer.ppo.metric_utils": """compute_data_metrics compute_timing_metrics compute_throughout_metrics
        compute_variance_proxy_metrics bootstrap_metric calc_maj_val process_validation_metrics reduce_metrics""",
    "verl.trainer.ppo.rollout_corr_helper": """compute_rollout_correction_and_rejection_mask apply_bypass_mode
        compute_rollout_correction_weights compute_rollout_rejection_mask compute_rollout_correction_and_add_to_batch
        compute_offpolicy_metrics compute_rollout_corr_metrics_from_logprobs SUPPORTED_ROLLOUT_RS_OPTIONS
        TOKEN_LEVEL_ROLLOUT_RS_OPTIONS""",
    "verl.trainer.ppo.reward": """load_reward_manager compute_reward compute_reward_async get_custom_reward_fn
        extract_reward""",
    "verl.utils": "hf_tokenizer hf_processor omega_conf_to_dataclass as_torch_index group_mean_std",
    "verl.utils.checkpoint.checkpoint_manager": "find_latest_ckpt_path should_save_ckpt_esi",
    "verl.utils.config": "omega_conf_to_dataclass validate_config",
    "verl.utils.dataset": "RLHFDataset SFTDataset collate_fn",
    "verl.utils.dataset.multiturn_sft_dataset": "MultiTurnSFTDataset",
    "verl.utils.dataset.rl_dataset": "RLHFDataset collate_fn get_dataset_class",
    "verl.utils.debug.metrics": "calculate_debug_metrics pearson_correlation_coefficient calculate_token_list_diff",
    "verl.utils.device": """auto_set_device get_device_name get_device_id get_torch_device get_nccl_backend
        is_cuda_available is_npu_available""",
    "verl.utils.fs": "copy_to_local copy_local_path_from_hdfs",
    "verl.utils.hdfs_io": "makedirs copy exists",
    "verl.utils.import_utils": """load_extern_object load_extern_type import_external_libs is_vllm_available
        is_sglang_available is_megatron_core_available deprecated""",
    "verl.utils.logger": "print_rank_0 LocalLogger",
    "verl.utils.logger.aggregate_logger": "concat_dict_to_str",
    "verl.utils.memory_utils": "aggressive_empty_cache",
    "verl.utils.metric": "reduce_metrics Metric AggregationType",
    "verl.utils.model": "compute_position_id_with_mask create_random_mask print_model_size update_model_config",
    "verl.utils.profiler": """marked_timer simple_timer log_gpu_memory_usage GPUMemoryLogger DistProfiler
        DistProfilerExtension""",
    "verl.utils.py_functional": """append_to_dict union_two_dict convert_to_regular_types NestedNamespace rename_dict
        list_of_dict_to_dict_of_list""",
    "verl.utils.ray_utils": "parallel_put get_event_loop",
    "verl.utils.reward_score": """default_compute_score _default_compute_score gsm8k math_reward math_dapo math_verify geo3k
        prime_math search_r1_like_qa_em""",
    "verl.utils.reward_score.gsm8k": "extract_solution compute_score",
    "verl.utils.reward_score.math_reward": "compute_score is_equiv last_boxed_only_string remove_boxed",
    "verl.utils.reward_score.math_dapo": "compute_score last_boxed_only_string remove_boxed verify",
    "verl.utils.rollout_skip": "RolloutSkip",
    "verl.utils.rollout_trace": "rollout_trace_op rollout_trace_attr",
    "verl.utils.seqlen_balancing": """karmarkar_karp get_seqlen_balanced_partitions rearrange_micro_batches ceildiv
        roundup_divisible get_reverse_idx prepare_dynamic_batch restore_dynamic_batch log_seqlen_unbalance
        calculate_workload""",
    "verl.utils.tokenizer": "hf_tokenizer hf_processor set_pad_token_id",
    "verl.utils.torch_functional": """logprobs_from_logits entropy_from_logits masked_sum masked_mean masked_var
        masked_whiten get_response_mask pad_sequence_to_length pad_2d_list_to_length postprocess_data
        tokenize_and_postprocess_data get_cosine_schedule_with_warmup get_constant_schedule_with_warmup
        get_wsd_schedule_with_warmup distributed_mean_max_min_std distributed_masked_mean
        calculate_sum_pi_squared_from_logits""",
    "verl.utils.tracking": "Tracking ValidationGenerationsLogger",
    "verl.workers.config": """ActorConfig FSDPActorConfig CriticConfig RolloutConfig PolicyLossConfig HFModelConfig
        FSDPOptimizerConfig FSDPEngineConfig AgentLoopConfig MultiTurnConfig DistillationConfig DistillationLossConfig
        CheckpointConfig RewardModelConfig""",
    "verl.workers.config.actor": "ActorConfig PolicyLossConfig",
    "verl.workers.config.optimizer": "FSDPOptimizerConfig",
    "verl.workers.fsdp_workers": "ActorRolloutRefWorker AsyncActorRolloutRefWorker CriticWorker RewardModelWorker",
    "verl.workers.reward_manager": """register get_reward_manager_cls NaiveRewardManager BatchRewardManager
        DAPORewardManager PrimeRewardManager AbstractRewardManager""",
    "verl.trainer.config": "AlgoConfig KLControlConfig RolloutCorrectionConfig",
    "verl.tools.base_tool": "BaseTool",
    "verl.tools.function_tool": "function_tool",
    "verl.tools.gsm8k_tool": "Gsm8kTool",
    "verl.tools.schemas": """OpenAIFunctionToolSchema OpenAIFunctionSchema OpenAIFunctionParametersSchema
        OpenAIFunctionPropertySchema OpenAIFunctionToolCall ToolResponse""",
    "verl.experimental.dataset.sampler": "AbstractSampler AbstractCurriculumSampler",
    "verl.utils.debug": "marked_timer log_gpu_memory_usage GPUMemoryLogger metrics",
    "verl.workers.reward_manager.abstract": "AbstractRewardManager RawRewardFn",
    "verl.experimental.reward.reward_loop": """RewardLoopManagerBase NaiveRewardLoopManager register
        get_reward_loop_manager_cls""",
    "verl.experimental.reward_loop": "migrate_legacy_reward_impl RewardManagerBase",
    "verl.experimental.reward_loop.reward_manager": """RewardManagerBase NaiveRewardManager DAPORewardManager
        RateLimitedRewardManager RemoteRewardManager register get_reward_manager_cls""",
    "verl.experimental.reward_loop.reward_manager.base": "RewardManagerBase",
    "verl.experimental.reward_loop.reward_manager.limited": "RateLimitedRewardManager",
}
"""What reward files, datasets, samplers, tools, mains and recipes of 2025 and 2026 import."""


@pytest.mark.parametrize("module", SURFACE)
def test_names_resolve(module: str) -> None:
    found = __import__(module, fromlist=["x"])
    missing = [name for name in SURFACE[module].split() if not hasattr(found, name)]
    assert missing == []


def test_every_module_of_the_table_can_be_imported_and_lists_its_names() -> None:
    for module, behind in quadriga.compat.verl.MODULES.items():
        found = __import__(module, fromlist=["x"])
        assert isinstance(found, types.ModuleType)
        assert behind is None or found.__all__, module


def test_what_has_no_counterpart_says_so() -> None:
    import verl.trainer.ppo.core_algos as algos

    with pytest.raises(ModuleNotFoundError, match="no counterpart in Quadriga"):
        import verl.workers.megatron_workers  # noqa: F401
    with pytest.raises(ImportError, match="no counterpart"):
        from verl.trainer.ppo.core_algos import compute_something  # noqa: F401
    with pytest.raises(AttributeError, match="no counterpart"):
        _ = algos.compute_something
    assert not hasattr(algos, "compute_something")


def test_the_alias_is_opt_in_and_light() -> None:
    code = "import quadriga, sys\ntry:\n import verl\nexcept ImportError: print('absent')\n"
    code += "import quadriga.compat.verl, verl\nprint(sorted({'torch','ray','transformers'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.split("\n")[:2] == ["absent", "[]"]


# ---- core_algos


def test_estimators_take_verls_arguments() -> None:
    from verl.trainer.ppo.core_algos import (
        AdvantageEstimator,
        compute_gae_advantage_return,
        compute_grpo_outcome_advantage,
        get_adv_estimator_fn,
    )

    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 5.0]])
    mask = torch.ones_like(rewards)
    index = np.array(["a", "a", "b", "b"], dtype=object)
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, index)
    assert advantages[:2, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-4)
    assert advantages[2:].eq(0).all()
    assert torch.equal(advantages, returns)
    raw, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert raw[:2, 0].tolist() == [-1.0, 1.0]
    by_name = get_adv_estimator_fn(AdvantageEstimator.GRPO_VECTORIZED)
    assert torch.equal(by_name(token_level_rewards=rewards, response_mask=mask, index=index)[0], advantages)
    _, gae_returns = compute_gae_advantage_return(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    assert gae_returns[:, 0].tolist() == [1, 3, 5, 5]
    with pytest.raises(ValueError, match="unknown advantage estimator"):
        get_adv_estimator_fn("nothing")


def test_an_estimator_and_a_loss_registered_by_verls_decorators_are_quadrigas_too() -> None:
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_adv_est, register_policy_loss

    from quadriga.algorithms import Aggregation, compute_advantage, compute_policy_loss

    @register_adv_est("halved")
    def halved(token_level_rewards, response_mask, index=None, config=None, **kwargs):
        scores = token_level_rewards.sum(-1, keepdim=True) * response_mask / 2 * config.gamma
        return scores, scores

    @register_policy_loss("plain")
    def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
        loss = agg_loss(-log_prob * advantages, response_mask, loss_agg_mode, **config.global_batch_info)
        return loss, {"actor/low": config.clip_ratio_low}

    rewards, mask = torch.tensor([[1.0, 1.0]]), torch.ones(1, 2)
    advantages, _ = compute_advantage(
        "halved", token_level_rewards=rewards, response_mask=mask, group_ids=["x"], gamma=0.5
    )
    assert advantages.tolist() == [[0.5, 0.5]]
    inputs = {"old_log_prob": rewards, "log_prob": rewards, "advantages": rewards, "response_mask": mask}
    half_of_a_mini_batch = Aggregation("token-mean", num_tokens=4, num_sequences=2)
    loss, metrics = compute_policy_loss("plain", loss_agg=half_of_a_mini_batch, clip_ratio=0.3, **inputs)
    assert (loss.item(), metrics["actor/low"]) == (-0.5, 0.3)
    assert get_policy_loss_fn("plain") is plain


def test_losses_take_verls_config_and_give_plain_metrics() -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss, compute_value_loss, get_policy_loss_fn
    from verl.workers.config import ActorConfig

    old, new = torch.zeros(2, 3), torch.full((2, 3), 0.5, requires_grad=True)
    advantages, mask = torch.ones(2, 3), torch.tensor([[1, 1, 1], [1, 0, 0]])
    config = ActorConfig(strategy="fsdp", rollout_n=1, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.3)
    assert (config.strategy, config.clip_ratio_high, config.get("nothing", 7)) == ("fsdp", 0.3, 7)
    loss, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
    )
    assert loss.item() == pytest.approx(-1.3)
    assert metrics["actor/pg_clipfrac"] == 1.0
    assert all(isinstance(value, float) for value in metrics.values())
    gentle = get_policy_loss_fn("sapo")(old, new, advantages, mask, config=ActorConfig(policy_loss={"tau_pos": 2.0}))[0]
    assert gentle.item() == pytest.approx(-2 / (1 + np.exp(-2 * (np.exp(0.5) - 1))), abs=1e-5)
    older = compute_policy_loss(old, new, advantages, mask, cliprange=0.2, cliprange_high=0.3)
    assert [round(x.item(), 4) for x in older] == [-1.3, 1.0, -0.5, 0.0]
    value, clipped = compute_value_loss(
        vpreds=torch.ones(1, 2),
        returns=torch.zeros(1, 2),
        values=torch.ones(1, 2),
        response_mask=torch.ones(1, 2),
        cliprange_value=0.5,
    )
    assert (value.item(), clipped.item()) == (0.5, 0.0)


def test_agg_loss_knows_verls_modes_and_counts() -> None:
    from verl.trainer.ppo.core_algos import agg_loss

    losses, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    expected = {
        "token-mean": 2.0,
        "token-sum": 6.0,
        "seq-mean-token-sum": 3.0,
        "seq-mean-token-mean": 2.25,
        "seq-mean-token-sum-norm": 1.5,
    }
    assert {mode: agg_loss(losses, mask, mode).item() for mode in expected} == expected
    assert agg_loss(losses, mask, "token-mean", dp_size=2, batch_num_tokens=12).item() == 1.0
    with pytest.raises(ValueError, match="loss_agg_mode"):
        agg_loss(losses, mask, "median")


def test_kl_and_its_controllers() -> None:
    from verl.trainer.ppo.core_algos import get_kl_controller, kl_penalty

    a, b = torch.tensor([0.0, -1.0]), torch.tensor([-1.0, -1.0])
    assert kl_penalty(a, b, "kl").tolist() == [1.0, 0.0]
    assert kl_penalty(a, b, "mse").tolist() == [0.5, 0.0]
    with pytest.raises(NotImplementedError):
        kl_penalty(a, b, "full")
    adaptive = get_kl_controller(types.SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=100))
    adaptive.update(current_kl=1.0, n_steps=100)
    assert adaptive.value == pytest.approx(0.12)


def test_policy_filtration_prefers_extreme_scores() -> None:
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data

    torch.manual_seed(0)
    scores = torch.tensor([[0.0]] * 50 + [[10.0]] * 2)
    data = DataProto.from_dict({"token_level_scores": scores}, {"row": np.arange(52)})
    drawn = compute_pf_ppo_reweight_data(data, "pow", 2.0)
    assert len(drawn) == 52
    assert (drawn.non_tensor_batch["row"] >= 50).mean() > 0.9
    with pytest.raises(ValueError, match="reweight_method"):
        compute_pf_ppo_reweight_data(data, "other")


# ---- rollout correction


def test_rejection_bounds_are_those_of_rollout_over_trainer() -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    log_ratio = torch.log(torch.tensor([[0.25, 1.0, 4.0]]))  # trainer over rollout
    mask = torch.ones(1, 3)
    kept, metrics = compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.5_8.0")
    assert kept.tolist() == [[1, 1, 0]], "rollout over trainer is 4, 1, 0.25: only the last is outside 0.5 … 8"
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    both, _ = compute_rollout_rejection_mask(log_ratio, mask, "token_k1,seq_max_k2", "0.5_8.0,0.1")
    assert both.sum() == 0
    with pytest.raises(ValueError, match="rollout_rs_threshold"):
        compute_rollout_rejection_mask(log_ratio, mask)


def test_weights_and_metric_names_of_rollout_correction() -> None:
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_corr_metrics_from_logprobs,
        compute_rollout_correction_and_add_to_batch,
        compute_rollout_correction_weights,
    )

    log_ratio, mask = torch.log(torch.tensor([[0.5, 4.0]])), torch.ones(1, 2)
    weights, metrics = compute_rollout_correction_weights(log_ratio, mask, "token", 2.0)
    assert weights.tolist() == [[0.5, 2.0]]
    assert metrics["rollout_is_ratio_fraction_high"] == 0.5
    by_row, _ = compute_rollout_correction_weights(log_ratio, mask, "sequence", 10.0, rollout_is_batch_normalize=True)
    assert by_row.tolist() == [[1.0, 1.0]]
    same = compute_rollout_corr_metrics_from_logprobs(log_ratio, log_ratio, mask)
    names = "training_ppl rollout_log_ppl kl k3_kl log_ppl_diff_max ppl_ratio chi2_token chi2_seq rollout_is_mean"
    assert {f"rollout_corr/{name}" for name in names.split()} <= set(same)
    assert same["rollout_corr/kl"] == same["rollout_corr/chi2_token"] == 0
    assert same["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1)
    batch = DataProto.from_dict(
        {"old_log_probs": log_ratio, "rollout_log_probs": torch.zeros(1, 2), "response_mask": mask}
    )
    batch, _ = compute_rollout_correction_and_add_to_batch(batch, {"rollout_is": "token", "rollout_is_threshold": 2.0})
    assert batch.batch["rollout_is_weights"].tolist() == [[0.5, 2.0]]


# ---- metrics


def test_metric_gathers_and_aggregates() -> None:
    from verl.utils.metric import AggregationType, Metric, reduce_metrics

    metric = Metric("mean", 1.0)
    metric.append(torch.tensor(3.0))
    metric.append(Metric("mean", [2.0, 6.0]))
    assert (metric.values, metric.aggregate()) == ([1.0, 3.0, 2.0, 6.0], 3.0)
    ranks = [Metric("sum", [1.0, 2.0]), Metric("sum", [3.0, 4.0])]
    assert Metric.aggregate_dp(ranks) == 5.0
    assert Metric.aggregate_dp([Metric("max", [1.0, 2.0]), Metric("max", [3.0, 0.0])]) == 3.0
    assert metric.init_list().aggregation is AggregationType.MEAN
    assert reduce_metrics({"a": [1, 3], "max_b": [1, 3], "c/min": [1, 3], "d": metric}) == {
        "a": 2,
        "max_b": 3,
        "c/min": 1,
        "d": 3.0,
    }
    for wrong in (lambda: Metric("median"), lambda: metric.append(torch.ones(2)), lambda: metric.extend(ranks[0])):
        with pytest.raises(ValueError):
            wrong()


def test_validation_figures_are_bootstrapped_per_prompt() -> None:
    from verl.trainer.ppo.metric_utils import bootstrap_metric, calc_maj_val, process_validation_metrics

    ((mean, deviation),) = bootstrap_metric([0.0, 1.0], 2, [np.max])
    assert mean == pytest.approx(0.75, abs=0.05), "with replacement: both zero in a quarter of the draws"
    assert deviation > 0
    rows = [{"pred": "a", "val": 0.9}, {"pred": "b", "val": 0.1}, {"pred": "a", "val": 0.5}]
    assert calc_maj_val(rows, "pred", "val") == 0.9
    figures = process_validation_metrics(
        ["s"] * 8, ["p"] * 4 + ["q"] * 4, {"acc": [1, 1, 1, 1, 0, 0, 0, 0], "pred": list("aabbabab")}
    )["s"]["acc"]
    assert figures["mean@4"] == 0.5
    assert figures["best@2/mean"] == figures["worst@4/mean"] == figures["maj@4/mean"] == 0.5
    assert {"std@4", "best@4/std", "maj@2/std"} <= set(figures)


def test_figures_of_a_batch_have_verls_names() -> None:
    from verl import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    ones = torch.ones(2, 2)
    batch = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "token_level_rewards": ones,
            "advantages": ones,
            "returns": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "values": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "responses": ones.long(),
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
            "old_log_probs": torch.log(ones / 2),
            "rollout_log_probs": torch.log(torch.tensor([[0.5, 0.4], [0.5, 0.1]])),
        },
        meta_info={"global_token_num": [3, 3]},
    )
    metrics = compute_data_metrics(batch)
    assert metrics["critic/score/mean"] == 5.0
    assert metrics["critic/vf_explained_var"] == 1.0
    assert metrics["response_length/mean"] == metrics["prompt_length/mean"] == 1.5
    assert metrics["response_length/clip_ratio"] == 0.5
    assert compute_timing_metrics(batch, {"gen": 0.3})["timing_per_token_ms/gen"] == pytest.approx(100)
    assert compute_throughout_metrics(batch, {"step": 2.0}, 3)["perf/throughput"] == 1.0
    debug = calculate_debug_metrics(batch)
    assert debug["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert debug["training/rollout_probs_diff_valid"] == 1


# ---- tensors and balance


def test_torch_functional_has_verls_edge_cases() -> None:
    import verl.utils.torch_functional as F

    logits, labels = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    assert F.logprobs_from_logits(logits, labels).item() == pytest.approx(-0.3133, abs=1e-4)
    assert F.entropy_from_logits(torch.zeros(1, 4)).item() == pytest.approx(np.log(4))
    assert F.calculate_sum_pi_squared_from_logits(torch.zeros(1, 4)).item() == pytest.approx(0.25)
    x, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 1.0, 0.0])
    assert F.masked_mean(x, mask).item() == pytest.approx(2.0)
    assert F.masked_mean(x, torch.zeros(3)).item() == 0
    assert F.masked_var(x, mask).item() == pytest.approx(2.0)
    assert F.masked_whiten(x, mask, shift_mean=False)[:2].mean().item() == pytest.approx(2.0)
    with pytest.raises(ValueError):
        F.masked_var(x, torch.tensor([1.0, 0.0, 0.0]))
    assert F.get_response_mask(torch.tensor([[5, 2, 5, 2]]), eos_token=[2]).tolist() == [[1, 1, 0, 0]]
    assert F.pad_sequence_to_length(torch.tensor([[7]]), 3, 0, left_pad=True).tolist() == [[0, 0, 7]]
    assert F.pad_2d_list_to_length([[1], [1, 2]], 0, 3).tolist() == [[1, 0, 0], [1, 2, 0]]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = F.get_cosine_schedule_with_warmup(optimizer, 2, 4, min_lr_ratio=0.2)
    factors = [schedule.lr_lambdas[0](step) for step in range(5)]
    assert factors == pytest.approx([0, 0.5, 1.0, 0.6, 0.2])


def test_rows_are_balanced_and_come_back_in_order() -> None:
    from verl import DataProto
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, prepare_dynamic_batch, restore_dynamic_batch

    lengths = [10, 1, 9, 2, 8, 3, 7, 4]
    for equal_size in (True, False):
        parts = get_seqlen_balanced_partitions(lengths, 4, equal_size)
        assert sorted(row for part in parts for row in part) == list(range(8))
        assert max(sum(lengths[i] for i in part) for part in parts) <= 12
        assert all(part == sorted(part) for part in parts)
    with pytest.raises(AssertionError):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
    mask = torch.stack([torch.arange(10) < n for n in lengths]).long()
    data = DataProto.from_dict({"attention_mask": mask, "row": torch.arange(8)}, {"name": np.array(list("abcdefgh"))})
    pieces, rows = prepare_dynamic_batch(data, max_token_len=16)
    assert all(int(piece.batch["attention_mask"].sum()) <= 16 for piece in pieces)
    computed = torch.cat([piece.batch["row"] for piece in pieces])
    assert restore_dynamic_batch(computed, rows).tolist() == list(range(8))
    with pytest.raises(AssertionError, match="cannot hold"):
        prepare_dynamic_batch(data, max_token_len=5)


# ---- rewards, datasets, samplers


def test_scores_of_verls_names() -> None:
    from verl.utils.reward_score import default_compute_score
    from verl.utils.reward_score.math_reward import is_equiv, last_boxed_only_string, remove_boxed

    assert default_compute_score("openai/gsm8k", "so #### 72", "72") == 1.0
    assert default_compute_score("lighteval/MATH", r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}") == 1.0
    assert remove_boxed(last_boxed_only_string(r"a \boxed{4} b \boxed{x^{2}}")) == "x^{2}"
    assert is_equiv("0.5", r"\frac{1}{2}")
    with pytest.raises(NotImplementedError, match="no reward function"):
        default_compute_score("nobody/knows", "a", "b")


def test_reward_loop_manager_scores_a_batch_row_by_row() -> None:
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    class Lengths(RewardManagerBase):
        def __init__(self, config, tokenizer, compute_score=None):
            super().__init__(config, tokenizer, compute_score)

        async def run_single(self, data):
            length = int(data.batch["attention_mask"][:, -3:].sum())
            return {"reward_score": float(length), "reward_extra_info": {"tokens": length}}

    manager = Lengths(tokenizer=None, num_examine=1, compute_score=len, reward_fn_key="data_source")
    data = DataProto.from_dict(
        {"responses": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    )
    told = manager(data, return_dict=True)
    assert told["reward_tensor"].tolist() == [[0, 2, 0], [0, 0, 3]]
    assert told["reward_extra_info"] == {"tokens": [2, 3]}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_verls_managers_by_the_sample_can_be_built_upon(asynchronous: bool) -> None:
    import asyncio

    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    async def score_later(data_source, solution_str, ground_truth, extra_info):
        return score_now(data_source, solution_str, ground_truth, extra_info)

    def score_now(data_source, solution_str, ground_truth, extra_info):
        assert extra_info["num_turns"] == 2
        return {"score": float(solution_str == ground_truth), "said": solution_str}

    class Twice(DAPORewardManager):
        async def run_single(self, data):
            told = await super().run_single(data)
            return told | {"reward_score": 2 * told["reward_score"]}

    class Letters:
        def decode(self, ids, skip_special_tokens=False):
            return "".join(chr(96 + int(i)) for i in ids)

    overlong = {"enable": True, "len": 2, "penalty_factor": 0.5, "log": True}
    config = OmegaConf.create({"reward": {"reward_kwargs": {"overlong_buffer_cfg": overlong, "max_resp_len": 3}}})
    manager = Twice(config, Letters(), score_later if asynchronous else score_now)
    data = DataProto.from_dict(
        {"responses": torch.tensor([[1, 2, 0], [1, 2, 3]]), "attention_mask": torch.tensor([[1, 1, 1, 0], [1] * 4])},
        {
            "data_source": np.array(["a", "b"], dtype=object),
            "reward_model": np.array([{"ground_truth": "ab"}] * 2, dtype=object),
            "__num_turns__": np.array([2, 2], dtype=object),
        },
    )
    told = manager(data, return_dict=True)
    assert told["reward_tensor"].tolist() == [[0, 2 * (1 - 0.25), 0], [0, 0, 2 * (0 - 0.5)]]
    assert told["reward_extra_info"]["said"] == ["ab", "abc"]
    assert told["reward_extra_info"]["overlong"] == [True, True]
    alone = asyncio.run(manager.run_single(data[:1]))
    assert alone["reward_score"] == 1.5


def test_a_dataset_may_read_its_own_rows_write_its_prompts_and_make_its_items(tmp_path) -> None:
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from quadriga.config.schema import DataConfig
    from quadriga.data.loader import collate_prompts

    class Mine(RLHFDataset):
        def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
            self.sign = config.get("sign", "+")
            super().__init__(data_files, tokenizer, config, processor, max_samples)

        def _read_files_and_tokenize(self):
            first, last = map(int, self.data_files[0].split("-"))
            truth = {"ground_truth": "7"}
            self.dataframe = [{"a": a, "data_source": "sums", "reward_model": truth} for a in range(first, last)]

        def _build_messages(self, example):
            return f"{example['a']}{self.sign}3="

    class Items(Mine):
        def __getitem__(self, item):
            row = dict(self.dataframe[item])
            row["raw_prompt"] = self._build_messages(row) if item else "1+1="
            row["dummy_tensor"] = torch.tensor([0])
            return row

    class OldItems(Mine):
        def __getitem__(self, item):
            row = dict(self.dataframe[item])
            ids = self.tokenizer(f"{row['a']}=", add_special_tokens=False)["input_ids"]
            padded = torch.tensor([0] * (8 - len(ids)) + ids)
            return row | {"input_ids": padded, "attention_mask": (padded != 0).long(), "raw_prompt_ids": ids}

    tokenizer = AutoTokenizer.from_pretrained(Path(quadriga.__file__).parent / "assets" / "arithmetic")
    config = DataConfig(max_prompt_length=4, filter_overlong_prompts=True, shuffle=False)
    datasets = [kind("8-12", tokenizer, config=config) for kind in (Mine, Items, OldItems)]
    written = [[tokenizer.decode(one[i]["input_ids"]).replace(" ", "") for i in range(len(one))] for one in datasets]
    assert written == [["8+3=", "9+3="], ["1+1=", "9+3="], ["8=", "9="]], "two prompts are too long"
    assert list(datasets[0].dropped_indices) == [2, 3]
    assert datasets[1].dataframe.column_names == ["a", "data_source", "reward_model"]
    for dataset in datasets:
        assert isinstance(dataset, torch.utils.data.Dataset), "recipes ask for that"
        batch = collate_prompts([dataset[0], dataset[1]], pad_token_id=0)
        assert batch.non_tensor_batch["a"].tolist() == [8, 9]
        assert batch.non_tensor_batch["index"].tolist() == [0, 1]
        assert batch.non_tensor_batch["reward_model"][0] == {"ground_truth": "7"}


def test_a_sampler_goes_on_after_the_rows_that_were_given() -> None:
    from verl.experimental.dataset.sampler import AbstractCurriculumSampler

    class Backwards(AbstractCurriculumSampler):
        def __iter__(self):
            return iter(range(len(self.data_source) - 1, -1, -1))

    first = Backwards([0] * 5, None)
    assert isinstance(first, torch.utils.data.Sampler)
    rows = iter(first)
    assert [next(rows), next(rows)] == [4, 3]
    second = Backwards([0] * 5, None)
    second.load_state_dict(first.state_dict())
    assert list(second) == [2, 1, 0]
    assert list(second) == [4, 3, 2, 1, 0]


def test_objects_are_loaded_from_files_and_packages(tmp_path) -> None:
    from verl.utils.import_utils import load_extern_object

    (tmp_path / "mine.py").write_text("answer = 42\n")
    assert load_extern_object(str(tmp_path / "mine.py"), "answer") == 42
    assert load_extern_object("pkg://json", "dumps")([1]) == "[1]"
    with pytest.raises(FileNotFoundError):
        load_extern_object(str(tmp_path / "other.py"), "answer")
    with pytest.raises(AttributeError):
        load_extern_object(str(tmp_path / "mine.py"), "question")


def test_colocated_raw_class_stands_for_its_roles() -> None:
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, get_predefined_dispatch_fn, register
    from verl.single_controller.ray import RayClassWithInitArgs
    from verl.single_controller.ray.base import create_colocated_worker_raw_cls

    class Actor(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def hello(self):
            return self.rank

    raw = create_colocated_worker_raw_cls({"actor": RayClassWithInitArgs(Actor), "critic": RayClassWithInitArgs(Actor)})
    members = RayClassWithInitArgs(cls=raw)
    assert list(members.roles) == ["actor", "critic"]
    assert callable(get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)["collect_fn"])


def test_rows_of_a_tensordict_are_dealt_out_and_collected() -> None:
    from tensordict import TensorDict
    from verl.single_controller.base.decorator import Dispatch, get_predefined_dispatch_fn

    group, rows = types.SimpleNamespace(world_size=2), TensorDict({"x": torch.arange(4)}, batch_size=4)
    functions = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    (parts,), _, _ = functions["dispatch_fn"](group, rows)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert functions["collect_fn"](group, parts)["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(Exception, match="does not divide into 2"):
        functions["dispatch_fn"](group, rows[:3])
