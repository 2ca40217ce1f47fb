"""Rows of a batch as text and numbers, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quadriga.controller.remote_batch import RemoteBatch, in_parts
from quadriga.protocol import DataProto


def sample_rows(batch: DataProto | RemoteBatch, tokenizer: Any, source_column: str) -> list[dict[str, Any]]:
    """One dict a row. `source_column` is the column that names a row's data source."""
    needed = ("prompts", "responses", "attention_mask", "score")
    return [row for part in in_parts(batch, needed) for row in _rows(part, tokenizer, source_column)]


def _rows(batch: DataProto, tokenizer: Any, source_column: str) -> Iterator[dict[str, Any]]:
    columns, tensors = batch.non_tensor_batch, batch.batch
    width = tensors["prompts"].shape[1]
    prompts = [p[m.bool()].tolist() for p, m in zip(tensors["prompts"], tensors["attention_mask"][:, :width])]
    responses = [r[m.bool()].tolist() for r, m in zip(tensors["responses"], tensors["attention_mask"][:, width:])]
    prompt_texts = tokenizer.batch_decode(prompts, skip_special_tokens=True)
    response_texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores = tensors["score"].tolist()
    told = [name for name in columns if name.startswith("reward_") and name != "reward_model"]
    truths = columns.get("reward_model", [None] * len(batch))
    for i in range(len(batch)):
        yield {
            "uid": columns["uid"][i],
            "sample_index": int(columns["sample_index"][i]),
            "data_source": columns[source_column][i],
            "prompt": prompt_texts[i],
            "response": response_texts[i],
            "ground_truth": (truths[i] or {}).get("ground_truth"),
            **{name.removeprefix("reward_"): columns[name][i] for name in told},
            "score": scores[i],
        }
