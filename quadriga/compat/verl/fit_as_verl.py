"""A training loop in the order of verl's, over the same methods: for recipes that override parts of a step."""

from __future__ import annotations

import uuid
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from quadriga.compat.verl.batch_functions import apply_kl_penalty, compute_advantage
from quadriga.compat.verl.batch_parts import BatchParts, figures_of, mean_over
from quadriga.compat.verl.devices import marked_timer
from quadriga.compat.verl.metrics import (
    calculate_debug_metrics,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from quadriga.compat.verl.rollout_corr_helper import apply_bypass_mode, compute_rollout_correction_and_add_to_batch
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array


def fit_as_verl(trainer: Any) -> None:
    """Train until `total_training_steps`; every part of a step is a method that the recipe may have its own of."""
    config, run = trainer.config, trainer.config.trainer
    trainer._load_checkpoint()
    if trainer.global_steps == 0 and (run.get("val_before_train", True) or run.get("val_only", False)):
        trainer.own.record(0, trainer._validate())
    if run.get("val_only", False):
        return
    while trainer.global_steps < trainer.total_training_steps:
        for columns in trainer.train_dataloader:
            trainer.global_steps += 1
            step, metrics = trainer.global_steps, dict[str, Any]()
            seconds: dict[str, float] = defaultdict(float)
            last = step >= trainer.total_training_steps
            profiled = step in (config.global_profiler.get("steps") or ())
            trainer._start_profiling(profiled)
            with marked_timer("step", seconds):
                batch = _one_step(trainer, DataProto.from_single_dict(columns), metrics, seconds)
            trainer._stop_profiling(profiled)
            if last or (run.test_freq > 0 and step % run.test_freq == 0):
                with marked_timer("testing", seconds):
                    metrics |= trainer._validate()
            if last or (run.save_freq > 0 and step % run.save_freq == 0):
                with marked_timer("save_checkpoint", seconds):
                    trainer._save_checkpoint()
            metrics |= {"training/global_step": float(step)}
            metrics |= compute_data_metrics(batch=batch, use_critic=trainer.use_critic)
            metrics |= compute_timing_metrics(batch=batch, timing_raw=seconds)
            gpus = trainer.resource_pool_manager.get_n_gpus()
            metrics |= compute_throughout_metrics(batch=batch, timing_raw=seconds, n_gpus=gpus)
            trainer.own.record(step, {name: float(value) for name, value in metrics.items()})
            if last:
                return


def _one_step(trainer: Any, batch: DataProto, metrics: dict[str, Any], seconds: dict[str, float]) -> DataProto:
    config = trainer.config
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    batch.non_tensor_batch["uid"] = object_array([str(uuid.uuid4()) for _ in range(len(batch))])
    asked = trainer._get_gen_batch(batch)
    with marked_timer("gen", seconds):
        written = trainer.async_rollout_manager.generate_sequences(asked.repeat(n, interleave=True))
    written.meta_info.pop("timing", None)
    if str(algorithm.adv_estimator) == "remax":
        with marked_timer("gen_max", seconds):
            batch.batch["reward_baselines"] = _greedy_scores(trainer, batch, asked)
    batch = batch.repeat(n, interleave=True).union(written)
    if config.trainer.balance_batch:
        trainer._balance_batch(batch, metrics=metrics)
    batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
    with marked_timer("reward", seconds):
        batch, scores, extra = _scored(trainer, batch)
    correction = algorithm.get("rollout_correction", None)
    bypasses = bool(correction and correction.get("bypass_mode", False))
    if bypasses:
        apply_bypass_mode(batch, correction, config.actor_rollout_ref.actor.policy_loss)
    else:
        with marked_timer("old_log_prob", seconds):
            old, _ = trainer._compute_old_log_prob(batch)
        metrics["actor/entropy"] = mean_over(batch.batch["response_mask"], old.batch.pop("entropys"))
        batch = batch.union(old)
        metrics |= calculate_debug_metrics(batch)
    if trainer.use_reference_policy:
        with marked_timer("ref", seconds):
            batch = batch.union(trainer._compute_ref_log_prob(batch))
    if trainer.use_critic:
        with marked_timer("values", seconds):
            batch = batch.union(trainer._compute_values(batch))
    with marked_timer("adv", seconds):
        batch.batch["token_level_scores"] = scores
        batch.non_tensor_batch.update({name: np.array(values) for name, values in (extra or {}).items()})
        if algorithm.use_kl_in_reward:
            batch, told = apply_kl_penalty(batch, kl_ctrl=trainer.kl_ctrl_in_reward, kl_penalty=algorithm.kl_penalty)
            metrics |= told
        else:
            batch.batch["token_level_rewards"] = scores
        if correction is not None and not bypasses:
            batch, told = compute_rollout_correction_and_add_to_batch(batch, correction)
            metrics |= told
        batch = compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
    if trainer.use_critic:
        with marked_timer("update_critic", seconds):
            metrics |= figures_of(trainer._update_critic(batch))
    if config.trainer.critic_warmup <= trainer.global_steps:
        with marked_timer("update_actor", seconds):
            metrics |= figures_of(trainer._update_actor(batch))
    folder = config.trainer.get("rollout_data_dir", None)
    if folder or type(trainer)._log_rollout_data is BatchParts._log_rollout_data:
        trainer._log_rollout_data(batch, extra, seconds, folder)
    return batch


def _scored(trainer: Any, batch: DataProto) -> tuple[DataProto, torch.Tensor, Any]:
    if trainer.use_rm and "rm_scores" not in batch.batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
        batch = batch.union(trainer._compute_reward_colocate(batch))
    scores, extra = trainer._compute_or_extract_reward(batch, reward_fn=trainer.reward_fn)
    return batch, scores, extra


def _greedy_scores(trainer: Any, batch: DataProto, asked: DataProto) -> torch.Tensor:
    """The score of each prompt's greedy answer, `[B]`."""
    greedy = asked.select(deepcopy=True)
    greedy.meta_info["do_sample"] = False
    written = trainer.async_rollout_manager.generate_sequences(greedy)
    written.meta_info.pop("timing", None)
    rows = batch.select(deepcopy=True).union(written)
    return _scored(trainer, rows)[1].sum(-1)
