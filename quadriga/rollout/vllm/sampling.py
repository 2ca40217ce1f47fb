"""vLLM's sampler, asked for both log-probs of a token, and our sampling parameters in vLLM's words. For the engine process."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native.sequence import Sequence

GREEDY_BELOW = 1e-5
"""vLLM takes a lower temperature for greedy."""


class TwoLogProbs(Sampler):
    """Records two log-probs of each token: of the distribution it was sampled from, and of softmax(logits / temperature)."""

    def __init__(self) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self.alters = False
        """Whether a request is under way for which the two differ."""

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        untouched = logits.to(torch.float32, copy=True) if self.alters else None
        output = super().forward(logits, sampling_metadata, *args, **kwargs)
        told = output.logprobs_tensors
        sampled, full = told.logprobs[:, :1], told.logprobs[:, :1]
        if untouched is not None:
            if (temperature := sampling_metadata.temperature) is not None:
                untouched /= torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
            tokens = output.sampled_token_ids[:, :1].long()
            full = untouched.gather(1, tokens) - untouched.logsumexp(-1, keepdim=True)
        ids = told.logprob_token_ids[:, :1].expand(-1, 2)
        output.logprobs_tensors = LogprobsTensors(ids, torch.cat([sampled, full], 1), told.selected_token_ranks)
        return output

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Of the sampled tokens alone, and without their ranks, for which vLLM would compile a kernel."""
        ids = token_ids.unsqueeze(-1)
        return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), torch.zeros_like(token_ids))


def alters(params: SamplingParams) -> bool:
    """Whether tokens are sampled from another distribution than softmax(logits / temperature)."""
    cuts = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return cuts or params.repetition_penalty != 1 or params.min_new_tokens > 0


def in_words_of_vllm(sample: Sequence, eos_token_ids: Items[int]) -> VllmSamplingParams:
    """The parameters of one sample; its seed is a function of what it is, not of when or where it is generated."""
    params = sample.request.params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    cuts: dict[str, Any] = {}
    if not params.greedy:
        cuts = {"top_k": max(params.top_k, 0), "top_p": params.top_p, "min_p": params.min_p}
    return VllmSamplingParams(
        temperature=0.0 if params.greedy else params.temperature,
        repetition_penalty=params.repetition_penalty,
        seed=sample.key,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        stop_token_ids=sorted(ends),
        ignore_eos=True,  # the model's end tokens are among those above
        logprobs=0,
        detokenize=False,
        **cuts,
    )
