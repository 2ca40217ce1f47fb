"""What the teachers of a run say of a batch: rows find their teacher, with a hint in the prompt where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.config.distillation import SELF, teachers_of
from quadriga.config.needs import need_teacher_top_k
from quadriga.config.schema import Config
from quadriga.data.chat import ChatEncoder
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.trainer.ppo.crew import Crew
from quadriga.trainer.ppo.teacher_endpoint import TeacherEndpoint, TokenLogProbs

MODEL_INPUTS = ["input_ids", "attention_mask", "response_mask"]
Order = Callable[[DataProto, Any, int], np.ndarray]


class Teachers:
    """The teachers of `distillation.teacher_models`.

    Args:
        config: the run's; distillation is on.
        tokenizer: the policy's, for hints.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config, self.section, self.tokenizer = config, config.distillation, tokenizer
        self.teachers = teachers_of(config)
        self.by_key = {teacher.key: index for index, teacher in enumerate(self.teachers)}
        self.endpoints = {
            index: TeacherEndpoint(teacher, self.section.timeout_s, self.section.max_concurrent)
            for index, teacher in enumerate(self.teachers)
            if teacher.endpoint
        }
        data = config.data
        self.encoder = ChatEncoder(tokenizer, data.chat_template, data.apply_chat_template_kwargs)

    def rehearse(self) -> None:
        """Ask each server for two tokens, before anything is generated for it. WorkerError if it cannot teach."""
        for endpoint in self.endpoints.values():
            endpoint.score([([0, 1], 1)], min(need_teacher_top_k(self.config), len(self.tokenizer)))

    def add(self, batch: DataProto, crew: Crew, order_for: Order) -> None:
        """Add `teacher_index` `[B]`, `teacher_mask` `[B, R]` (1: a teacher judges this token), `teacher_log_probs` `[B, R]` and, for a
        loss on the top k, `teacher_top_ids` and `teacher_top_log_probs` `[B, R, k]`."""
        index = self.route(batch)
        hints = self.hints(batch)
        needs_rows = hints is not None or bool(self.endpoints)
        rows = batch.select(MODEL_INPUTS, [])
        rows = rows.fetch() if needs_rows else rows
        mask = batch.select(["response_mask"], []).fetch().batch["response_mask"]
        if hints is not None:
            rows = self.with_hints(rows, batch.non_tensor_batch["raw_prompt"], hints)
            mask = mask * torch.tensor([[hint is not None] for hint in hints])
        rows.batch["teacher_index"] = index
        columns = self._local_columns(rows, batch, crew, order_for)
        for number, endpoint in self.endpoints.items():
            columns = self._merged(columns, rows, (index == number).nonzero().squeeze(-1), endpoint)
        columns.batch["teacher_index"], columns.batch["teacher_mask"] = index, mask
        batch.put_columns(columns)

    def route(self, batch: DataProto) -> Tensor:
        """Each row's teacher, `[B]`. DataError for a row that nobody teaches."""
        name = self.section.teacher_key
        if len(self.teachers) == 1:
            return torch.zeros(len(batch), dtype=torch.long)
        if name not in batch.non_tensor_batch:
            raise DataError(
                f"distillation.teacher_key={name}: the data has no such column",
                f"use one of {', '.join(batch.non_tensor_batch)}",
            )
        values = [str(value) for value in batch.non_tensor_batch[name]]
        for row, value in enumerate(values):
            if value not in self.by_key and None not in self.by_key:
                raise DataError(
                    f"row {row} has {name}={value!r}, and no teacher has that key",
                    "give a teacher of distillation.teacher_models that key, or leave one without a key for all other rows",
                )
        return torch.tensor([self.by_key.get(value, self.by_key.get(None, 0)) for value in values])

    # ---- hints ----

    def hints(self, batch: DataProto) -> list[str | None] | None:
        """What the teacher of each row is shown, None for nothing; None instead of the list where there are no hints."""
        kind = self.section.hint
        if kind == "none":
            return None
        if "context" in batch.non_tensor_batch:
            raise DataError(
                f"distillation.hint={kind}: agents have begun further contexts in their episodes, whose prompts are their own",
                "set distillation.hint=none, or let the agents append to their messages only",
            )
        if kind == "sibling":
            return self._successful_siblings(batch)
        columns = batch.non_tensor_batch
        if kind in columns:
            values = list(columns[kind])
        else:
            values = [dict(info or {}).get(kind) for info in columns.get("extra_info", [])]
        if not any(values):
            raise DataError(
                f"distillation.hint={kind}: neither a column of the data nor a key of extra_info with a text",
                "set it to one that there is, to sibling, or to none",
            )
        return [str(value) if value else None for value in values]

    def _successful_siblings(self, batch: DataProto) -> list[str | None]:
        """For each row the next response to the same prompt that scores at least `hint_min_score`, as text."""
        rows = batch.select(["responses", "response_mask", "score"], ["uid"]).fetch()
        good = (rows.batch["score"] >= self.section.hint_min_score).tolist()
        by_prompt: dict[Any, list[int]] = {}
        for row, uid in enumerate(rows.non_tensor_batch["uid"]):
            by_prompt.setdefault(uid, []).append(row)
        chosen: list[int | None] = [None] * len(good)
        for members in by_prompt.values():
            for place, row in enumerate(members):
                others = members[place + 1 :] + members[:place]
                chosen[row] = next((other for other in others if good[other]), None)
        width = rows.batch["response_mask"].shape[1]
        kept = rows.batch["response_mask"].bool()
        ids = {row: rows.batch["responses"][row, :width][kept[row]].tolist() for row in set(chosen) - {None}}
        texts = dict(zip(ids, self.tokenizer.batch_decode(list(ids.values()), skip_special_tokens=True)))
        return [None if row is None else texts[row] for row in chosen]

    def with_hints(self, rows: DataProto, prompts: Any, hints: list[str | None]) -> DataProto:
        """The rows with the hint in the prompt, and the very tokens of the response; rows without a hint as they are."""
        ids, mask, responses = (rows.batch[name] for name in MODEL_INPUTS)
        before = ids.shape[1] - responses.shape[1]
        hinted = [row for row, hint in enumerate(hints) if hint is not None]
        asked = [
            _with_hint(prompts[row], self.section.hint_template.replace("{hint}", hints[row] or "")) for row in hinted
        ]
        encoded = dict(zip(hinted, self.encoder.encode_prompts(asked, lambda i: f"row {hinted[i]}"))) if hinted else {}
        own = [encoded.get(row, ids[row, :before][mask[row, :before].bool()].tolist()) for row in range(len(hints))]
        width = max(map(len, own))
        new_ids, new_mask = (
            torch.zeros(len(own), width, dtype=ids.dtype),
            torch.zeros(len(own), width, dtype=mask.dtype),
        )
        for row, tokens in enumerate(own):
            new_ids[row, width - len(tokens) :] = torch.tensor(tokens)
            new_mask[row, width - len(tokens) :] = 1
        return DataProto.from_dict(
            {
                "input_ids": torch.cat([new_ids, ids[:, before:]], 1),
                "attention_mask": torch.cat([new_mask, mask[:, before:]], 1),
                "response_mask": responses,
            }
        )

    # ---- who answers ----

    def _local_columns(self, rows: DataProto, batch: DataProto, crew: Crew, order_for: Order) -> DataProto:
        """By the workers: the teachers' own, or the policy's where it teaches itself."""
        if any(teacher.model_path == SELF for teacher in self.teachers):
            group, method = crew.actor, "compute_self_teacher"
        elif any(teacher.is_local for teacher in self.teachers):
            group, method = crew.teacher, "compute_teacher"
        else:
            return DataProto.from_dict({"teacher_index": rows.batch["teacher_index"]})
        order = order_for(batch, group, 1)
        columns = group.start(method, rows[order]).get()
        columns.reorder(torch.from_numpy(np.argsort(order)))
        return columns

    def _merged(self, columns: DataProto, rows: DataProto, chosen: Tensor, endpoint: TeacherEndpoint) -> DataProto:
        """The columns with what an endpoint says of the chosen rows."""
        top_k = min(need_teacher_top_k(self.config), len(self.tokenizer))
        ids, valid, wanted = (rows.batch[name] for name in MODEL_INPUTS)
        ends = [int(wanted[row].nonzero().max()) + 1 if wanted[row].any() else 0 for row in chosen]
        before = ids.shape[1] - wanted.shape[1]
        asked = [
            (ids[row][: before + end][valid[row][: before + end].bool()].tolist(), end)
            for row, end in zip(chosen, ends)
        ]
        told = endpoint.score(asked, top_k)
        made = {name: column.clone() for name, column in columns.fetch().batch.items()}
        shape = tuple(wanted.shape)
        made.setdefault("teacher_log_probs", torch.zeros(shape))
        if top_k:
            made.setdefault("teacher_top_ids", torch.zeros(*shape, top_k, dtype=torch.int32))
            made.setdefault("teacher_top_log_probs", torch.zeros(*shape, top_k))
        for row, end, said in zip(chosen.tolist(), ends, told):
            _fill(made, row, end, said)
        return DataProto.from_dict(made)


def _fill(columns: dict[str, Tensor], row: int, end: int, said: TokenLogProbs) -> None:
    if not end:
        return
    columns["teacher_log_probs"][row, :end] = torch.tensor(said.log_probs)
    if "teacher_top_ids" in columns:
        columns["teacher_top_ids"][row, :end] = torch.tensor(said.top_ids, dtype=torch.int32)
        columns["teacher_top_log_probs"][row, :end] = torch.tensor(said.top_log_probs)


def _with_hint(prompt: Any, hint: str) -> Any:
    """A chat with the hint after its last message, or a plain prompt with the hint before it."""
    if isinstance(prompt, str):
        return f"{hint}\n{prompt}"
    messages = [dict(message) for message in prompt]
    messages[-1]["content"] = f"{messages[-1]['content']}\n\n{hint}"
    return messages
