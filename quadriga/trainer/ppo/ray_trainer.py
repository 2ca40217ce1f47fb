"""The driver of a PPO-family run. `RayPPOTrainer.fit` is the algorithm; the rest is how its lines are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from quadriga.algorithms import make_kl_controller
from quadriga.config.changes import changed_keys
from quadriga.config.load import as_plain_dict
from quadriga.config.needs import need_reference_policy
from quadriga.config.schema import Config
from quadriga.controller.call_record import host_gb
from quadriga.controller.ray_pool import ResourcePoolManager
from quadriga.controller.remote_batch import RemoteBatch, add_columns, column_names
from quadriga.data import create_rl_loader, validation_batches
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.ppo.crew import Crew
from quadriga.trainer.ppo.journal import KEPT_SAMPLES
from quadriga.trainer.ppo.listening import listening
from quadriga.trainer.ppo.restarts import Restarts
from quadriga.trainer.ppo.role import Role
from quadriga.trainer.ppo.row_functions import (
    ADVANTAGE_COLUMNS,
    CORRECTION_COLUMNS,
    SCORE_COLUMNS,
    Computed,
    advantages,
    corrected,
    total_scores,
    widened,
)
from quadriga.trainer.ppo.rows import groups_that_differ, layout, repeat_for_samples
from quadriga.trainer.ppo.sample_rows import sample_rows
from quadriga.trainer.ppo.saver import Saver
from quadriga.trainer.ppo.scoring import SampleScores, can_stream
from quadriga.trainer.ppo.step_metrics import mean_over_ranks, throughput
from quadriga.trainer.ppo.validation import validation_metrics
from quadriga.trainer.ppo.watchdog import Watchdog
from quadriga.workers.weight_push import require_held

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
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: Any,
        ray_worker_group_cls: Any,
        *,
        reward_fn: Any,
        val_reward_fn: Any,
        train_dataset: Any,
        val_dataset: Any,
        tracking: Any,
        checkpoints: Any,
        restarts: Restarts | None = None,
    ) -> None:
        self.config, self.tokenizer, self.tracking = config, tokenizer, tracking
        self.restarts = restarts or Restarts(0, tracking.say)
        self.stop_requested = False
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.val_dataset = val_dataset
        self.loader = create_rl_loader(config.data, train_dataset, tokenizer)
        self.kl_controller = make_kl_controller(**vars(config.algorithm.kl_ctrl))
        self.crew = Crew(config, role_worker_mapping, resource_pool_manager, ray_worker_group_cls)
        self.saver = Saver(checkpoints, self.crew, config.controller.call_timeout_s, self.tracking.checkpoint_written)
        self.total_steps = config.trainer.total_training_steps or len(self.loader) * config.trainer.total_epochs
        self.step = 0
        self.generations = 0
        self.scores: SampleScores | None = None
        self.metrics: dict[str, float] = {}
        rollout = config.actor_rollout_ref.rollout
        self.sampling = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "do_sample": rollout.do_sample,
            "max_new_tokens": rollout.response_length,
            "ignore_eos": rollout.ignore_eos,
            "seed": rollout.seed,
        }
        self.mini_batches = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size

    def init_workers(self) -> Any:
        """Start the workers of every role and load their models. Returns one report per worker."""
        reports = self.crew.start()
        self.crew.load_models(self.total_steps)
        self.crew.use_engines_apart(self.phase, self.restarts)
        return reports

    def fit(self) -> None:
        """Train until `total_steps`: the whole algorithm."""
        self.tracking.begin(self.config, self.step, self.total_steps)
        self.hand_over_weights()
        if self.step == 0 and (self.config.trainer.val_before_train or self.config.trainer.val_only):
            figures = self.validate()
            self.tracking.log(self.step, figures | self.timings())
        while self.step < self.total_steps and not self.config.trainer.val_only and not self.stop_requested:
            self.step += 1
            self.tracking.phases.start_step(self.step)
            self.metrics = {}
            with self.phase("step"):
                batch = self.next_scored_batch()
                self.add_old_log_probs(batch)
                self.add_reference_and_values(batch)
                self.add_advantages(batch)
                self.update(batch)
                self.hand_over_weights()
            self.loader.sampler.update(batch)
            if self.is_due(self.config.trainer.test_freq):
                self.metrics |= self.validate()
            if self.is_due(self.config.trainer.save_freq) or self.stop_requested:
                self.save()
            self.report(batch)
        self.saver.finish()

    # ---- 1, 2: prompts, responses, scores ----

    def next_scored_batch(self) -> DataProto:
        """The step's rows, generated and scored. With `filter_groups`, groups that all score the same are replaced."""
        wanted = self.config.algorithm.filter_groups
        kept: list[DataProto] = []
        for tries in range(1, wanted.max_num_gen_batches + 1 if wanted.enable else 2):
            epoch, prompts = self.loader.next_batch()
            self.metrics["training/epoch"] = float(epoch)
            batch = self.scored_rollout(prompts)
            if not wanted.enable:
                return batch
            kept.append(groups_that_differ(batch, wanted.metric, self.config.actor_rollout_ref.rollout.n))
            if sum(map(len, kept)) >= self.rows_per_step:
                self.metrics["training/num_gen_batches"] = float(tries)
                return self.stacked(kept)[: self.rows_per_step]
        raise DataError(
            f"step {self.step}: {wanted.max_num_gen_batches} generation batches gave only {sum(map(len, kept))} of "
            f"{self.rows_per_step} rows whose groups differ in {wanted.metric}",
            "raise algorithm.filter_groups.max_num_gen_batches, or use prompts the policy solves sometimes",
        )

    def generate(self, prompts: DataProto, n: int, sampling: dict[str, Any], reward_fn: Any) -> DataProto:
        """Rows of `n` responses to each prompt, with the prompt's columns and, if there is a reward function, its
        scores and what else it tells. It scores a sample while others are still being generated."""
        kept: Any = RemoteBatch.put(prompts) if self.config.transfer_queue.enable else prompts
        rows = repeat_for_samples(kept, n)
        self.scores = scores = SampleScores(reward_fn, rows) if reward_fn is not None else None
        self.generations += 1
        request = rows.select(["input_ids", "attention_mask"], ["uid", "epoch", "index", "sample_index"])
        request.meta_info = {
            "sampling": sampling,
            "step": self.step,
            "version": self.weights_version,
            "generation": self.generations,
        }
        with listening(self.crew.rollout, self.generations, self.listeners()):
            generated = self.generated(request)
        generated.non_tensor_batch.update(rows.non_tensor_batch)
        if scores is not None:
            with self.phase("reward"):
                told = scores.told(generated)
            add_columns(generated, {name: told[name] for name in ("row_scores", "reward_tensor") if name in told})
            generated.meta_info["reward_metrics"] = told.get("reward_metrics", {})
            for name, values in told.get("reward_extra_info", {}).items():
                generated.non_tensor_batch[f"reward_{name}"] = object_array(values)
        return generated

    def generated(self, request: DataProto) -> DataProto:
        """The rows, by whoever generates."""
        engines = self.crew.engines
        if engines is not None:
            return self.stacked(engines.generate(request))[: len(request)]
        with self.phase("gen"):
            return self.crew.rollout.generate_sequences(request)

    def listeners(self) -> list[Callable[..., None]]:
        """Who uses samples before all of them are finished."""
        engines, scores = self.crew.engines, self.scores
        kept = [engines.keep] if engines is not None and engines.heals else []
        return [*kept, *([scores.add] if scores is not None and can_stream(scores.manager) else [])]

    def scored_rollout(self, prompts: DataProto) -> DataProto:
        """The training rows of some prompts, with `token_level_scores`: the reward function's, the reward model's, or
        their sum."""
        batch = self.generate(prompts, self.config.actor_rollout_ref.rollout.n, self.sampling, self.reward_fn)
        self.metrics.update(batch.meta_info.pop("reward_metrics", {}))
        self.add_scores(batch, self.crew.reward_model)
        if self.config.algorithm.adv_estimator == "remax":
            greedy = self.generate(prompts, 1, {**self.sampling, "do_sample": False}, self.reward_fn)
            self.add_scores(greedy, self.crew.reward_model)
            baselines = greedy.batch["score"].repeat_interleave(self.config.actor_rollout_ref.rollout.n)
            add_columns(batch, {"reward_baselines": baselines})
        return batch

    def add_scores(self, batch: DataProto, reward_model: Any) -> None:
        """`token_level_scores` and `score`: what the reward function told, plus what the reward model says, if there is one."""
        with self.phase("reward"):
            if reward_model is not None:
                rows = batch.select(["input_ids", "attention_mask", "response_mask"], ["raw_prompt"])
                batch.union(reward_model.compute_rm_score(rows))
            self.compute(batch, total_scores, SCORE_COLUMNS)

    # ---- 3 to 6: what the update needs ----

    def add_old_log_probs(self, batch: DataProto) -> None:
        """`old_log_probs`, unless the update is strictly on-policy: then the ratio is 1 by construction."""
        correction = self.config.algorithm.rollout_correction
        if self.needs_old_log_probs and not correction.bypass_mode:
            with self.phase("old_log_prob"):
                self.extend(batch, self.crew.actor, "compute_log_prob")()
        if correction.bypass_mode or correction.rollout_is or correction.rollout_rs:
            self.metrics |= self.compute(batch, corrected, CORRECTION_COLUMNS, correction=correction)

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
        limit = self.config.data.max_response_length
        with self.phase("adv"):
            self.metrics |= self.compute(
                batch, advantages, ADVANTAGE_COLUMNS, algorithm=algorithm, kl_coef=kl_coef, max_response_length=limit
            )
        if algorithm.use_kl_in_reward:
            self.metrics["actor/reward_kl_penalty_coeff"] = kl_coef
            self.kl_controller.update(self.metrics["actor/reward_kl_penalty"], n_steps=len(batch))

    def compute(
        self, batch: DataProto, function: Callable[..., Computed], columns: Sequence[str], **arguments: Any
    ) -> dict[str, float]:
        """Run `function(rows, **arguments)` on those of `columns` that there are, where they are.

        The columns that it makes are added to `batch`, in place of those of the same name; the figures are returned.
        """
        rows = batch.select([name for name in columns if name in column_names(batch)], ["uid"])
        if isinstance(rows, RemoteBatch):
            new, figures = self.crew.actor.compute(function, rows, arguments)
            batch.union(new)
        else:
            new, figures = function(rows, **arguments)
            add_columns(batch, new)
        return figures

    def stacked(self, parts: list[DataProto]) -> DataProto:
        """Rows of several generations, or engines, in one batch, padded alike."""
        shapes = [p.widths if isinstance(p, RemoteBatch) else {k: p.batch[k].shape[1:] for k in _WIDTHS} for p in parts]
        widest = tuple(max(shape[name][0] for shape in shapes) for name in _WIDTHS)
        widen = partial(
            widened, prompt_width=widest[0], response_width=widest[1], pad_token_id=self.tokenizer.pad_token_id
        )
        for k, shape in enumerate(shapes):
            if widest != tuple(shape[name][0] for name in _WIDTHS):
                remote = isinstance(parts[k], RemoteBatch)
                parts[k] = self.crew.actor.map_rows(widen, parts[k]) if remote else widen(parts[k])
        return type(parts[0]).concat(parts)

    # ---- 7, 8: update and hand-over ----

    def update(self, batch: DataProto) -> None:
        """Critic and, after its warm-up, actor; at the same time where they live in different pools."""
        rows = batch.select(sorted(_UPDATE_COLUMNS & set(column_names(batch))), [])
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

    def start_update(self, dealt: DataProto, group: Any, method: str, mini_batches: int) -> Any:
        dealt.meta_info = {"step": self.step, "mini_batches": mini_batches}
        return group.start(method, dealt)

    def hand_over_weights(self) -> None:
        """The rollout engines take the trained weights and echo what they hold; a stale one stops the run."""
        self.weights_version = self.step  # version k is what the policy is after k steps
        with self.phase("update_weights"):
            echoes = self.crew.hand_over_weights(self.weights_version)
        require_held(echoes, self.weights_version)

    # ---- 9: telling ----

    def report(self, batch: DataProto) -> None:
        self.metrics |= self.timings()
        self.metrics |= throughput(self.metrics, self.metrics["timing_s/step"])
        self.metrics["training/global_step"] = float(self.step)
        self.metrics |= self.restarts.figures()
        kept = batch if self.config.trainer.rollout_data_dir else batch[:KEPT_SAMPLES]
        self.tracking.samples(self.step, self.sample_rows(kept), "train")
        self.tracking.log(self.step, self.metrics)
        self.saver.step_recorded()

    def validate(self) -> dict[str, float]:
        """Figures of the policy as it is, on the validation set."""
        val = self.config.actor_rollout_ref.rollout.val_kwargs
        sampling = {
            **self.sampling,
            "temperature": val.temperature,
            "top_p": val.top_p,
            "top_k": val.top_k,
            "do_sample": val.do_sample,
            "ignore_eos": False,
        }
        rows: list[dict[str, Any]] = []
        with self.tracking.phases("testing", whole=True):
            for prompts in validation_batches(self.config.data, self.val_dataset, self.tokenizer):
                batch = self.generate(prompts, val.n, sampling, self.val_reward_fn)
                self.add_scores(batch, self.crew.reward_model if self.val_reward_fn is None else None)
                rows += self.sample_rows(batch)
        results = {name: [r.get(name) for r in rows] for name in ("score", "acc", "pred")}
        results = {name: values for name, values in results.items() if any(v is not None for v in values)}
        self.tracking.samples(self.step, rows, "val")
        return validation_metrics([r["data_source"] for r in rows], [r["uid"] for r in rows], results, val.n)

    def sample_rows(self, batch: DataProto) -> list[dict[str, Any]]:
        return sample_rows(batch, self.tokenizer, self.config.data.reward_fn_key)

    # ---- 10: what is kept ----

    def save(self) -> None:
        """Copy the state of the run; it is written while the next steps are under way."""
        with self.phase("save_checkpoint"):
            self.saver.start(self.step, self.state_dict())

    def resume(self, checkpoint: Any) -> None:
        """Go on after the step that `checkpoint` was written after. Keys that were changed since are said."""
        self.crew.load(checkpoint)
        state = checkpoint.read_state()
        self.load_state_dict(state)
        self.tracking.say(f"resumed after step {self.step} from {checkpoint.path}")
        changed = changed_keys(state["config"], as_plain_dict(self.config))
        if changed:
            self.tracking.say("with another configuration than before: " + ", ".join(changed))

    def state_dict(self) -> dict[str, Any]:
        """The driver's own state; the workers keep theirs. Random numbers are functions of the step and need no state."""
        return {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "config": as_plain_dict(self.config),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.loader.load_state_dict(state["loader"])
        self.kl_controller.load_state_dict(state["kl_controller"])

    # ---- small things ----

    @property
    def rows_per_step(self) -> int:
        return self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n

    @property
    def needs_old_log_probs(self) -> bool:
        """Strictly on-policy (one mini-batch, one pass) the old policy is the one being updated: nothing to compute."""
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        on_policy = self.mini_batches == 1 and actor.ppo_epochs == 1
        corrects = algorithm.rollout_correction.rollout_is or algorithm.rollout_correction.rollout_rs
        return not on_policy or algorithm.use_kl_in_reward or bool(corrects)

    @staticmethod
    def model_inputs(batch: DataProto) -> DataProto:
        return batch.select(["input_ids", "attention_mask", "response_mask"], [])

    def is_due(self, every: int) -> bool:
        """Every so many steps, and at the last one."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def phase(self, name: str) -> Any:
        return self.tracking.phases(name)

    def timings(self) -> dict[str, float]:
        """Seconds and memory of the phases since the last time; they and the workers' own calls are in the timeline now."""
        memory = self.crew.tell_calls(self.tracking.phases)
        return {**self.tracking.phases.take_timings(), **memory, "memory/host_gb/driver": host_gb()}

    def watchdog(self) -> Watchdog:
        """Ends this run where it would hang."""
        return Watchdog(
            self.config.trainer.watchdog,
            self.tracking.phases,
            self.crew,
            lambda: self.scores.pending if self.scores is not None else [],
            self.tracking.directory.path / "stalls",
            self.tracking.warn,
        )

    def shutdown(self) -> None:
        """Stop all workers, give the pools back, and close the books."""
        self.saver.close()
        self.crew.shutdown()
        self.tracking.close(failed=self.step < self.total_steps and not self.config.trainer.val_only)


_WIDTHS = ("prompts", "responses")
_UPDATE_COLUMNS = {
    "input_ids",
    "attention_mask",
    "response_mask",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "advantages",
    "returns",
    "values",
}
