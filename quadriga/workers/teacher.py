"""Teachers in a slot: frozen models that say how likely the student's own tokens are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quadriga.config.distillation import teachers_of
from quadriga.config.needs import need_teacher_top_k
from quadriga.config.schema import Config
from quadriga.controller.dispatch import Dispatch, register
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.workers.base import RunWorker
from quadriga.workers.updates import micro_batch_limits

if TYPE_CHECKING:
    from quadriga.engine import TrainingEngine

TEACHER_COLUMNS = {
    "log_probs": "teacher_log_probs",
    "top_ids": "teacher_top_ids",
    "top_log_probs": "teacher_top_log_probs",
}
"""What the engine tells of tokens, and the columns that it becomes."""


class TeacherWorker(RunWorker):
    """The teachers that are local models, all in the same slots. `teacher_index` of a row says whose it is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        from quadriga.checkpoint.huggingface import model_path
        from quadriga.engine import TrainingEngine
        from quadriga.engine.sharding import is_sharded
        from quadriga.models.load import load_policy, load_tokenizer, model_vocabulary

        student = self.config.actor_rollout_ref.model
        vocabulary = load_tokenizer(student.tokenizer_path or student.path, student.trust_remote_code).get_vocab()
        # Models of a family pad their vocabularies differently: the student must have a logit for every id in a top k.
        self.vocabulary = model_vocabulary(student.path, student.trust_remote_code)
        self.engines: dict[int, TrainingEngine] = {}
        for index, teacher in enumerate(teachers_of(self.config)):
            if not teacher.is_local:
                continue
            path = model_path(teacher.model_path)
            tokenizer = load_tokenizer(path, student.trust_remote_code)
            if tokenizer.get_vocab() != vocabulary:
                raise DataError(
                    f"the teacher {teacher.name} ({teacher.model_path}) has another vocabulary than the policy",
                    "a teacher must have the policy's tokenizer: its log-probs are of the policy's own tokens",
                )
            model = replace(student, path=path, tokenizer_path=None, lora_rank=0, override_config={})
            policy = load_policy(model, tokenizer, False, is_sharded(self.device_name))
            self.vocabulary = min(self.vocabulary, policy.huggingface.get_output_embeddings().weight.shape[0])
            self.engines[index] = TrainingEngine(policy, device=self.device_name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_teacher(self, data: DataProto) -> DataProto:
        """`teacher_log_probs` `[B, R]` and, for a loss on the top k, `teacher_top_ids`, `teacher_top_log_probs` `[B, R, k]`; 0 for
        the rows of teachers that are not here."""
        from quadriga.engine.sharding import max_over_ranks

        index, shape = data.batch["teacher_index"], data.batch["response_mask"].shape
        made = {"teacher_log_probs": torch.zeros(shape)}
        if top_k := min(need_teacher_top_k(self.config), self.vocabulary):
            made["teacher_top_ids"] = torch.zeros(*shape, top_k, dtype=torch.int32)
            made["teacher_top_log_probs"] = torch.zeros(*shape, top_k)
        for number, engine in self.engines.items():
            rows = (index == number).nonzero().squeeze(-1)
            if not max_over_ranks(len(rows), torch.device(self.device_name)):
                continue
            # A rank without rows of this teacher takes part in its collectives with a row that it then forgets.
            asked = rows if len(rows) else torch.zeros(1, dtype=torch.long)
            for name, column in taught_columns(engine, data[asked], self.config, self.vocabulary).items():
                made[name][rows] = column[: len(rows)]
        return DataProto.from_dict(tensors=made)


def taught_columns(
    engine: TrainingEngine, data: DataProto, config: Config, vocabulary: int | None = None
) -> dict[str, Tensor]:
    """The columns that one model adds to rows as their teacher, at the temperature of the student's sampling; the top k are of
    the first `vocabulary` ids."""
    rollout = config.actor_rollout_ref.rollout
    limits = micro_batch_limits(rollout, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
    statistics = engine.token_statistics(
        data, rollout.temperature, top_k=need_teacher_top_k(config), top_of=vocabulary, **limits
    )
    columns = {TEACHER_COLUMNS[name]: values for name, values in statistics.items()}
    if "teacher_top_ids" in columns:
        columns["teacher_top_ids"] = columns["teacher_top_ids"].int()  # half of what travels
    return columns
