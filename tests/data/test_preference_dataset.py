"""Preference pairs: two conversations a row, in the layouts that files have."""

from __future__ import annotations

import pytest

from quadriga.data import PreferenceDataset, collate_pairs
from quadriga.errors import DataError

USER = {"role": "user", "content": "1+1="}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "three"}


def texts(dataset, tokenizer):
    item = dataset[0]
    return [tokenizer.decode(item[side]["input_ids"]) for side in ("chosen", "rejected")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "three"},
        {"prompt": [USER], "chosen": "2", "rejected": "three"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "1+1=", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_every_layout_is_the_same_pair_of_chats(write, tokenizer, row):
    dataset = PreferenceDataset(write([row]), tokenizer, max_length=99)
    chats = [tokenizer.apply_chat_template([USER, answer], tokenize=False) for answer in (GOOD, BAD)]
    assert texts(dataset, tokenizer) == chats
    for side, answer in (("chosen", "2<|im_end|>"), ("rejected", "three<|im_end|>")):
        item = dataset[0][side]
        assert tokenizer.decode(item["input_ids"][item["loss_mask"] > 0]) == answer


def test_without_a_template_a_pair_is_plain_text(write, tokenizer_without_template):
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    dataset = PreferenceDataset(write(rows), tokenizer_without_template, max_length=99)
    assert texts(dataset, tokenizer_without_template) == ["1+1=2<eos>", "1+1=3<eos>"]


def test_a_batch_has_chosen_and_rejected_side_by_side(write, tokenizer_without_template):
    rows = [{"prompt": str(i), "chosen": "a" * (i + 1), "rejected": "b"} for i in range(3)]
    dataset = PreferenceDataset(write(rows), tokenizer_without_template, max_length=99)
    items = [dataset[i] | {"uid": f"0:{i}", "epoch": 0} for i in (2, 0)]
    batch = collate_pairs(items, pad_token_id=tokenizer_without_template.pad_token_id)
    decoded = [
        tokenizer_without_template.decode(ids[mask.bool()])
        for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"])
    ]
    assert decoded == ["2aaa<eos>", "2b<eos>", "0a<eos>", "0b<eos>"]
    assert batch.non_tensor_batch["uid"].tolist() == ["0:2", "0:2", "0:0", "0:0"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "x"}, "there is no 'rejected'"),
        ({"prompt": "a", "chosen": "x", "rejected": "x"}, "chosen and rejected are the same"),
        ({"chosen": "x", "rejected": "y"}, "'chosen' is an answer as text, and there is no prompt"),
        ({"prompt": [{"content": "a"}], "chosen": "x", "rejected": "y"}, "'role' must be a non-empty string"),
        ({"chosen": [USER], "rejected": [USER, BAD]}, "no message of the role 'assistant'"),
    ],
)
def test_a_bad_pair_is_named_with_file_row_and_fix(write, tokenizer, row, message):
    with pytest.raises(DataError, match=f"row 0.*{message}") as caught:
        PreferenceDataset(write([row]), tokenizer, max_length=99)
    assert caught.value.fix


def test_a_pair_with_an_empty_side_is_left_out_as_a_whole(write, tokenizer):
    rows = [{"prompt": "a", "chosen": "x", "rejected": ""}, {"prompt": "b", "chosen": "x", "rejected": "y"}]
    with pytest.raises(DataError, match="1 of 2 rows have nothing to learn from"):
        PreferenceDataset(write(rows), tokenizer, max_length=99)
    dataset = PreferenceDataset(write(rows), tokenizer, max_length=99, empty_response="skip")
    assert (len(dataset), dataset[0]["index"]) == (1, 1)
