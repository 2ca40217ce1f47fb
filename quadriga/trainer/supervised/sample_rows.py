"""Examples of a supervised run with what the model said of them, as text and numbers, for people."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quadriga.tracking.run_record import TokenTexts

KEPT_EXAMPLES = 64
"""Of a validation, or of a step where there is none."""


def answer_rows(tokenizer: Any, columns: dict[str, Tensor], log_probs: Tensor) -> list[dict[str, Any]]:
    """One dict an example: its text up to the first token learnt from, what follows, and the log-prob of each token there.

    Args:
        columns: `input_ids`, `attention_mask` `[B, T]`, and `response_mask` `[B, T-1]`, which is about token t + 1.
        log_probs: `[B, T-1]`, of token t + 1.
    """
    texts, rows = TokenTexts(tokenizer), []
    for ids, real, mask, said in zip(
        columns["input_ids"], columns["attention_mask"], columns["response_mask"], log_probs
    ):
        length = int(real.sum())
        learnt = mask[: length - 1].bool()
        start = int(learnt.nonzero()[0]) if learnt.any() else length - 1
        answer, values = ids[start + 1 : length].tolist(), said[start : length - 1].double()
        rows.append(
            {
                "prompt": tokenizer.decode(ids[: start + 1].tolist(), skip_special_tokens=True),
                "response": tokenizer.decode(answer, skip_special_tokens=True),
                "response_tokens": len(answer),
                "loss": round(float(-said[: length - 1][learnt].double().mean()), 6) if learnt.any() else None,
                "tokens": {
                    "ids": answer,
                    "texts": texts.of(answer),
                    "trainer_log_probs": [round(value, 4) + 0.0 for value in values.tolist()],
                    "mask": learnt[start:].long().tolist(),
                },
            }
        )
    return rows


def pair_rows(tokenizer: Any, columns: dict[str, Tensor], rewards: Tensor) -> list[dict[str, Any]]:
    """One dict a pair: what both answers begin with, the two answers, and the reward of each, `[2 pairs]`."""
    kept = [ids[real.bool()].tolist() for ids, real in zip(columns["input_ids"], columns["attention_mask"])]
    rows = []
    for chosen, rejected, value in zip(kept[::2], kept[1::2], rewards.view(-1, 2).double().tolist()):
        common = next((k for k, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        rows.append(
            {
                "prompt": tokenizer.decode(chosen[:common], skip_special_tokens=True),
                "chosen": tokenizer.decode(chosen[common:], skip_special_tokens=True),
                "rejected": tokenizer.decode(rejected[common:], skip_special_tokens=True),
                "chosen_reward": round(value[0], 6),
                "rejected_reward": round(value[1], 6),
                "acc": float(value[0] > value[1]),
            }
        )
    return rows
