"""Rows of a batch as text and numbers, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quadriga.protocol import DataProto
from quadriga.tracking.token_texts import TokenTexts

NEEDED = ("prompts", "responses", "attention_mask", "score")
OF_TOKENS = ("response_mask", "rollout_log_probs", "old_log_probs", "advantages")
"""Columns that are told of where the batch has them; each is about the tokens of a response."""
OF_EPISODES = ("turns", "tool_calls", "tool_errors", "finish_reason", "episode_error", "messages")
"""Columns that rows of episodes have."""
TOLD_TOKENS = 8192
"""So many response tokens of a batch are told of one by one, those of the first rows; of the others there is the text."""


def sample_rows(batch: DataProto, tokenizer: Any, source_column: str) -> list[dict[str, Any]]:
    """One dict a row: prompt, response, score, what the reward told; of the first rows, `tokens` besides.

    `tokens` has `ids`, `texts`, and where known `rollout_log_probs`, `trainer_log_probs` (before the update), `mask` (1:
    written by the policy, 0: read) and, where they differ, `advantages`: lists over the response's tokens. `source_column` is
    the column that names a row's data source.
    """
    present = [name for name in OF_TOKENS if name in batch.batch_keys()]
    pieces = TokenTexts(tokenizer)
    rows, left = [], TOLD_TOKENS
    for part in batch.fetch_in_parts((*NEEDED, *present)):
        for i, row in enumerate(_rows(part, tokenizer, source_column)):
            rows.append(row)
            left = left - row["response_tokens"] if row["response_tokens"] <= left else 0
            if left:
                tokens = _tokens(part, i, present)
                row["tokens"] = {**tokens, "texts": pieces.of(tokens["ids"])}
    return rows


def _rows(batch: DataProto, tokenizer: Any, source_column: str) -> Iterator[dict[str, Any]]:
    columns, tensors = batch.non_tensor_batch, batch.batch
    width = tensors["prompts"].shape[1]
    in_response = tensors["attention_mask"][:, width:].bool()
    prompts = [p[m.bool()].tolist() for p, m in zip(tensors["prompts"], tensors["attention_mask"][:, :width])]
    responses = [r[m].tolist() for r, m in zip(tensors["responses"], in_response)]
    prompt_texts = tokenizer.batch_decode(prompts, skip_special_tokens=True)
    response_texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores = tensors["score"].tolist()
    advantages: list[float] | None = None
    if "advantages" in tensors.keys():  # noqa: SIM118 (a TensorDict is no dict)
        mask = tensors["response_mask"]
        advantages = ((tensors["advantages"] * mask).sum(1) / mask.sum(1).clamp(min=1)).tolist()
    told = [name for name in columns if name.startswith("reward_") and name != "reward_model"]
    truths = columns.get("reward_model", [None] * len(batch))
    of_episode = [name for name in OF_EPISODES if name in columns]
    by_agent = columns.get("told", [None] * len(batch))
    for i in range(len(batch)):
        yield {
            "uid": columns["uid"][i],
            "sample_index": int(columns["sample_index"][i]),
            "data_source": columns[source_column][i],
            "prompt": prompt_texts[i],
            "response": response_texts[i],
            "ground_truth": (truths[i] or {}).get("ground_truth"),
            **{name: columns[name][i] for name in of_episode if columns[name][i] is not None},
            **(by_agent[i] or {}),
            **{name.removeprefix("reward_"): columns[name][i] for name in told},
            "score": scores[i],
            "response_tokens": len(responses[i]),
            **({"advantage": round(advantages[i], 6)} if advantages is not None else {}),
        }


def _tokens(batch: DataProto, row: int, present: list[str]) -> dict[str, list[Any]]:
    """What is known of the tokens of one response."""
    names = {"rollout_log_probs": "rollout_log_probs", "old_log_probs": "trainer_log_probs", "advantages": "advantages"}
    tensors = batch.batch
    in_response = tensors["attention_mask"][row, tensors["prompts"].shape[1] :].bool()
    told = {"ids": tensors["responses"][row][in_response].tolist()}
    for name in present:
        values = tensors[name][row][in_response]
        if name == "response_mask":
            told["mask"] = values.tolist()
        elif name != "advantages" or len(values.unique()) > 1:  # one for all of them is the row's own
            told[names[name]] = [round(value, 4) + 0.0 for value in values.to(torch.float64).tolist()]
    return told
