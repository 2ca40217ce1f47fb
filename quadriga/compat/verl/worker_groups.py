"""What verl's drivers call on their worker groups, by Quadriga's: `actor_rollout_wg`, `critic_wg`, `ref_policy_wg`, `rm_wg` and
`async_rollout_manager`.

Batches are verl's: rows padded to the configured lengths, so that those of several calls can be joined.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quadriga.compat.verl.batch_functions import compute_response_mask
from quadriga.data.factory import pad_token_id
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rollout.interface import SamplingParams
from quadriga.trainer.ppo.groups import batch_of
from quadriga.trainer.ppo.row_functions import layout
from quadriga.trainer.ppo.scoring import function_scores

MODEL_INPUTS = ("input_ids", "attention_mask", "response_mask")
PROMPT_TENSORS = ("input_ids", "attention_mask", "position_ids")
UPDATE_COLUMNS = (
    *MODEL_INPUTS,
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "advantages",
    "returns",
    "values",
)


class WorkerGroupOfVerls:
    """The calls of one group; what a worker class of the recipe's own has registered is called as it is."""

    def __init__(self, driver: Any, group: Any) -> None:
        self._driver, self._group = driver, group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._group, name)

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys`, `[B, R]`."""
        return self._compute("compute_log_prob_and_entropy", data)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self._compute("compute_ref_log_prob", data)

    def compute_values(self, data: DataProto) -> DataProto:
        return self._compute("compute_values", data)

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` `[B, R]`: the score of each row on its last token."""
        rows = _with_response_mask(data).select(
            list(MODEL_INPUTS), [n for n in ("raw_prompt",) if n in data.non_tensor_batch]
        )
        return self._group.compute_rm_score(rows)

    def update_actor(self, data: DataProto) -> DataProto:
        told = self._update("update_actor", data, self._driver.own.config.actor_rollout_ref.actor.ppo_mini_batch_size)
        self._driver.own.updates += 1
        return told

    def update_critic(self, data: DataProto) -> DataProto:
        return self._update("update_critic", data, self._driver.own.config.critic.ppo_mini_batch_size)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return self._driver.async_rollout_manager.generate_sequences(prompts)

    def start_profile(self, **kwargs: Any) -> None: ...

    def stop_profile(self, **kwargs: Any) -> None: ...

    def _compute(self, method: str, data: DataProto) -> DataProto:
        rows = _with_response_mask(data).select(list(MODEL_INPUTS), [])
        rows.meta_info = {}
        return self._group.start(method, rows).get()

    def _update(self, method: str, data: DataProto, mini_prompts: int) -> DataProto:
        data = _with_response_mask(data)
        rows = data.select([name for name in UPDATE_COLUMNS if name in data.batch.keys()], [])  # noqa: SIM118
        n, workers = self._driver.own.config.actor_rollout_ref.rollout.n, self._group.world_size
        count = max(1, -(-len(rows) // (mini_prompts * n)))
        if len(rows) % (count * workers):
            raise DataError(
                f"{method} got {len(rows)} rows, which {workers} workers cannot share in {count} equal mini-batches",
                f"give it a multiple of {count * workers} rows",
            )
        lengths = rows.batch["attention_mask"].sum(1).tolist()
        order = layout(lengths, count, workers, self._driver.own.config.trainer.balance_batch)
        return self._driver.own.start_update(rows[order], self._group, method, count).get()


class RolloutManagerOfVerls:
    """`generate_sequences`: prompts, one for each response that is wanted, as rows with responses."""

    def __init__(self, driver: Any) -> None:
        self._driver, self._calls = driver, 0

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses by the newest weights, scored where a reward function of the run can.

        `meta_info`: `validate` samples as in validation, `do_sample=False` decodes greedily. Returns `prompts`, `responses`,
        `response_mask`, `input_ids`, `attention_mask`, `position_ids`, `rollout_log_probs` and, where scored, `rm_scores`.
        """
        began, own = time.perf_counter(), self._driver.own
        own.bring_weights()
        validates = bool(prompts.meta_info.get("validate"))
        params = self._params(prompts.meta_info, validates)
        manager = own.val_reward_fn if validates else own.reward_fn
        groups = own.stream.generate(self._table(prompts), 1, params, manager)
        batch = batch_of(groups, pad_token_id(own.tokenizer), lambda rows: rows)
        rows = self._padded(batch)
        if manager is not None:
            self._add_scores(rows, function_scores(batch, groups, manager, False), batch)
        rows.meta_info = {"timing": {"generate_sequences": time.perf_counter() - began}, **rows.meta_info}
        return rows

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...

    def _params(self, meta: Mapping[str, Any], validates: bool) -> SamplingParams:
        own = self._driver.own
        val = own.config.actor_rollout_ref.rollout.val_kwargs
        names = ("temperature", "top_p", "top_k", "do_sample")
        params = replace(own.sampling, **{name: getattr(val, name) for name in names}) if validates else own.sampling
        return replace(params, do_sample=False) if meta.get("do_sample") is False else params

    def _table(self, prompts: DataProto) -> DataProto:
        """The prompts as a batch of the loader's is, each row with random numbers of its own."""
        self._calls += 1
        columns = dict(prompts.non_tensor_batch)
        there = set() if prompts.batch is None else set(prompts.batch.keys())
        tensors = {name: prompts.batch[name] for name in PROMPT_TENSORS if name in there}
        if "input_ids" not in tensors:
            tensors = self._encoded(columns)
        rows = len(tensors["input_ids"])
        columns["index"] = np.arange(rows)
        columns["epoch"] = np.full(rows, self._calls)
        columns["uid"] = object_array([f"{self._calls}:{row}" for row in range(rows)])
        return DataProto.from_dict(tensors, columns)

    def _encoded(self, columns: Mapping[str, Any]) -> dict[str, Tensor]:
        own = self._driver.own
        if "raw_prompt_ids" in columns:
            rows = [list(map(int, ids)) for ids in columns["raw_prompt_ids"]]
        elif "raw_prompt" in columns:
            from quadriga.data.chat import ChatEncoder

            data = own.config.data
            encoder = ChatEncoder(own.tokenizer, data.chat_template, data.apply_chat_template_kwargs)
            rows = encoder.encode_prompts(list(columns["raw_prompt"]), lambda row: f"row {row}")
        else:
            raise DataError(
                "generate_sequences got no prompts", "give input_ids and attention_mask, raw_prompt_ids or raw_prompt"
            )
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), pad_token_id(own.tokenizer))
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = torch.tensor(tokens), 1
        return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def _padded(self, batch: DataProto) -> DataProto:
        """Every column as wide as the configured lengths."""
        data, fill = self._driver.own.config.data, pad_token_id(self._driver.own.tokenizer)
        told = batch.batch
        left = data.max_prompt_length - told["prompts"].shape[1]
        right = data.max_response_length - told["responses"].shape[1]
        prompts, responses = pad(told["prompts"], (left, 0), value=fill), pad(told["responses"], (0, right), value=fill)
        mask = pad(told["attention_mask"], (left, right))
        return DataProto.from_dict(
            {
                "prompts": prompts,
                "responses": responses,
                "input_ids": torch.cat([prompts, responses], 1),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "response_mask": pad(told["response_mask"], (0, right)),
                "rollout_log_probs": pad(told["rollout_log_probs"], (0, right)),
            },
            {"__num_turns__": np.array(batch.non_tensor_batch.get("turns", [2] * len(batch)), dtype=np.int32)},
        )

    def _add_scores(self, rows: DataProto, told: Mapping[str, Any], batch: DataProto) -> None:
        width = rows.batch["responses"].shape[1]
        if "reward_tensor" in told:
            rows.batch["rm_scores"] = pad(told["reward_tensor"], (0, width - told["reward_tensor"].shape[1]))
        else:
            rows.batch["rm_scores"] = scores = torch.zeros(len(rows), width)
            lengths = batch.batch["response_lengths"]
            some = (lengths > 0).nonzero(as_tuple=True)[0]
            scores[some, lengths[some] - 1] = told["row_scores"][some].float()
        extra = {"score": rows.batch["rm_scores"].sum(1).tolist(), **told.get("reward_extra_info", {})}
        for name, values in extra.items():
            rows.non_tensor_batch[name] = object_array(values)
        rows.meta_info["reward_extra_keys"] = list(extra)


class TrainLoaderOfVerls:
    """The run's prompts, an epoch at a time, as dicts of columns. What is left of an epoch after a resume comes first."""

    def __init__(self, loader: Any, extra: Any = None) -> None:
        self._loader, self._extra = loader, extra
        self._next: tuple[int, DataProto] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, batch = self._take()
        this = epoch
        while epoch == this:
            yield columns_of(batch)
            epoch, batch = self._take()
        self._next = epoch, batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = None
        self._loader.load_state_dict(state)

    def _take(self) -> tuple[int, DataProto]:
        taken, self._next = self._next, None
        return taken or self._loader.next_batch()


def columns_of(batch: DataProto) -> dict[str, Any]:
    """A batch of prompts as verl's loaders give it."""
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
    columns = {name: column for name, column in batch.non_tensor_batch.items() if name not in ("uid", "epoch")}
    columns["raw_prompt_ids"] = object_array([row[kept].tolist() for row, kept in zip(ids, mask)])
    return {**dict(batch.batch.items()), "dummy_tensor": torch.zeros(len(batch), 1, dtype=torch.uint8), **columns}


def _with_response_mask(data: DataProto) -> DataProto:
    if "response_mask" not in data.batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
        data.batch["response_mask"] = compute_response_mask(data)
    return data
