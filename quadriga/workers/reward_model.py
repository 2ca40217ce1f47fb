"""The reward model in a slot; rows in the tokens of another tokenizer, if it was not trained with the policy's."""

from __future__ import annotations

from typing import Any

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
        from quadriga.engine.sharding import is_sharded
        from quadriga.models.load import load_reward_model, load_tokenizer

        model, policy = self.config.reward_model.model, self.config.actor_rollout_ref.model
        self.policy_tokenizer = load_tokenizer(policy.tokenizer_path or policy.path, policy.trust_remote_code)
        self.tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
        self.rewrites = self.tokenizer.get_vocab() != self.policy_tokenizer.get_vocab()
        scorer = load_reward_model(model, self.tokenizer, is_sharded(self.device_name))
        self.engine = TrainingEngine(scorer, device=self.device_name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` `[B, R]`: the score on the last token that the policy wrote, 0 elsewhere. Rows whose tokens the model does
        not know are written anew from `raw_prompt` and the response's text."""
        limits = micro_batch_limits(self.config.reward_model, "micro_batch_size_per_gpu", "max_token_len_per_gpu")
        rows = rewritten(data, self.policy_tokenizer, self.tokenizer) if self.rewrites else data
        scores = self.engine.scores(rows, **limits)
        mask = data.batch["response_mask"]
        last = torch.where(mask.bool(), torch.arange(mask.shape[1]), -1).amax(1)  # before it, the policy may have read
        rm_scores = torch.zeros(mask.shape, dtype=torch.float32)
        some = (last >= 0).nonzero(as_tuple=True)[0]
        rm_scores[some, last[some]] = scores[some]
        return DataProto.from_dict(tensors={"rm_scores": rm_scores})


def rewritten(data: DataProto, policy_tokenizer: Any, tokenizer: Any) -> DataProto:
    """The prompts of `data` (column `raw_prompt`) with their responses as `tokenizer` writes them, padded left.

    Messages go through `tokenizer`'s own chat template, the response being the assistant's; plain prompts are continued. An episode
    of messages (column `messages`) goes through it as it is, and a plain one with all that was read in it.
    """
    width = data.batch["response_mask"].shape[1]
    there = data.batch["attention_mask"][:, -width:].bool()
    ids = [row[kept].tolist() for row, kept in zip(data.batch["input_ids"][:, -width:], there)]
    responses = policy_tokenizer.batch_decode(ids, skip_special_tokens=True)
    prompts = data.non_tensor_batch["raw_prompt"]
    episodes = data.non_tensor_batch.get("messages", [None] * len(prompts))
    rows = [_tokens(tokenizer, *row) for row in zip(prompts, responses, episodes)]
    longest = max(map(len, rows))
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(rows):
        input_ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        attention_mask[row, longest - len(tokens) :] = 1
    last = torch.ones(len(rows), 1, dtype=torch.long)
    return DataProto.from_dict(
        tensors={"input_ids": input_ids, "attention_mask": attention_mask, "response_mask": last}
    )


def _tokens(tokenizer: Any, prompt: Any, response: str, episode: list[Any] | None) -> list[int]:
    if episode and tokenizer.chat_template is not None:
        return tokenizer.encode(tokenizer.apply_chat_template(episode, tokenize=False), add_special_tokens=False)
    if isinstance(prompt, str) or tokenizer.chat_template is None:
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return tokenizer.encode(text + response)
    messages = [*prompt, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)
