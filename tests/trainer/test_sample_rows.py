"""Which samples of a step are kept token by token, and of how many tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quadriga.checkpoint.huggingface import model_path
from quadriga.dashboard.samples import shown_sample
from quadriga.models.load import load_tokenizer
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.ppo.sample_rows import rows_with_tokens, sample_rows


def rows_of(*lengths: int, group: int = 1, outcomes: str = "") -> list[dict[str, Any]]:
    """Rows with responses of these lengths, `group` of them to a prompt; outcomes by their first letters."""
    named = {"c": "correct", "w": "wrong", "u": "unparsed"}
    return [
        {
            "uid": k // group,
            "response_tokens": length,
            "score": 0.0,
            "outcome": named[outcomes[k] if outcomes else "w"],
        }
        for k, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("lengths", "most", "chosen"),
    [
        ((9000, 100, 100), 8192, {0: 7992, 1: 100, 2: 100}),
        ((8192,), 8192, {0: 8192}),
        ((100, 92, 8000), 8192, {0: 100, 1: 92, 2: 8000}),
        ((20_000, 30_000), 8192, {0: 8192}),
        ((8150, 100), 8192, {0: 8150}),
        ((5, 0, 7), 100, {0: 5, 2: 7}),
        ((100, 200), 0, {}),
        ((100, 200), -1, {0: 100, 1: 200}),
    ],
    ids=["long first", "exact", "sum exact", "all too long", "ends not worth it", "empty", "none", "all"],
)
def test_as_many_as_have_room_and_the_ends_of_one_that_has_none(lengths, most, chosen) -> None:
    assert rows_with_tokens(rows_of(*lengths), most) == chosen


def test_first_a_whole_group_then_one_of_each_outcome() -> None:
    rows = rows_of(60, 60, 40, 40, 10, 10, 10, 10, group=2, outcomes="wwwwcuww")
    assert rows_with_tokens(rows, 100) == {2: 40, 3: 40, 4: 10, 5: 10}, "the first group has no room as a whole"


def test_the_tokens_kept_are_those_of_their_rows() -> None:
    tokenizer = load_tokenizer(model_path("builtin:arithmetic"))
    texts = ["1234567890" * 20, "12", "34+5"]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    width = max(map(len, ids))
    responses = torch.zeros(3, width, dtype=torch.long)
    mask = torch.zeros(3, width, dtype=torch.long)
    for row, own in enumerate(ids):
        responses[row, : len(own)], mask[row, : len(own)] = torch.tensor(own), 1
    prompt = torch.tensor([tokenizer.encode("1+1=", add_special_tokens=False)] * 3)
    batch = DataProto.from_dict(
        {
            "prompts": prompt,
            "responses": responses,
            "attention_mask": torch.cat([torch.ones_like(prompt), mask], 1),
            "response_mask": mask,
            "rollout_log_probs": -torch.arange(width).repeat(3, 1).float(),
            "score": torch.tensor([0.0, 1.0, 0.0]),
        },
        {
            "uid": object_array(["0:0", "0:1", "0:2"]),
            "sample_index": np.zeros(3, dtype=np.int64),
            "data_source": object_array(["a"] * 3),
        },
    )
    rows = sample_rows(batch, tokenizer, "data_source", 80 + len(ids[1]) + len(ids[2]))
    assert [row["response"] for row in rows] == texts
    assert "".join(rows[1]["tokens"]["texts"]) == "12"
    assert rows[2]["tokens"]["ids"] == ids[2]
    tokens = rows[0]["tokens"]
    assert tokens["left_out"] == [40, len(ids[0]) - 80]
    assert tokens["ids"] == ids[0][:40] + ids[0][-40:]
    assert tokens["rollout_log_probs"] == [-float(k) for k in (*range(40), *range(len(ids[0]) - 40, len(ids[0])))]
    assert shown_sample(rows[0], 0)["tokens"]["left_out"] == tokens["left_out"]
    assert all("tokens" not in row for row in sample_rows(batch, tokenizer, "data_source", 0))
