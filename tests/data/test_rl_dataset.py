"""The RL dataset: exact tokens, limits with a real effect, and errors that name file and row."""

from __future__ import annotations

import io
import json
import logging
import sys

import numpy as np
import pytest
from tiny_data import CHAT_TEMPLATE, make_tokenizer, row

from quadriga.data import RLDataset, generate_arithmetic
from quadriga.errors import DataError


def texts(dataset, tokenizer):
    return [tokenizer.decode(item["input_ids"]) for item in dataset]


def test_a_chat_becomes_the_tokens_of_the_chat_template(write, tokenizer):
    dataset = RLDataset(write([row("1+1=")]), tokenizer, max_prompt_length=99)
    assert texts(dataset, tokenizer) == ["<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"]


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl"])
def test_an_item_carries_the_row(write, tokenizer, kind):
    path = write([row("a", 0, level="easy", uid="theirs"), row("b", 7, level="hard", uid="theirs")], f"t.{kind}")
    item = RLDataset(path, tokenizer, max_prompt_length=99)[1]
    assert item.pop("input_ids").dtype == np.int32
    assert item == {
        "raw_prompt": [{"role": "user", "content": "b"}],
        "data_source": "arithmetic",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 7},
        "level": "hard",
        "index": 1,
    }


def test_rows_need_no_data_source_where_there_is_a_default_for_it(write, tokenizer):
    path = write([{"prompt": "1+1=", "answer": 2}])
    with pytest.raises(DataError, match="no column 'data_source'"):
        RLDataset(path, tokenizer, max_prompt_length=99)
    dataset = RLDataset(path, tokenizer, max_prompt_length=99, default_source="custom")
    assert dataset.sources == {"custom"}
    assert (dataset[0]["data_source"], dataset[0]["answer"], dataset[0]["reward_model"]) == ("custom", 2, {})
    other = RLDataset(path, tokenizer, max_prompt_length=99, default_source="custom", reward_fn_key="task")
    assert (other[0]["task"], other[0]["data_source"]) == ("custom", "custom")


def test_real_tokenizers_give_the_ids_of_apply_chat_template(write, real_tokenizer, shared_dir):
    lines = (shared_dir / "data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    prompts = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    prompts.append(
        [{"role": "system", "content": "Быть кратким 😀\n\n"}, {"role": "user", "content": "  <|im_end|> ok "}]
    )
    dataset = RLDataset(write([row(p, i) for i, p in enumerate(prompts)]), real_tokenizer, max_prompt_length=4096)
    for item, prompt in zip(dataset, prompts):
        expected = real_tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert item["input_ids"].tolist() == expected


def test_plain_strings_are_not_templated(write, tokenizer_without_template):
    path = write([row("", prompt="1+1=")])
    assert texts(RLDataset(path, tokenizer_without_template, max_prompt_length=9), tokenizer_without_template) == [
        "1+1="
    ]


def test_plain_strings_begin_with_bos_but_do_not_end_with_eos(write):
    tokenizer = make_tokenizer(bos=True)
    assert texts(RLDataset(write([row("", prompt="1+1=")]), tokenizer, max_prompt_length=9), tokenizer) == ["<bos>1+1="]


def test_chats_and_plain_strings_may_be_mixed(write, tokenizer):
    path = write([row("", 0, prompt="a"), row("b", 1), row("", 2, prompt="c")])
    assert [text[-10:] for text in texts(RLDataset(path, tokenizer, max_prompt_length=99), tokenizer)] == [
        "a",
        "assistant\n",
        "c",
    ]


def test_fields_that_parquet_adds_to_messages_are_not_shown_to_the_template(write):
    template = "{% for m in messages %}{{ m.keys() | sort | join('+') }};{% endfor %}"
    chats = [{"role": "user", "content": "a", "name": "Eve"}, {"role": "user", "content": "b"}]
    tokenizer = make_tokenizer(template)
    path = write([row(chats)], "t.parquet")
    assert texts(RLDataset(path, tokenizer, max_prompt_length=99), tokenizer) == ["content+name+role;content+role;"]


def test_own_template_and_its_arguments(write, tokenizer_without_template, tmp_path):
    template = "{{ greeting }} {{ messages[0]['content'] }}"
    (tmp_path / "t.jinja").write_text(template)
    for given in (template, str(tmp_path / "t.jinja")):
        dataset = RLDataset(
            write([row("you")]),
            tokenizer_without_template,
            max_prompt_length=99,
            chat_template=given,
            apply_chat_template_kwargs={"greeting": "hi"},
        )
        assert texts(dataset, tokenizer_without_template) == ["hi you"]


@pytest.fixture
def lengths_1_to_6(write):
    return write([row("", n, prompt="abcdef"[: n + 1]) for n in range(6)])


def test_filter_drops_and_reports_overlong_rows(lengths_1_to_6, tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=4, filter_overlong_prompts=True)
    assert dataset.dropped_indices.tolist() == [4, 5]
    assert [item["index"] for item in dataset] == [0, 1, 2, 3]
    assert "dropped 2 of 6 rows with more than 4 prompt tokens" in caplog.text
    assert f"{lengths_1_to_6}, row 4; {lengths_1_to_6}, row 5" in caplog.text


def test_index_is_the_row_in_the_files_whatever_is_dropped(write, tokenizer):
    path = write([row("", n, prompt=text) for n, text in enumerate(["toolong", "b", "c"])])
    dataset = RLDataset([path], tokenizer, max_prompt_length=3, filter_overlong_prompts=True)
    assert [(item["index"], item["raw_prompt"]) for item in dataset] == [(1, "b"), (2, "c")]


def test_filtering_everything_is_an_error_with_both_lengths(lengths_1_to_6, tokenizer):
    with pytest.raises(
        DataError, match=r"dropped all 6 rows: the shortest prompt has 1 tokens, data.max_prompt_length is 0"
    ):
        RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=0, filter_overlong_prompts=True)


@pytest.mark.parametrize(("mode", "expected"), [("left", "cdef"), ("right", "abcd"), ("middle", "abef")])
def test_truncation_cuts_the_side_it_names(lengths_1_to_6, tokenizer, mode, expected):
    dataset = RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=4, truncation=mode)
    assert texts(dataset, tokenizer)[-1] == expected
    assert texts(dataset, tokenizer)[:4] == ["a", "ab", "abc", "abcd"]


def test_an_odd_limit_cut_in_the_middle_keeps_more_of_the_end(lengths_1_to_6, tokenizer):
    dataset = RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=3, truncation="middle")
    assert texts(dataset, tokenizer)[-1] == "aef"


def test_an_overlong_prompt_is_an_error_with_file_row_and_both_lengths(lengths_1_to_6, tokenizer):
    with pytest.raises(DataError, match=r"row 4: the prompt has 5 tokens, data.max_prompt_length is 4") as caught:
        RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=4)
    assert str(lengths_1_to_6) in caught.value.what
    assert "2 of 6 rows" in caught.value.what
    assert "filter_overlong_prompts=True" in caught.value.fix


def test_unknown_truncation_is_an_error(lengths_1_to_6, tokenizer):
    with pytest.raises(DataError, match=r"data.truncation='top'"):
        RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=4, truncation="top")


def test_max_samples_takes_the_first_rows_or_a_seeded_draw(lengths_1_to_6, tokenizer):
    def indices(**options):
        return [i["index"] for i in RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=9, **options)]

    assert indices(max_samples=3) == [0, 1, 2]
    assert indices(max_samples=-1) == indices(max_samples=99) == list(range(6))
    drawn = [tuple(indices(max_samples=3, shuffle=True, seed=seed)) for seed in range(20)]
    assert drawn == [tuple(indices(max_samples=3, shuffle=True, seed=seed)) for seed in range(20)]
    assert len(set(drawn)) > 5
    assert all(list(draw) == sorted(set(draw)) and len(draw) == 3 for draw in drawn)


def test_max_samples_of_zero_is_an_error(lengths_1_to_6, tokenizer):
    with pytest.raises(DataError, match="0 of 6"):
        RLDataset(lengths_1_to_6, tokenizer, max_prompt_length=9, max_samples=0)


@pytest.mark.parametrize(
    ("bad_row", "message"),
    [
        ({"data_source": "x", "q": "?"}, "row 1: there is no column 'prompt'; the columns are 'data_source', 'q'"),
        (row("a", 1, prompt=None), "row 1: column 'prompt' holds None"),
        ({"prompt": "a"}, "row 1: there is no column 'data_source'; the columns are 'prompt'"),
        (row("a", 1, data_source=7), "row 1: column 'data_source' holds 7"),
        (row("a", 1, prompt=5), "row 1, column 'prompt': expected a non-empty list of messages, found int 5"),
        (row([], 1), "row 1, column 'prompt': expected a non-empty list of messages"),
        (row(["hello"], 1), "row 1, column 'prompt', message 0: expected an object with role and content, found str"),
        (row([{"content": "a"}], 1), "message 0: 'role' must be a non-empty string, found NoneType"),
        (row([{"role": "user", "content": 3}], 1), "message 0: 'content' must be a string, found int 3"),
        (row([{"role": "user", "content": [{"type": "image"}]}], 1), "'content' must be a string, found list"),
        (row("", 1, prompt=""), "row 1: the prompt has no tokens"),
        (row("a", 1, reward_model="42"), "row 1: 'reward_model' must be an object"),
        (row("a", 0), "same data source 'arithmetic', split 'train' and extra_info.index '0': .*row 0 and .*row 1"),
        (row("", 1, prompt="\ud800"), "row 1: the text cannot be tokenised"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_file_row_and_fix(tmp_path, tokenizer, bad_row, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (row("fine", 0), bad_row, row("fine", 2))))
    with pytest.raises(DataError, match=message) as caught:
        RLDataset(path, tokenizer, max_prompt_length=99)
    assert str(path) in caught.value.what
    assert caught.value.fix


def test_the_same_index_in_another_split_or_source_is_no_duplicate(write, tokenizer):
    rows = [
        row("a", 0),
        row("b", 0, data_source="other"),
        row("c", extra_info={"split": "test", "index": 0}),
        row("d", extra_info=None),
    ]
    assert len(RLDataset(write(rows), tokenizer, max_prompt_length=99)) == 4


def test_a_file_listed_twice_is_found_out(write, tokenizer):
    path = write([row("a", 0)])
    with pytest.raises(DataError, match="list each file once"):
        RLDataset([path, path], tokenizer, max_prompt_length=99)


def test_chats_need_a_template_and_the_error_says_which_option_to_set(write, tokenizer_without_template):
    with pytest.raises(DataError, match=r"row 0 is a chat, but the tokenizer .* has no chat template") as caught:
        RLDataset(write([row("a")]), tokenizer_without_template, max_prompt_length=99)
    assert "data.chat_template" in caught.value.fix
    assert "plain strings" in caught.value.fix


def test_a_template_that_fails_on_one_row_names_it(write):
    template = "{% if messages[0]['content'] == 'b' %}{{ raise_exception('no b here') }}{% endif %}" + CHAT_TEMPLATE
    with pytest.raises(DataError, match="row 1: the chat template fails: TemplateError: no b here"):
        RLDataset(write([row("a", 0), row("b", 1)]), make_tokenizer(template), max_prompt_length=99)


def test_a_missing_template_file_and_reserved_arguments_are_errors(write, tokenizer):
    path = write([row("a")])
    with pytest.raises(DataError, match="neither a Jinja template nor a file"):
        RLDataset(path, tokenizer, max_prompt_length=99, chat_template="missing.jinja")
    with pytest.raises(DataError, match="may not set tokenize"):
        RLDataset(path, tokenizer, max_prompt_length=99, apply_chat_template_kwargs={"tokenize": False})


def test_more_rows_than_one_chunk_keep_their_order(write, tokenizer):
    train, _ = generate_arithmetic(train_size=4500, test_size=1, max_value=999)
    dataset = RLDataset(write(train, "t.parquet"), tokenizer, max_prompt_length=99)
    assert texts(dataset, tokenizer) == [r["prompt"] for r in train]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_only(write, tokenizer, monkeypatch):
    path = write([row("a")])
    monkeypatch.setenv("TERM", "xterm")
    for screen, drawn in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        RLDataset(path, tokenizer, max_prompt_length=99)
        assert ("tokenising prompts" in screen.getvalue()) == drawn
