"""Rows in the tokens of another tokenizer, for a reward model that was not trained with the policy's."""

from __future__ import annotations

from typing import Any

import torch

from quadriga.protocol import DataProto


def rewritten(data: DataProto, policy_tokenizer: Any, tokenizer: Any) -> DataProto:
    """The prompts of `data` (column `raw_prompt`) with their responses as `tokenizer` writes them, padded left.

    Messages go through `tokenizer`'s own chat template, the response being the assistant's; plain prompts are continued.
    """
    mask = data.batch["response_mask"].bool()
    width = mask.shape[1]
    ids = [row[kept].tolist() for row, kept in zip(data.batch["input_ids"][:, -width:], mask)]
    responses = policy_tokenizer.batch_decode(ids, skip_special_tokens=True)
    rows = [_tokens(tokenizer, p, r) for p, r in zip(data.non_tensor_batch["raw_prompt"], responses)]
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


def _tokens(tokenizer: Any, prompt: Any, response: str) -> list[int]:
    if isinstance(prompt, str) or tokenizer.chat_template is None:
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return tokenizer.encode(text + response)
    messages = [*prompt, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)
