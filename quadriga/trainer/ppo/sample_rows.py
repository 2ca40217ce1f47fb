"""Rows of a batch as text and numbers, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from quadriga.protocol import DataProto
from quadriga.tracking.run_record import TokenTexts
from quadriga.trainer.ppo.contexts import without_filling

NEEDED = ("prompts", "responses", "attention_mask", "score")
OF_TOKENS = ("response_mask", "rollout_log_probs", "old_log_probs", "advantages")
"""Columns that are told of where the batch has them; each is about the tokens of a response."""
OF_EPISODES = ("context", "turns", "tool_calls", "tool_errors", "finish_reason", "episode_error", "messages")
"""Columns that rows of episodes have."""
WORTH_SHOWING = 64
"""Of a response that has no room as a whole, its ends are told of where there is room for so many tokens."""


def sample_rows(batch: DataProto, tokenizer: Any, source_column: str, most_tokens: int) -> list[dict[str, Any]]:
    """One dict a row: prompt, response, score, what the reward told; of some rows, `tokens` besides.

    `tokens` has `ids`, `texts`, and where known `rollout_log_probs`, `trainer_log_probs` (before the update), `mask` (1:
    written by the policy, 0: read) and, where they differ, `advantages`: lists over the response's tokens, in all rows
    together `most_tokens` at most (-1: all there are). Of a response that is too long, they are about its beginning and its end;
    `left_out` is then after how many of them something is missing, and how many tokens that is.

    Args:
        source_column: the column that names a row's data source.
    """
    batch = without_filling(batch)
    rows: list[dict[str, Any]] = []
    for part in batch.fetch_in_parts(
        NEEDED + tuple(name for name in ("response_mask", "advantages") if name in batch.batch_keys())
    ):
        rows += _rows(part, tokenizer, source_column)
    chosen = rows_with_tokens(rows, most_tokens)
    if not chosen:
        return rows
    present = [name for name in OF_TOKENS if name in batch.batch_keys()]
    pieces, places = TokenTexts(tokenizer), iter(chosen)
    for part in batch[list(chosen)].fetch_in_parts((*NEEDED, *present)):
        for i in range(len(part)):
            place = next(places)
            tokens = _ends(_tokens(part, i, present), chosen[place])
            rows[place]["tokens"] = {**tokens, "texts": pieces.of(tokens["ids"])}
    return rows


def rows_with_tokens(rows: Sequence[Mapping[str, Any]], most_tokens: int) -> dict[int, int]:
    """Which rows are told of token by token, and of how many tokens: `{row: tokens}`, in the order of the rows.

    First a whole group, whose samples are read side by side, then one sample of each outcome, then whatever has room; if
    nothing more has room as a whole, the ends of one that is too long.
    """
    lengths = [row["response_tokens"] for row in rows]
    if most_tokens < 0:
        return dict(enumerate(lengths))
    groups: dict[Any, list[int]] = {}
    outcomes: dict[Any, int] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row["uid"], []).append(place)
        outcomes.setdefault(row.get("outcome", (row["score"] or 0) > 0), place)
    group = next((own for own in groups.values() if sum(lengths[place] for place in own) <= most_tokens), [])
    left, chosen = most_tokens, dict[int, int]()
    for place in (*group, *outcomes.values(), *range(len(rows))):
        if place not in chosen and 0 < lengths[place] <= left:
            chosen[place] = lengths[place]
            left -= lengths[place]
    too_long = next((place for place, length in enumerate(lengths) if length > left and place not in chosen), None)
    if too_long is not None and left >= WORTH_SHOWING:
        chosen[too_long] = left
    return dict(sorted(chosen.items()))


def _ends(tokens: dict[str, Any], most: int) -> dict[str, Any]:
    """The first and the last of the tokens, `most` in all."""
    length = len(tokens["ids"])
    if length <= most:
        return tokens
    head, tail = (most + 1) // 2, most // 2
    cut = {name: values[:head] + values[length - tail :] for name, values in tokens.items()}
    return {**cut, "left_out": [head, length - most]}


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
