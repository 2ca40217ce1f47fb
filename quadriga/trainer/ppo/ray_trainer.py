"""The driver of a PPO-family run. `RayPPOTrainer.fit` is the algorithm; the rest is how its lines are done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quadriga.agents.episode import EpisodeRow
from quadriga.algorithms import make_kl_controller
from quadriga.algorithms.entropy import EntropyController
from quadriga.algorithms.shaping import pf_ppo_rows
from quadriga.config.load import as_plain_dict
from quadriga.config.needs import correction_of, need_reference_policy, need_sum_pi_squared
from quadriga.config.placement import Role
from quadriga.config.schema import Config
from quadriga.config.typed import changed_keys
from quadriga.controller import object_store
from quadriga.controller.call_record import host_gb
from quadriga.controller.ray_pool import ResourcePoolManager
from quadriga.data import create_rl_loader, validation_batches
from quadriga.data.factory import pad_token_id
from quadriga.errors import ConfigError, DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.router import Router
from quadriga.trainer.ppo.contexts import further_contexts, one_row_each, with_all_contexts, without_filling
from quadriga.trainer.ppo.crew import Crew
from quadriga.trainer.ppo.episodes import Episodes
from quadriga.trainer.ppo.groups import Group, KeptGroups, batch_of, episode_figures
from quadriga.trainer.ppo.journal import KEPT_SAMPLES
from quadriga.trainer.ppo.restarts import Restarts
from quadriga.trainer.ppo.row_functions import (
    ADVANTAGE_COLUMNS,
    CORRECTION_COLUMNS,
    GENERATED_COLUMNS,
    SCORE_COLUMNS,
    Computed,
    advantage_labels,
    advantages,
    computed,
    corrected,
    generated_figures,
    groups_that_differ,
    layout,
    total_scores,
)
from quadriga.trainer.ppo.sample_rows import sample_rows
from quadriga.trainer.ppo.saver import Saver, read_lots
from quadriga.trainer.ppo.scoring import (
    function_scores,
    known_rm_scores,
    remember_rm_scores,
    scores_of_agents,
)
from quadriga.trainer.ppo.step_metrics import mean_over_ranks, over_batches, throughput
from quadriga.trainer.ppo.stream import Stream, Window
from quadriga.trainer.ppo.teachers import Teachers
from quadriga.trainer.ppo.validation import validation_metrics
from quadriga.trainer.ppo.watchdog import Watchdog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.checkpoint import Checkpoint, CheckpointStore
    from quadriga.controller.group import WorkerGroup
    from quadriga.controller.local_group import LocalResourcePoolManager
    from quadriga.data.loader import Dataset
    from quadriga.rewards.managers import BaseRewardManager
    from quadriga.trainer.ppo.journal import Journal

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role"]


class RayPPOTrainer:
    """Holds the worker groups of a run and steers them.

    Args:
        config: the checked configuration.
        tokenizer: the policy's.
        role_worker_mapping: worker class of each role that the run has.
        resource_pool_manager: the pools, and which role lives in which.
        ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` to run in this process.
        reward_fn: reward manager for training batches; None: the reward model alone scores.
        val_reward_fn: reward manager for validation; None: the reward model scores there too.
        train_dataset, val_dataset: prompts.
        tracking: where metrics, samples and phase times go.
        checkpoints: where the run's state goes.
        restarts: how often dead workers were replaced before; by default never, and none may be.
        episodes: conducts the samples of prompts that have agents.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, type],
        resource_pool_manager: ResourcePoolManager | LocalResourcePoolManager,
        ray_worker_group_cls: type[WorkerGroup],
        *,
        reward_fn: BaseRewardManager | None,
        val_reward_fn: BaseRewardManager | None,
        train_dataset: Dataset,
        val_dataset: Dataset,
        tracking: Journal,
        checkpoints: CheckpointStore,
        restarts: Restarts | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self.config, self.tokenizer, self.tracking = config, tokenizer, tracking
        self.restarts = restarts or Restarts(0)
        self.stop_requested = False
        self.episodes = episodes
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.val_dataset = val_dataset
        self.loader = create_rl_loader(config.data, train_dataset, tokenizer)
        self.kl_controller = make_kl_controller(**vars(config.algorithm.kl_ctrl))
        bonus = config.actor_rollout_ref.actor.adaptive_entropy
        self.entropy_controller = EntropyController(
            config.actor_rollout_ref.actor.entropy_coeff, bonus.enable, bonus.target, bonus.step_size, bonus.max_coeff
        )
        self.teachers = Teachers(config, tokenizer) if config.distillation.enabled else None
        self.crew = Crew(config, role_worker_mapping, resource_pool_manager, ray_worker_group_cls)
        self.saver = Saver(
            checkpoints,
            self.crew,
            config.controller.call_timeout_s,
            self.watched,
            tracking.directory.sync_metrics,
            tracking.checkpoint_written,
        )
        self.steering = tracking.steering
        self.total_steps = config.trainer.total_training_steps or len(self.loader) * config.trainer.total_epochs
        if config.async_training.staleness >= self.total_steps:
            raise ConfigError(
                f"async_training.staleness={config.async_training.staleness}, but the run has only {self.total_steps} steps",
                f"set it to at most {self.total_steps - 1}, or train for more steps",
            )
        self.step = 0
        self.stream: Any = None
        """A `Stream`, once the workers are up."""
        self.metrics: dict[str, float] = {}
        rollout = config.actor_rollout_ref.rollout
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            do_sample=rollout.do_sample,
            max_new_tokens=rollout.response_length,
            ignore_eos=rollout.ignore_eos,
            seed=rollout.seed,
        )
        self.correction = correction_of(config)
        kept = config.episodes
        self.groups_to_write = KeptGroups(kept.write_to, make=True) if kept.write_to else None
        self.groups_to_read = KeptGroups(kept.read_from, make=False) if kept.read_from else None
        self.mini_batches = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size

    def init_workers(self) -> Any:
        """Start the workers of every role and load their models. Returns one report per worker."""
        with self.watched("start_workers"):
            reports = self.crew.start()
        with self.watched("load_models"):
            self.crew.load_models(self.total_steps)
        self.crew.connect_engines(self.restarts)
        self.stream = self.open_stream()
        self.crew.engine_loads = self.stream.router.loads
        return reports

    def open_stream(self) -> Stream:
        """Groups of the run's prompts, generated and scored."""
        return Stream(
            Window.of(self.config.async_training),
            self.loader,
            lambda on_samples: Router(self.crew.engines, on_samples, threaded=self.config.trainer.executor != "local"),
            total_steps=self.total_steps,
            n=self.config.actor_rollout_ref.rollout.n,
            greedy=self.config.algorithm.adv_estimator == "remax",
            sampling=self.sampling,
            scorer=self.reward_fn,
            phase=self.phase,
            episodes=self.episodes,
        )

    def fit(self) -> None:
        """Train until `total_steps`: the whole algorithm."""
        self.begin()
        stops = self.stop_requested or self.config.trainer.val_only
        while self.step < self.total_steps and not stops:
            with self.next_step(), self.crew.profiled(self.step):
                batch = self.next_scored_batch()
                if self.config.episodes.generate_only:
                    self.describe(batch)
                else:
                    self.add_old_log_probs(batch)
                    self.add_reference_and_values(batch)
                    self.add_teacher(batch)
                    self.add_advantages(batch)
                    self.update(batch)
                self.loader.sampler.update(one_row_each(batch))
                self.steering.obey(self)
                self.hand_over_weights()
            if self.steering.takes("validate") or self.is_due(self.config.trainer.test_freq):
                self.metrics |= self.validate()
            stops = self.stop_requested  # asked for from here on, it is the next step that is saved and the last
            if self.steering.takes("save") or self.is_due(self.config.trainer.save_freq) or stops:
                self.save()
            self.report(batch)
        self.saver.finish()

    def begin(self) -> None:
        """The engines take the weights that the run begins with, and a new run tells how good they are."""
        self.tracking.begin(self.config, self.step, self.total_steps)
        if (engine := self.config.actor_rollout_ref.rollout.name) != "native" and self.corrects_rollout:
            self.tracking.say(
                f"{engine} samples with other kernels than the trainer's: the update weighs its tokens "
                f"(algorithm.rollout_correction: rollout_is={self.correction.rollout_is}, rollout_rs={self.correction.rollout_rs})"
            )
        for text in self.episodes.said if self.episodes is not None else ():
            self.tracking.say(text)
        if not self.config.trainer.val_only:
            with self.watched("rehearse"):
                self.saver.rehearse(self.state_dict())
        if self.teachers is not None:
            with self.watched("ask_teachers"):
                self.teachers.rehearse()
        self.hand_over_weights()
        if self.step == 0 and (self.config.trainer.val_before_train or self.config.trainer.val_only):
            figures = self.validate()
            with self.watched("report"):
                self.tracking.log(self.step, figures | self.timings())

    def next_step(self) -> Any:
        """The phase of the next step."""
        self.step += 1
        self.tracking.phases.start_step(self.step)
        self.metrics = {}
        return self.phase("step")

    # ---- 1, 2: prompts, responses, scores ----

    def next_scored_batch(self) -> DataProto:
        """The step's rows, generated and scored. With `filter_groups`, groups that all score the same are replaced."""
        wanted, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        kept: list[Group] = []
        generated: list[Group] = []
        told: list[dict[str, float]] = []
        for tries in range(1, wanted.max_num_gen_batches + 1 if wanted.enable else 2):
            groups, epoch = self.take_groups(size)
            batch = self.scored_rows(groups, self.sampling, self.reward_fn, self.crew.reward_model)
            told.append(batch.meta_info.pop("reward_metrics", {}))
            generated += groups
            if wanted.enable:
                differ = groups_that_differ(batch, wanted.metric, self.config.actor_rollout_ref.rollout.n)
                kept += [group for group, differs in zip(groups, differ, strict=True) if differs]
                if len(kept) < size:
                    continue
                groups = kept[:size]
                batch = self.scored_rows(groups, self.sampling, self.reward_fn, self.crew.reward_model)
                batch.meta_info.pop("reward_metrics", None)
                self.metrics["training/num_gen_batches"] = float(tries)
                self.metrics["training/groups_dropped"] = float(len(generated) - size)
            self.metrics |= over_batches(told) | episode_figures(generated) | self.stream.figures(groups, self.step)
            self.metrics["training/epoch"] = float(epoch)
            if self.config.algorithm.adv_estimator == "remax":
                self.add_baselines(batch, groups)
            further = further_contexts(groups)
            return self.with_all_contexts(batch, further) if any(further) else batch
        raise DataError(
            f"step {self.step}: {wanted.max_num_gen_batches} generation batches gave only {len(kept)} of {size} groups "
            f"that differ in {wanted.metric}",
            "raise algorithm.filter_groups.max_num_gen_batches, or use prompts the policy solves sometimes",
        )

    def take_groups(self, count: int) -> tuple[list[Group], int]:
        """Groups for this step and their epoch: from the stream, or those that another run has kept."""
        if self.groups_to_read is not None:
            with self.phase("gen"):
                return self.groups_to_read.read(self.step)
        groups, epoch = self.stream.take(self.step, count)
        if self.groups_to_write is not None:
            with self.watched("keep_groups"):
                self.groups_to_write.write(self.step, epoch, groups)
        return groups, epoch

    def scored_rows(
        self,
        groups: list[Group],
        sampling: SamplingParams,
        reward_fn: BaseRewardManager | None,
        reward_model: Any,
        greedy: bool = False,
    ) -> DataProto:
        """Groups as rows, with `token_level_scores` and `score`: the reward function's, the reward model's, or their sum."""
        truncated = sampling.top_p < 1 or sampling.top_k > 0
        kinds = {"greedy": greedy, "truncated": truncated, "versions": self.config.async_training.staleness > 0}
        with self.phase("reward"):
            batch = batch_of(groups, pad_token_id(self.tokenizer), self.where_columns_live, **kinds)
            told = function_scores(batch, groups, reward_fn, greedy) if reward_fn is not None else {}
            told |= scores_of_agents(groups, told, reward_fn, greedy)
            new: dict[str, torch.Tensor] = {k: told[k] for k in ("row_scores", "reward_tensor") if k in told}
            if new:
                batch.put_columns(self.where_columns_live(DataProto.from_dict(new)))
            batch.meta_info["reward_metrics"] = told.get("reward_metrics", {})
            for name, values in told.get("reward_extra_info", {}).items():
                batch.non_tensor_batch[f"reward_{name}"] = object_array(values)
            if reward_model is not None:
                self.add_rm_scores(batch, groups, reward_model, greedy)
            self.compute(batch, total_scores, SCORE_COLUMNS)
        return batch

    def add_rm_scores(self, batch: DataProto, groups: list[Group], reward_model: Any, greedy: bool) -> None:
        """`rm_scores`, by the reward model, or as it said before of the same groups."""
        known = None if greedy else known_rm_scores(groups, batch)
        if known is not None:
            batch.union(self.where_columns_live(known))
            return
        texts = [name for name in ("raw_prompt", "messages") if name in batch.non_tensor_batch]
        rows = batch.select(["input_ids", "attention_mask", "response_mask"], texts)
        batch.union(reward_model.compute_rm_score(rows))
        if self.config.algorithm.filter_groups.enable and not greedy:
            remember_rm_scores(groups, batch)

    def add_baselines(self, batch: DataProto, groups: list[Group]) -> None:
        """`reward_baselines`: the score of each prompt's greedy answer, for all of its rows."""
        greedy = self.scored_rows(groups, self.sampling, self.reward_fn, self.crew.reward_model, greedy=True)
        baselines = greedy.batch["score"].repeat_interleave(self.config.actor_rollout_ref.rollout.n)
        batch.put_columns(DataProto.from_dict({"reward_baselines": baselines}))

    def with_all_contexts(self, batch: DataProto, further: Sequence[Sequence[EpisodeRow]]) -> DataProto:
        """The batch with all contexts of its episodes: whatever their number, mini-batches have the same prompts and ranks as many
        rows."""
        groups = [self.crew.actor, self.crew.critic, self.crew.reference, self.crew.teacher]
        divisor = math.lcm(*(group.world_size for group in groups if group is not None))
        critic = self.config.data.train_batch_size // self.config.critic.ppo_mini_batch_size if self.crew.critic else 1
        parts = math.lcm(self.mini_batches, critic)
        return with_all_contexts(batch, further, pad_token_id(self.tokenizer), self.where_columns_live, parts, divisor)

    # ---- 3 to 6: what the update needs ----

    def add_old_log_probs(self, batch: DataProto) -> None:
        """`old_log_probs`, unless the update is strictly on-policy: then the ratio is 1 by construction."""
        correction = self.correction
        if self.needs_old_log_probs and not correction.bypass_mode:
            with self.phase("old_log_prob"):
                self.extend(batch, self.crew.actor, "compute_log_prob")()
        if correction.bypass_mode or self.corrects_rollout:
            before = self.step - 1  # the version that this step's update starts from
            self.metrics |= self.compute(batch, corrected, CORRECTION_COLUMNS, correction=correction, version=before)

    def add_reference_and_values(self, batch: DataProto) -> None:
        """`ref_log_prob` and `values`, where the run has them; at the same time where they live in different pools."""
        waiting = {}
        if need_reference_policy(self.config):
            waiting["ref"] = self.extend(batch, self.crew.reference, "compute_ref_log_prob")
        if self.crew.critic is not None:
            waiting["values"] = self.extend(batch, self.crew.critic, "compute_values")
        for name, wait in waiting.items():
            with self.phase(name):
                wait()

    def add_teacher(self, batch: DataProto) -> None:
        """What the teachers say of the responses, where there are any: see `Teachers`."""
        if self.teachers is not None:
            with self.phase("teacher"):
                self.teachers.add(batch, self.crew, self.order_for)

    def extend(self, batch: DataProto, group: Any, method: str) -> Callable[[], None]:
        """Start computing new columns of `batch` on a group's workers; the function returned waits and adds them."""
        order = self.order_for(batch, group, mini_batches=1)
        pending = group.start(method, self.model_inputs(batch)[order])

        def wait() -> None:
            columns = pending.get()
            columns.reorder(torch.from_numpy(np.argsort(order)))
            batch.union(columns)

        return wait

    def order_for(self, batch: DataProto, group: Any, mini_batches: int) -> np.ndarray:
        """The order in which the rows are dealt to a group's ranks: evenly by tokens, mini-batches kept together."""
        lengths = batch.batch["num_tokens"].tolist()
        balance = self.config.trainer.balance_batch and len(batch) % group.world_size == 0
        if len(batch) % (mini_batches * group.world_size):
            return np.arange(len(batch))
        return layout(lengths, mini_batches, group.world_size, balance)

    def add_advantages(self, batch: DataProto) -> None:
        """Rewards (scores minus KL, where asked for), then advantages and returns."""
        algorithm, kl_coef = self.config.algorithm, self.kl_controller.value
        arguments = {"algorithm": algorithm, "kl_coef": kl_coef, "distillation": self.config.distillation}
        labels = advantage_labels(algorithm, batch.non_tensor_batch)
        with self.phase("adv"):
            self.metrics |= self.compute(
                batch, advantages, ADVANTAGE_COLUMNS, labels, **arguments, **self.length_limits
            )
        if algorithm.use_kl_in_reward:
            self.metrics["actor/reward_kl_penalty_coeff"] = kl_coef
            self.kl_controller.update(self.metrics["actor/reward_kl_penalty"], n_steps=len(batch))

    def compute(
        self,
        batch: DataProto,
        function: Callable[..., Computed],
        columns: Sequence[str],
        labels: Sequence[str] = ("uid",),
        **arguments: Any,
    ) -> dict[str, float]:
        """Run `function(rows, **arguments)` on those of `columns` that there are, where they are, and on the `labels`, columns
        without tensors.

        The columns that it makes are added to `batch`, in place of those of the same name; the figures are returned.
        """
        rows = batch.select([name for name in columns if name in batch.batch_keys()], list(labels))
        call = partial(computed, function, arguments)
        new = self.crew.actor.compute(call, rows) if rows.elsewhere else call(rows)
        batch.put_columns(new)
        return new.meta_info["figures"]

    # ---- 7, 8: update and hand-over ----

    def update(self, batch: DataProto) -> None:
        """Critic and, after its warm-up, actor; at the same time where they live in different pools."""
        algorithm, loss = self.config.algorithm, self.config.actor_rollout_ref.actor.policy_loss
        if algorithm.use_pf_ppo:
            seed, rows, size = self.config.data.seed + self.step, without_filling(batch), len(batch)
            drawn = pf_ppo_rows(rows.batch["score"], **vars(algorithm.pf_ppo), seed=seed, count=size)
            self.metrics["training/pf_ppo_distinct"] = len(drawn.unique()) / len(drawn)
            batch = rows[drawn.numpy()]
        columns = _UPDATE_COLUMNS & set(batch.batch_keys())
        compares = loss.loss_mode == "decoupled" or loss.opsm_delta is not None
        if (self.config.async_training.staleness or self.config.episodes.read_from) and not compares:
            columns.discard("rollout_log_probs")  # other weights wrote them: no gap between two engines is to be told
        rows = batch.select(sorted(columns), [])
        waiting: dict[str, Any] = {}
        if self.crew.critic is not None:
            mini_batches = self.config.data.train_batch_size // self.config.critic.ppo_mini_batch_size
            order = self.order_for(batch, self.crew.critic, mini_batches)
            waiting["update_critic"] = self.start_update(rows[order], self.crew.critic, "update_critic", mini_batches)
        if self.step > self.config.trainer.critic_warmup:
            order = self.order_for(batch, self.crew.actor, self.mini_batches)
            waiting["update_actor"] = self.start_update(rows[order], self.crew.actor, "update_actor", self.mini_batches)
        for name, pending in waiting.items():
            with self.phase(name):
                self.metrics |= mean_over_ranks(pending.get())
        if "update_actor" in waiting and self.entropy_controller.adaptive:
            self.metrics["actor/entropy_coeff"] = self.entropy_controller.value
            self.entropy_controller.update(self.metrics["actor/entropy"])

    def start_update(self, dealt: DataProto, group: Any, method: str, mini_batches: int) -> Any:
        dealt.meta_info = {
            "step": self.step,
            "mini_batches": mini_batches,
            "entropy_coeff": self.entropy_controller.value,
        }
        return group.start(method, dealt)

    def hand_over_weights(self) -> None:
        """The engines take the trained weights; version k is what the policy is after k steps. A stale one stops the run."""
        with self.phase("update_weights"):
            self.crew.hand_over_weights(self.step, self.stream.router)
        self.stream.published(self.step, version=self.step)

    # ---- 9: telling ----

    def report(self, batch: DataProto) -> None:
        with self.watched("report"):
            self.metrics |= self.timings()
            self.metrics |= throughput(self.metrics, self.metrics["timing_s/step"], self.crew.workers)
            self.metrics["training/global_step"] = float(self.step)
            self.metrics |= self.restarts.figures(self.stream.router.samples_again)
            kept = batch if self.config.trainer.rollout_data_dir else batch[:KEPT_SAMPLES]
            self.tracking.samples(self.step, self.sample_rows(kept), "train")
            self.tracking.log(self.step, self.metrics)
            self.saver.step_recorded()

    def describe(self, batch: DataProto) -> None:
        """Figures of a batch that nothing is trained on."""
        self.metrics |= self.compute(batch, generated_figures, GENERATED_COLUMNS, **self.length_limits)

    def validate(self) -> dict[str, float]:
        """Figures of the policy as it is, on the validation set."""
        val = self.config.actor_rollout_ref.rollout.val_kwargs
        sampling = replace(
            self.sampling,
            temperature=val.temperature,
            top_p=val.top_p,
            top_k=val.top_k,
            do_sample=val.do_sample,
            ignore_eos=False,
        )
        reward_model = self.crew.reward_model if self.val_reward_fn is None else None
        rows: list[dict[str, Any]] = []
        with self.tracking.phases("testing", whole=True):
            for prompts in validation_batches(self.config.data, self.val_dataset, self.tokenizer):
                groups = self.stream.generate(prompts, val.n, sampling, self.val_reward_fn)
                rows += self.sample_rows(self.scored_rows(groups, sampling, self.val_reward_fn, reward_model))
        results = {name: [r.get(name) for r in rows] for name in ("score", "acc", "pred", "outcome", "response_tokens")}
        results = {name: values for name, values in results.items() if any(v is not None for v in values)}
        self.tracking.samples(self.step, rows, "val")
        return validation_metrics([r["data_source"] for r in rows], [r["uid"] for r in rows], results, val.n)

    def sample_rows(self, batch: DataProto) -> list[dict[str, Any]]:
        return sample_rows(batch, self.tokenizer, self.config.data.reward_fn_key, self.config.trainer.log_sample_tokens)

    # ---- 10: what is kept ----

    def save(self) -> None:
        """Copy the state of the run; it is written while the next steps are under way."""
        with self.phase("save_checkpoint"):
            self.stream.drain()
            self.saver.start(self.step, self.state_dict(), self.stream.lots())

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on after the step that `checkpoint` was written after. Keys that were changed since are said."""
        with self.watched("load_checkpoint"):
            self.crew.load(checkpoint)
        state = checkpoint.read_state()
        self.load_state_dict(state)
        self.stream.load_lots(self.step, read_lots(checkpoint))
        self.steering.go_on_after(self)
        self.tracking.say(f"resumed after step {self.step} from {checkpoint.path}")
        changed = changed_keys(state["config"], as_plain_dict(self.config))
        if changed:
            self.tracking.say("with another configuration than before: " + ", ".join(changed))

    def set_key(self, key: str, value: Any) -> str:
        """Another value of a key for those who read it, from the next step on. Returns why that cannot be, else ""."""
        if key == "actor_rollout_ref.actor.entropy_coeff":
            if self.entropy_controller.adaptive:
                return "adaptive_entropy moves it"
            self.entropy_controller.coeff = value
        return self.crew.set_key(key, value)

    def state_dict(self) -> dict[str, Any]:
        """The driver's own state; the workers keep theirs. Random numbers are functions of the step and need no state."""
        return {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
            "config": as_plain_dict(self.config),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.loader.load_state_dict(state["loader"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.entropy_controller.load_state_dict(state.get("entropy_controller", {}))

    # ---- small things ----

    @property
    def length_limits(self) -> dict[str, Any]:
        data = self.config.data
        return {"max_response_length": data.max_response_length, "max_prompt_length": data.max_prompt_length}

    @property
    def needs_old_log_probs(self) -> bool:
        """Strictly on-policy (one mini-batch, one pass) the old policy is the one being updated, and A-3PO estimates it from
        the one that sampled: nothing to compute."""
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        on_policy = self.mini_batches == 1 and actor.ppo_epochs == 1
        loss = actor.policy_loss
        estimated = loss.loss_mode == "decoupled" and loss.proximal == "loglinear" and self.teachers is None
        read_elsewhere = algorithm.use_kl_in_reward or need_sum_pi_squared(self.config) or self.corrects_rollout
        return read_elsewhere or not (on_policy or estimated)

    @property
    def corrects_rollout(self) -> bool:
        """Whether recomputed log-probs are compared with the rollout's before the update."""
        given = self.correction
        return bool(given.rollout_is or given.rollout_rs or given.m2po_threshold)

    @staticmethod
    def model_inputs(batch: DataProto) -> DataProto:
        return batch.select(["input_ids", "attention_mask", "response_mask"], [])

    def where_columns_live(self, rows: DataProto) -> DataProto:
        """`rows`, with the wide columns in the object store where `transfer_queue` wants them."""
        return rows.leave_in_store(object_store.STORE) if self.config.transfer_queue.enable else rows

    def is_due(self, every: int) -> bool:
        """Every so many steps, and at the last one."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def phase(self, name: str) -> Any:
        return self.tracking.phases(name)

    def watched(self, name: str) -> Any:
        """A phase that is no metric: whatever the driver waits for, the watchdog sees it."""
        return self.tracking.phases(name, timed=False)

    def timings(self) -> dict[str, float]:
        """Seconds and memory of the phases since the last time; they and the workers' own calls are in the timeline now."""
        memory = self.crew.tell_calls(self.tracking.phases)
        return {**self.tracking.phases.take_timings(), **memory, "memory/host_gb/driver": host_gb()}

    def watchdog(self) -> AbstractContextManager[Any]:
        """Ends this run where it would hang. Not one in this process: a debugger stops there on purpose."""
        if self.config.trainer.executor == "local":
            return nullcontext()
        return Watchdog(
            self.config.trainer.watchdog,
            self.tracking.phases,
            self.crew,
            self.awaited_samples,
            self.tracking.directory.path / "stalls",
            self.tracking.warn,
        )

    def awaited_samples(self, phase: str) -> list[str]:
        """What the phase `gen` or `reward` waits for."""
        return self.stream.pending(phase) if self.stream is not None else []

    def shutdown(self) -> None:
        """Stop all workers, give the pools back, and close the books."""
        with self.watched("shutdown"):
            self.saver.close()
            if self.stream is not None:
                self.stream.close()
                self.restarts.samples_again += self.stream.router.samples_again
            self.crew.shutdown()
            self.tracking.close(failed=self.step < self.total_steps and not self.config.trainer.val_only)


_UPDATE_COLUMNS = {
    "input_ids",
    "attention_mask",
    "response_mask",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_sampled_log_probs",
    "rollout_is_weights",
    "token_weights",
    "token_versions",
    "teacher_mask",
    "teacher_log_probs",
    "teacher_top_ids",
    "teacher_top_log_probs",
    "advantages",
    "returns",
    "values",
}
