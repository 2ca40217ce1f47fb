"""The reward model in a slot."""

from __future__ import annotations

import torch

from quadriga.controller.dispatch import Dispatch, register
from quadriga.protocol import DataProto
from quadriga.workers.base import RunWorker
from quadriga.workers.updates import micro_batch_limits


class RewardModelWorker(RunWorker):
    """A frozen sequence classifier whose one label is the score of a whole response."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        from quadriga.engine import TrainingEngine
        from quadriga.models.load import load_reward_model

        self.engine = TrainingEngine(load_reward_model(self.config.reward_model.model), device=self.device_name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` `[B, R]`: the score on each response's last token, 0 elsewhere."""
        limits = micro_batch_limits(self.config.reward_model, "micro_batch_size_per_gpu", "max_token_len_per_gpu")
        scores = self.engine.scores(data, **limits)
        mask = data.batch["response_mask"]
        lengths = mask.sum(1)
        rm_scores = torch.zeros(mask.shape, dtype=torch.float32)
        rows = (lengths > 0).nonzero(as_tuple=True)[0]
        rm_scores[rows, lengths[rows] - 1] = scores[rows]
        return DataProto.from_dict(tensors={"rm_scores": rm_scores})
