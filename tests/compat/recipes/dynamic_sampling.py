"""A recipe of the kind that DAPO's is: a runner and a trainer of its own, whose `fit` is verl's with dynamic sampling in it.

It is composed by Hydra from `recipe.yaml` beside it, and uses verl's names alone.
"""

import os
import socket
import uuid
from collections import defaultdict
from pprint import pprint

import hydra
import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler, run_ppo
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import (
    AdvantageEstimator,
    RayPPOTrainer,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.device import auto_set_device
from verl.utils.fs import copy_to_local
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.rollout_skip import RolloutSkip
from verl.utils.tracking import Tracking


class DynamicSamplingTrainer(RayPPOTrainer):
    def log_probs(self, batch, metrics, timing_raw):
        batch.batch["response_mask"] = compute_response_mask(batch)
        with marked_timer("old_log_prob", timing_raw, "blue"):
            old = self.actor_rollout_wg.compute_log_prob(batch)
            mode = self.config.actor_rollout_ref.actor.loss_agg_mode
            entropy = agg_loss(old.batch.pop("entropys"), batch.batch["response_mask"], mode)
            metrics["actor/entropy"] = entropy.detach().item()
            batch = batch.union(old)
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw, "olive"):
                group = self.actor_rollout_wg if self.ref_in_actor else self.ref_policy_wg
                batch = batch.union(group.compute_ref_log_prob(batch))
        return batch

    def fit(self):
        logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.global_steps = 0
        self._load_checkpoint()
        if self.config.trainer.get("val_before_train", True):
            logger.log(data=self._validate(), step=self.global_steps)
        if self.config.actor_rollout_ref.rollout.get("skip_rollout", False):
            RolloutSkip(self.config, self.actor_rollout_wg).wrap_generate_sequences()
        self.global_steps += 1
        n = self.config.actor_rollout_ref.rollout.n
        timing_raw, kept, drawn = defaultdict(float), None, 0
        for _ in range(self.config.trainer.total_epochs):
            for batch_dict in self.train_dataloader:
                metrics = {}
                self._start_profiling(self.config.global_profiler.profile_continuous_steps)
                new = DataProto.from_single_dict(batch_dict)
                drawn += 1
                asked = self._get_gen_batch(new).repeat(repeat_times=n, interleave=True)
                last = self.global_steps >= self.total_training_steps
                with marked_timer("step", timing_raw):
                    with marked_timer("gen", timing_raw, "red"):
                        written = self.async_rollout_manager.generate_sequences(asked)
                        timing_raw.update(written.meta_info.pop("timing"))
                    assert self.config.algorithm.adv_estimator != AdvantageEstimator.REMAX
                    new.non_tensor_batch["uid"] = np.array(
                        [str(uuid.uuid4()) for _ in range(len(new.batch))], dtype=object
                    )
                    new = new.repeat(repeat_times=n, interleave=True).union(written)
                    if self.config.algorithm.use_kl_in_reward:
                        new = self.log_probs(new, metrics, timing_raw)
                    with marked_timer("reward", timing_raw, "yellow"):
                        if self.use_rm and "rm_scores" not in new.batch.keys():  # noqa: SIM118
                            new = new.union(self.rm_wg.compute_rm_score(new))
                        scores, extra = extract_reward(new)
                        new.batch["token_level_scores"] = scores
                        new.non_tensor_batch.update({k: np.array(v) for k, v in extra.items()})
                        if self.config.algorithm.use_kl_in_reward:
                            new, told = apply_kl_penalty(new, self.kl_ctrl_in_reward, self.config.algorithm.kl_penalty)
                            metrics.update(told)
                        else:
                            new.batch["token_level_rewards"] = scores
                    values = defaultdict(list)
                    name = self.config.algorithm.filter_groups.metric
                    for uid, value in zip(new.non_tensor_batch["uid"], new.non_tensor_batch[name], strict=True):
                        values[uid].append(value)
                    differ = [i for i, uid in enumerate(new.non_tensor_batch["uid"]) if np.std(values[uid]) > 0]
                    new = new[differ]
                    kept = new if kept is None else DataProto.concat([kept, new])
                    if len(kept) < self.config.data.train_batch_size * n:
                        continue
                    batch = kept[: self.config.data.train_batch_size * n]
                    if self.config.trainer.balance_batch:
                        self._balance_batch(batch, metrics=metrics)
                    batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
                    if not self.config.algorithm.use_kl_in_reward:
                        batch = self.log_probs(batch, metrics, timing_raw)
                    if self.use_critic:
                        batch = batch.union(self.critic_wg.compute_values(batch))
                    correction = self.config.algorithm.get("rollout_correction", None)
                    if correction is not None and "rollout_log_probs" in batch.batch:
                        batch, told = compute_rollout_correction_and_add_to_batch(batch, correction)
                        metrics.update(told)
                    batch = compute_advantage(
                        batch,
                        adv_estimator=self.config.algorithm.adv_estimator,
                        gamma=self.config.algorithm.gamma,
                        lam=self.config.algorithm.lam,
                        num_repeat=n,
                        norm_adv_by_std_in_grpo=self.config.algorithm.get("norm_adv_by_std_in_grpo", True),
                    )
                    if self.use_critic:
                        metrics.update(reduce_metrics(self.critic_wg.update_critic(batch).meta_info["metrics"]))
                    if self.config.trainer.critic_warmup <= self.global_steps:
                        metrics.update(reduce_metrics(self.actor_rollout_wg.update_actor(batch).meta_info["metrics"]))
                if self.config.trainer.test_freq > 0 and (
                    last or self.global_steps % self.config.trainer.test_freq == 0
                ):
                    metrics.update(self._validate())
                if self.config.trainer.save_freq > 0 and (
                    last or self.global_steps % self.config.trainer.save_freq == 0
                ):
                    self._save_checkpoint()
                self._stop_profiling(self.config.global_profiler.profile_continuous_steps)
                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
                gpus = self.resource_pool_manager.get_n_gpus()
                metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=gpus))
                metrics["train/num_gen_batches"] = drawn
                logger.log(data=metrics, step=self.global_steps)
                timing_raw, kept, drawn = defaultdict(float), None, 0
                if last:
                    return
                self.global_steps += 1


class DynamicSamplingRunner(TaskRunner):
    def run(self, config):
        print(f"TaskRunner hostname: {socket.gethostname()}, PID: {os.getpid()}")
        pprint(OmegaConf.to_container(config, resolve=True))
        OmegaConf.resolve(config)
        actor_rollout_cls, ray_worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_resource_pool(config)
        self.add_ref_policy_worker(config, actor_rollout_cls)
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        path = copy_to_local(
            config.actor_rollout_ref.model.path, use_shm=config.actor_rollout_ref.model.get("use_shm", False)
        )
        trust = config.data.get("trust_remote_code", False)
        tokenizer = hf_tokenizer(path, trust_remote_code=trust)
        processor = hf_processor(path, trust_remote_code=trust, use_fast=True)
        pools = self.init_resource_pool_mgr(config)
        train = create_rl_dataset(config.data.train_files, config.data, tokenizer, processor, is_train=True)
        val = create_rl_dataset(config.data.val_files, config.data, tokenizer, processor, is_train=False)
        trainer = DynamicSamplingTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=pools,
            ray_worker_group_cls=ray_worker_group_cls,
            train_dataset=train,
            val_dataset=val,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train),
        )
        trainer.init_workers()
        trainer.fit()


@hydra.main(config_path=".", config_name="recipe", version_base=None)
def main(config):
    auto_set_device(config)
    config = migrate_legacy_reward_impl(config)
    run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(DynamicSamplingRunner))


if __name__ == "__main__":
    main()
