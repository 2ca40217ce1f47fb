"""The parts of a step that verl's driver has as methods: recipes override them, and call them from a `fit` of their own."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quadriga.compat.verl.metrics import reduce_metrics
from quadriga.compat.verl.rewards import compute_reward, extract_reward
from quadriga.compat.verl.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from quadriga.compat.verl.worker_groups import PROMPT_TENSORS
from quadriga.protocol import DataProto
from quadriga.trainer.ppo.sample_rows import OF_TOKENS, sample_rows

if TYPE_CHECKING:
    from quadriga.compat.verl.driver import _Own
    from quadriga.compat.verl.worker_groups import WorkerGroupOfVerls

TEXTS = ("prompts", "responses", "attention_mask")
REWARD_KEYS = {"data_source", "reward_model", "extra_info", "uid"}
"""Columns that stay with the prompts when the others go to generation."""


class BatchParts:
    """What `RayPPOTrainer` does to a batch, in verl's words."""

    if TYPE_CHECKING:
        own: _Own
        config: Any
        tokenizer: Any
        use_rm: bool
        ref_in_actor: bool
        actor_rollout_wg: WorkerGroupOfVerls
        ref_policy_wg: WorkerGroupOfVerls
        critic_wg: WorkerGroupOfVerls
        rm_wg: WorkerGroupOfVerls

    _profile: ExitStack | None = None

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Take out of `batch` what generation needs; what scoring needs is in both."""
        kept = REWARD_KEYS & set(batch.non_tensor_batch)
        tensors = [name for name in PROMPT_TENSORS if name in batch.batch.keys()]  # noqa: SIM118
        taken = batch.pop(batch_keys=tensors, non_tensor_batch_keys=sorted(set(batch.non_tensor_batch) - kept))
        taken.non_tensor_batch.update(batch.non_tensor_batch)
        return taken

    def _balance_batch(
        self, batch: DataProto, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **kwargs: Any
    ) -> None:
        """Say how uneven the rows are. They are dealt evenly by tokens where they are used, and no mini-batch changes."""
        lengths = batch.batch["attention_mask"].sum(1).tolist()
        ranks = self.actor_rollout_wg.world_size
        if len(lengths) % ranks == 0:
            parts = get_seqlen_balanced_partitions(lengths, ranks, equal_size=True)
            metrics.update(log_seqlen_unbalance(lengths, parts, logging_prefix))

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        """`rm_scores` of a reward model."""
        return self.rm_wg.compute_rm_score(batch)

    def _compute_or_extract_reward(
        self,
        batch: DataProto,
        reward_fn: Any = None,
        return_dict: bool = False,
        sum_reward: bool = False,
        reward_for_val: bool = False,
    ) -> Any:
        """The scores that the batch has already, or those of `reward_fn`: `(reward_tensor, extra)`, a dict with
        `return_dict`, the sums alone with `sum_reward`."""
        if "rm_scores" in batch.batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
            rewards, extra = extract_reward(batch)
        elif reward_fn is None:
            raise ValueError("the batch has no rm_scores, and there is no reward_fn")
        else:
            rewards, extra = compute_reward(batch, reward_fn)
        if return_dict or reward_for_val:
            return {"reward_tensor": rewards, "reward_extra_info": extra}
        return rewards.sum(-1) if sum_reward else (rewards, extra)

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        """(`old_log_probs` and `entropys`, the share of the device's peak that it reached, which nobody measures)."""
        return self.actor_rollout_wg.compute_log_prob(batch), 0.0

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return (self.actor_rollout_wg if self.ref_in_actor else self.ref_policy_wg).compute_ref_log_prob(batch)

    def _compute_values(self, batch: DataProto) -> DataProto:
        return self.critic_wg.compute_values(batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        return self.actor_rollout_wg.update_actor(batch)

    def _update_critic(self, batch: DataProto) -> DataProto:
        return self.critic_wg.update_critic(batch)

    def _start_profiling(self, do_profile: bool) -> None:
        if do_profile and self._profile is None:
            self._profile = ExitStack()
            self._profile.enter_context(self.own.crew.profiled(self.own.step))

    def _stop_profiling(self, do_profile: bool) -> None:
        if do_profile and self._profile is not None:
            self._profile.close()
            self._profile = None

    def _log_rollout_data(
        self, batch: DataProto, reward_extra_infos_dict: Any, timing_raw: Any, rollout_data_dir: str
    ) -> None:
        """The step's samples, into the run directory and `rollout_data_dir`."""
        config, columns = self.own.config, batch.non_tensor_batch
        source = config.data.reward_fn_key
        tensors = {name: batch.batch[name] for name in (*TEXTS, *OF_TOKENS) if name in batch.batch.keys()}  # noqa: SIM118
        tensors["score"] = batch.batch["token_level_scores"].sum(-1)
        seen: Counter[str] = Counter()
        places = []
        for uid in columns["uid"]:
            places.append(seen[uid])
            seen[uid] += 1
        labels = {"uid": columns["uid"], "sample_index": np.array(places), source: columns.get(source, columns["uid"])}
        labels |= {name: columns[name] for name in ("reward_model",) if name in columns}
        rows = DataProto.from_dict(tensors, labels)
        told = sample_rows(rows, self.tokenizer, source, config.trainer.log_sample_tokens)
        self.own.tracking.samples(self.own.step, told, "train")


def figures_of(answer: DataProto) -> dict[str, float]:
    """What an update told, one number a metric."""
    return reduce_metrics(answer.meta_info["metrics"])


def mean_over(mask: torch.Tensor, values: torch.Tensor) -> float:
    """Mean of the selected elements, 0 where there are none."""
    kept = mask.bool()
    return float(values[kept].mean()) if kept.any() else 0.0
