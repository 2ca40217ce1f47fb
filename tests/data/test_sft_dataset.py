"""The SFT dataset: the ids of the whole chat template, and a mask on exactly what the assistant writes."""

from __future__ import annotations

import json
import logging
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from tiny_data import CHAT_TEMPLATE, make_tokenizer

from quadriga.data import BatchLoader, ResumableSampler, SFTDataset, collate_sft
from quadriga.errors import DataError

TWO_TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2=?"},
    {"role": "assistant", "content": "It is 4."},
]


def targets(item, tokenizer) -> list[str]:
    """The runs of target tokens, as text."""
    mask = np.concatenate([[0], item["loss_mask"], [0]]).astype(int)
    borders = np.flatnonzero(np.diff(mask))
    return [tokenizer.decode(item["input_ids"][start:end]) for start, end in zip(borders[::2], borders[1::2])]


def chats(write, *conversations):
    return write([{"messages": conversation} for conversation in conversations])


def test_only_what_the_assistant_writes_is_a_target(write, tokenizer):
    dataset = SFTDataset(chats(write, TWO_TURNS), tokenizer, max_length=999, messages_key="messages")
    assert targets(dataset[0], tokenizer) == ["2<|im_end|>", "It is 4.<|im_end|>"]


def test_ids_are_those_of_the_whole_template(write, tokenizer):
    dataset = SFTDataset(chats(write, TWO_TURNS, TWO_TURNS[1:3]), tokenizer, max_length=999, messages_key="messages")
    for item, chat in zip(dataset, (TWO_TURNS, TWO_TURNS[1:3])):
        assert item["input_ids"].tolist() == tokenizer.apply_chat_template(chat, return_dict=False)


def real_conversations(shared_dir):
    lines = (shared_dir / "data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    examples = [json.loads(line) for line in lines]
    singles = [
        [{"role": "user", "content": e["question"]}, {"role": "assistant", "content": e["answer"]}] for e in examples
    ]
    doubles = [left + right for left, right in pairwise(singles[:20])]
    odd = [
        {"role": "system", "content": "Ты — помощник. 😀"},
        {"role": "user", "content": "\n\nassistant\n "},
        {"role": "assistant", "content": "двe  😀 assistant\n\n"},
        {"role": "user", "content": "<think>x</think>"},
        {"role": "assistant", "content": ""},
    ]
    return [*singles, *doubles, odd]


def test_real_templates_are_matched_exactly(write, real_tokenizer, shared_dir):
    conversations = real_conversations(shared_dir)
    dataset = SFTDataset(chats(write, *conversations), real_tokenizer, max_length=9999, messages_key="messages")
    assert len(dataset) == len(conversations)
    for item, chat in zip(dataset, conversations):
        assert item["input_ids"].tolist() == real_tokenizer.apply_chat_template(chat, return_dict=False)
        answers = [m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant"]
        assert targets(item, real_tokenizer) == answers


def test_prefix_and_generation_marks_agree_on_real_tokenizers(write, real_tokenizer, shared_dir):
    marked = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    )
    unmarked = CHAT_TEMPLATE
    path = chats(write, *real_conversations(shared_dir))
    by_marks, by_prefix = (
        SFTDataset(path, real_tokenizer, max_length=9999, messages_key="messages", chat_template=template)
        for template in (marked, unmarked)
    )
    for left, right in zip(by_marks, by_prefix):
        assert left["input_ids"].tolist() == right["input_ids"].tolist()
        assert left["loss_mask"].tolist() == right["loss_mask"].tolist()


def test_generation_marks_of_a_template_are_followed(write):
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    dataset = SFTDataset(chats(write, TWO_TURNS), tokenizer, max_length=999, messages_key="messages")
    assert targets(dataset[0], tokenizer) == ["2<eos>", "It is 4.<eos>"]


def test_without_an_end_of_turn_token_the_closing_line_break_is_learnt(write):
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(template)
    dataset = SFTDataset(chats(write, TWO_TURNS), tokenizer, max_length=999, messages_key="messages")
    assert targets(dataset[0], tokenizer) == ["2\n", "It is 4.\n"]


def test_a_token_that_straddles_the_border_is_reported_and_not_a_target(write, caplog):
    tokenizer = make_tokenizer(merges=(("\n", "\n"),))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    with caplog.at_level(logging.WARNING):
        dataset = SFTDataset(chats(write, chat, TWO_TURNS), tokenizer, max_length=999, messages_key="messages")
    assert dataset[0]["input_ids"].tolist() == tokenizer.apply_chat_template(chat, return_dict=False)
    assert targets(dataset[0], tokenizer) == ["b<|im_end|>"]
    assert "1 of 2 rows have a token that is half prompt and half answer" in caplog.text


FORGETS_EARLIER_ANSWERS = (  # as templates of reasoning models do
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKS_IN_OTHER_WORDS_THAN_IT_ANSWERS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[you]{% endif %}"
)


@pytest.mark.parametrize("template", [FORGETS_EARLIER_ANSWERS, ASKS_IN_OTHER_WORDS_THAN_IT_ANSWERS])
def test_a_template_that_rewrites_turns_is_an_error_not_a_wrong_mask(write, template):
    with pytest.raises(DataError, match="row 0, message 2: the chat template renders this turn differently") as caught:
        SFTDataset(chats(write, TWO_TURNS), make_tokenizer(template), max_length=999, messages_key="messages")
    assert "{% generation %}" in caught.value.fix


def test_prompt_and_response_columns_are_a_chat_of_two_messages(write, tokenizer):
    rows = [
        {"question": "1+1=", "answer": "2"},
        {"question": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": "a"},
    ]
    dataset = SFTDataset(write(rows), tokenizer, max_length=99, prompt_key="question", response_key="answer")
    assert tokenizer.decode(dataset[0]["input_ids"]) == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    assert targets(dataset[0], tokenizer) == ["2<|im_end|>"]
    assert tokenizer.decode(dataset[1]["input_ids"]).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu")


def test_without_a_template_prompt_and_response_are_plain_text_and_eos(write):
    tokenizer = make_tokenizer(None, bos=True)
    dataset = SFTDataset(write([{"prompt": "1+1=", "response": "#### 2"}]), tokenizer, max_length=99)
    assert tokenizer.decode(dataset[0]["input_ids"]) == "<bos>1+1=#### 2<eos>"
    assert targets(dataset[0], tokenizer) == ["#### 2<eos>"]


def test_nested_columns_are_followed(tokenizer_without_template):
    dataset = SFTDataset(
        "builtin:arithmetic/test",
        tokenizer_without_template,
        max_length=99,
        response_key="extra_info",
        response_dict_keys=["answer"],
        max_samples=2,
    )
    assert targets(dataset[0], tokenizer_without_template)[0].startswith("#### ")


@pytest.mark.parametrize(
    ("mode", "text", "target"),
    [("right", "1+1=#", ["#"]), ("left", "## 2<eos>", ["## 2<eos>"]), ("middle", "1+ 2<eos>", [" 2<eos>"])],
)
def test_truncation_cuts_ids_and_mask_together(write, tokenizer_without_template, mode, text, target):
    path = write([{"prompt": "1+1=", "response": "#### 2"}])
    dataset = SFTDataset(path, tokenizer_without_template, max_length=5, truncation=mode)
    assert tokenizer_without_template.decode(dataset[0]["input_ids"]) == text
    assert targets(dataset[0], tokenizer_without_template) == target


def test_an_overlong_example_is_an_error_with_file_row_and_both_lengths(write, tokenizer_without_template):
    path = write([{"prompt": "1", "response": "2"}, {"prompt": "1+1=", "response": "#### 2"}])
    with pytest.raises(DataError, match=r"train.jsonl, row 1: the example has 11 tokens, data.max_length is 10"):
        SFTDataset(path, tokenizer_without_template, max_length=10)


def test_rows_without_a_target_after_truncation_are_an_error_or_left_out(write, tokenizer_without_template, caplog):
    path = write([{"prompt": "123456", "response": "2"}, {"prompt": "1", "response": "2"}])
    options = {"max_length": 4, "truncation": "right"}
    with pytest.raises(DataError, match=r"1 of 2 rows have nothing to learn from.*, row 0") as caught:
        SFTDataset(path, tokenizer_without_template, **options)
    assert "data.empty_response=skip" in caught.value.fix
    with caplog.at_level(logging.WARNING):
        dataset = SFTDataset(path, tokenizer_without_template, empty_response="skip", **options)
    assert dataset.dropped_indices.tolist() == [0]
    assert [item["index"] for item in dataset] == [1]
    assert "left out 1 of 2 rows that have nothing to learn from" in caplog.text
    with pytest.raises(DataError, match=r"all 1 rows have nothing to learn from.*data.max_length=4"):
        SFTDataset(path, tokenizer_without_template, max_samples=1, empty_response="skip", **options)


@pytest.mark.parametrize("empty", ["", " ", "\n\n"])
def test_an_answer_that_is_empty_after_templating_is_an_error_or_left_out(write, tokenizer, empty):
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "2+2=", "response": empty}]
    with pytest.raises(DataError, match=r"1 of 2 rows have nothing to learn from.*, row 1"):
        SFTDataset(write(rows), tokenizer, max_length=99)
    dataset = SFTDataset(write(rows), tokenizer, max_length=99, empty_response="skip")
    assert [item["index"] for item in dataset] == [0]
    assert dataset.dropped_indices.tolist() == [1]


@pytest.mark.parametrize(
    ("bad_row", "options", "message"),
    [
        ({"prompt": "a"}, {}, r"row 0: there is no 'response' \(found: 'prompt'\)"),
        ({"prompt": "a", "response": None}, {}, "row 0: there is no 'response'"),
        ({"prompt": "a", "response": 4}, {}, "row 0: the response response must be a string, found 4"),
        ({"prompt": {"q": 1}, "response": "b"}, {"prompt_dict_keys": ["x"]}, r"no 'x' inside prompt \(found: 'q'\)"),
        ({"prompt": 3, "response": "b"}, {}, "row 0, prompt: expected a non-empty list of messages"),
        ({"chat": "hi"}, {"messages_key": "chat"}, "row 0, column 'chat': expected a non-empty list of messages"),
        ({"chat": TWO_TURNS[:2]}, {"messages_key": "chat"}, "row 0: no message of the role 'assistant'"),
        ({"chat": [{"content": "hi"}]}, {"messages_key": "chat"}, "message 0: 'role' must be a non-empty string"),
        ({"prompt": "\ud800", "response": "b"}, {}, "row 0: the text cannot be tokenised"),
    ],
)
def test_a_bad_row_is_named_with_file_row_and_fix(tmp_path, tokenizer, bad_row, options, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([bad_row]))
    with pytest.raises(DataError, match=message) as caught:
        SFTDataset(path, tokenizer, max_length=999, **options)
    assert str(path) in caught.value.what
    assert caught.value.fix


def test_chats_need_a_template(write, tokenizer_without_template):
    with pytest.raises(DataError, match="has no chat template"):
        SFTDataset(chats(write, TWO_TURNS), tokenizer_without_template, max_length=999, messages_key="messages")


def test_batches_are_padded_right_to_the_longest_row(write, tokenizer_without_template):
    rows = [{"prompt": "1", "response": "2"}, {"prompt": "12", "response": "34"}]
    dataset = SFTDataset(write(rows), tokenizer_without_template, max_length=99)
    collate = partial(collate_sft, pad_token_id=tokenizer_without_template.pad_token_id)
    _, batch = BatchLoader(dataset, ResumableSampler(2, 2, False, 0), 2, collate).next_batch()
    pad = tokenizer_without_template.pad_token_id
    assert batch.batch["input_ids"].shape == (2, 5)
    assert batch.batch["input_ids"][0, 3:].tolist() == [pad, pad]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.batch["loss_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 1, 2, 2, 2], [0, 1, 2, 3, 4]]
