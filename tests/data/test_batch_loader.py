"""Batches: padding to the longest row, stable uids, a resume that is bit-identical wherever it happens, and dealing to ranks."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_data import row

from quadriga.data import (
    BatchLoader,
    ResumableSampler,
    RLDataset,
    collate_prompts,
    create_rl_dataset,
    create_rl_loader,
    create_rl_sampler,
    validation_batches,
)
from quadriga.data.ragged import balance_over_ranks
from quadriga.errors import ConfigError, DataError

WORDS = ["a", "bcd", "ef", "ghijk", "l", "mnopqrs", "t"]


@pytest.fixture(scope="module")
def dataset(tokenizer, tmp_path_factory) -> RLDataset:
    path = tmp_path_factory.mktemp("data") / "t.jsonl"
    path.write_text("".join(json.dumps(row("", i, prompt=word)) + "\n" for i, word in enumerate(WORDS)))
    return RLDataset(path, tokenizer, max_prompt_length=9)


def data_config(**changes):
    fields = {
        "prompt_key": "prompt", "reward_fn_key": "data_source", "max_prompt_length": 9, "train_batch_size": 3,
        "val_batch_size": None, "shuffle": True, "seed": 5, "filter_overlong_prompts": False, "truncation": "error",
        "chat_template": None, "apply_chat_template_kwargs": {},
        "sampler": SimpleNamespace(class_path=None, class_name=None),
        "custom_cls": SimpleNamespace(path=None, name=None),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_prompts_are_padded_left_to_the_longest_of_the_batch(dataset, tokenizer):
    batch = collate_prompts([dataset[0], dataset[1], dataset[2]], pad_token_id=tokenizer.pad_token_id)
    ids = tokenizer.convert_tokens_to_ids
    assert batch.batch["input_ids"].tolist() == [
        [*ids(["<pad>", "<pad>", "a"])],
        [*ids(["b", "c", "d"])],
        [*ids(["<pad>", "e", "f"])],
    ]
    assert batch.batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 1]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.batch.values())


def test_a_batch_carries_what_rewards_need(dataset, tokenizer):
    loader = create_rl_loader(data_config(shuffle=False), dataset, tokenizer)
    loader.next_batch()
    epoch, batch = loader.next_batch()
    assert epoch == 0
    assert len(batch) == 3
    fields = batch.non_tensor_batch
    assert fields["index"].tolist() == [3, 4, 5]
    assert fields["uid"].tolist() == ["0:3", "0:4", "0:5"]
    assert fields["epoch"].tolist() == [0, 0, 0]
    assert fields["raw_prompt"].tolist() == WORDS[3:6]
    assert fields["data_source"].tolist() == ["arithmetic"] * 3
    assert fields["reward_model"][0] == {"style": "rule", "ground_truth": "1"}
    assert fields["extra_info"][2] == {"split": "train", "index": 5}


def test_rows_with_different_columns_and_equally_long_chats_can_share_a_batch():
    items = [
        {"input_ids": np.array([1]), "raw_prompt": [{"role": "user", "content": "a"}], "index": 0, "tags": ["x", "y"]},
        {"input_ids": np.array([2]), "raw_prompt": [{"role": "user", "content": "b"}], "index": 1},
    ]
    fields = collate_prompts(items, pad_token_id=0).non_tensor_batch
    assert fields["tags"].tolist() == [["x", "y"], None]
    assert fields["raw_prompt"].shape == (2,)
    assert fields["raw_prompt"][1] == [{"role": "user", "content": "b"}]


def test_a_batch_never_crosses_an_epoch_border(dataset, tokenizer):
    loader = create_rl_loader(data_config(), dataset, tokenizer)
    assert len(loader) == 2
    seen = [loader.next_batch() for _ in range(6)]
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1, 2, 2]
    for first, second in zip(seen[::2], seen[1::2]):
        rows = [*first[1].non_tensor_batch["index"], *second[1].non_tensor_batch["index"]]
        assert len(set(rows)) == 6


def test_the_rest_of_an_epoch_can_be_a_smaller_batch_where_asked_for(dataset):
    sampler = ResumableSampler(7, 3, False, 0, drop_last=False)
    loader = BatchLoader(dataset, sampler, 3, partial(collate_prompts, pad_token_id=0), drop_last=False)
    assert len(loader) == 3
    assert [(epoch, len(batch)) for epoch, batch in (loader.next_batch() for _ in range(4))] == [
        (0, 3),
        (0, 3),
        (0, 1),
        (1, 3),
    ]


def same(left, right) -> bool:
    (epoch, a), (other_epoch, b) = left, right
    tensors = all(torch.equal(a.batch[name], b.batch[name]) for name in a.batch.keys() | b.batch.keys())
    fields = a.non_tensor_batch.keys() == b.non_tensor_batch.keys() and all(
        a.non_tensor_batch[name].tolist() == b.non_tensor_batch[name].tolist() for name in a.non_tensor_batch
    )
    return epoch == other_epoch and tensors and fields


@settings(max_examples=40, deadline=None)
@given(
    batch_size=st.integers(1, 7),
    before=st.integers(0, 16),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
    drop=st.booleans(),
)
def test_resuming_after_any_batch_is_bit_identical(dataset, batch_size, before, shuffle, seed, drop):
    def fresh() -> BatchLoader:
        sampler = ResumableSampler(len(dataset), batch_size, shuffle, seed, drop)
        return BatchLoader(dataset, sampler, batch_size, partial(collate_prompts, pad_token_id=0), drop)

    uninterrupted = fresh()
    for _ in range(before):
        uninterrupted.next_batch()
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    for _ in range(10):
        assert same(uninterrupted.next_batch(), resumed.next_batch())


def test_validation_is_one_pass_in_file_order_without_dropping(dataset, tokenizer):
    batches = list(validation_batches(data_config(val_batch_size=3), dataset, tokenizer))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [index for batch in batches for index in batch.non_tensor_batch["index"]] == list(range(7))
    assert batches[0].non_tensor_batch["uid"].tolist() == ["val:0", "val:1", "val:2"]
    whole = list(validation_batches(data_config(), dataset, tokenizer))
    assert [len(batch) for batch in whole] == [7]


def test_factories_follow_the_configuration(write, tokenizer):
    path = write([row("", i, prompt=word) for i, word in enumerate(WORDS)])
    config = data_config(truncation="right", max_prompt_length=2)
    train = create_rl_dataset(str(path), config, tokenizer, max_samples=4)
    val = create_rl_dataset([path], config, tokenizer, is_train=False, max_samples=4)
    assert len(train) == 4
    assert [item["index"] for item in val] == [0, 1, 2, 3]
    assert [item["index"] for item in train] != [0, 1, 2, 3]
    assert max(train.tokens.lengths) == 2
    assert len(create_rl_sampler(config, train)) == 3


def test_a_training_set_smaller_than_a_batch_is_an_error(dataset, tokenizer):
    with pytest.raises(DataError, match=r"7 rows, fewer than one batch of data.train_batch_size=8"):
        create_rl_loader(data_config(train_batch_size=8), dataset, tokenizer)


CUSTOM = '''
class Curriculum:
    """Longest prompts first; the last batch decides whether the next epoch is turned round."""

    def __init__(self, data_source, data_config):
        self.lengths = [len(item["input_ids"]) for item in data_source]
        self.sign, self.cursor, self.order = -1, 0, []

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        if self.cursor == 0:
            self.order = sorted(range(len(self)), key=lambda row: self.sign * self.lengths[row])
        while self.cursor < len(self.order):
            self.cursor += 1
            yield self.order[self.cursor - 1]
        self.cursor = 0

    def state_dict(self):
        return {"sign": self.sign, "cursor": self.cursor, "order": self.order}

    def load_state_dict(self, state):
        self.sign, self.cursor, self.order = state["sign"], state["cursor"], state["order"]

    def update(self, batch):
        self.sign = 1 if batch.meta_info.get("good") else -1


class Twice(Curriculum):
    def __iter__(self):
        return iter([2, 2, 2])


class Outside(Curriculum):
    def __iter__(self):
        return iter([0, 1, 7])


class Nothing(Curriculum):
    def __iter__(self):
        return iter([0])


class Half:
    def __iter__(self):
        return iter([])


class OwnData:
    def __init__(self, data_files, tokenizer, config, processor, max_samples):
        self.words = [data_files, tokenizer.eos_token, str(max_samples), processor]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, position):
        return {"input_ids": [1] * (position + 1), "raw_prompt": self.words[position], "data_source": "mine"}
'''


@pytest.fixture
def custom_file(tmp_path):
    path = tmp_path / "my_curriculum.py"
    path.write_text(CUSTOM)
    return str(path)


def custom_loader(custom_file, name, dataset, tokenizer):
    config = data_config(sampler=SimpleNamespace(class_path=custom_file, class_name=name))
    return create_rl_loader(config, dataset, tokenizer)


def test_a_custom_sampler_decides_the_order_learns_and_resumes(custom_file, dataset, tokenizer):
    loader = custom_loader(custom_file, "Curriculum", dataset, tokenizer)
    _, batch = loader.next_batch()
    assert batch.non_tensor_batch["index"].tolist() == [5, 3, 1]
    batch.meta_info["good"] = True
    loader.sampler.update(batch)
    resumed = custom_loader(custom_file, "Curriculum", dataset, tokenizer)
    resumed.load_state_dict(loader.state_dict())
    for continued in (loader, resumed):
        batches = [continued.next_batch() for _ in range(3)]
        rows = [(epoch, batch.non_tensor_batch["index"].tolist()) for epoch, batch in batches]
        assert rows == [(0, [2, 0, 4]), (1, [0, 4, 6]), (1, [2, 1, 3])]


def test_a_row_repeated_in_a_batch_keeps_its_own_uid(custom_file, dataset, tokenizer):
    _, batch = custom_loader(custom_file, "Twice", dataset, tokenizer).next_batch()
    assert batch.non_tensor_batch["uid"].tolist() == ["0:2", "0:2#1", "0:2#2"]


def test_a_custom_sampler_that_misbehaves_is_named(custom_file, dataset, tokenizer):
    with pytest.raises(DataError, match="row 7 of a dataset of 7 rows"):
        custom_loader(custom_file, "Outside", dataset, tokenizer).next_batch()
    with pytest.raises(DataError, match="Nothing gave 1 rows in a whole epoch, fewer than one batch of 3"):
        custom_loader(custom_file, "Nothing", dataset, tokenizer).next_batch()
    with pytest.raises(ConfigError, match="class Half lacks __len__, state_dict, load_state_dict, update"):
        custom_loader(custom_file, "Half", dataset, tokenizer)
    with pytest.raises(ConfigError, match="has no 'Quarter'"):
        custom_loader(custom_file, "Quarter", dataset, tokenizer)
    with pytest.raises(ConfigError, match="does not exist"):
        custom_loader("/nowhere/x.py", "Half", dataset, tokenizer)
    with pytest.raises(ConfigError, match="'no_such_module', which cannot be found"):
        custom_loader("no_such_module", "Half", dataset, tokenizer)
    with pytest.raises(ConfigError, match="no class in it"):
        custom_loader("json", None, dataset, tokenizer)


def test_a_custom_sampler_can_come_from_a_module(dataset, tokenizer, custom_file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert custom_loader("my_curriculum", "Curriculum", dataset, tokenizer).next_batch()[0] == 0


def test_a_custom_dataset_class_is_used(custom_file, tokenizer):
    config = data_config(custom_cls=SimpleNamespace(path=custom_file, name="OwnData"), shuffle=False)
    dataset = create_rl_dataset("files", config, tokenizer, processor="processor", max_samples=3)
    _, batch = create_rl_loader(config, dataset, tokenizer).next_batch()
    assert batch.non_tensor_batch["raw_prompt"].tolist() == ["files", "<eos>", "3"]
    assert batch.non_tensor_batch["uid"].tolist() == ["0:0", "0:1", "0:2"]
    assert batch.batch["attention_mask"].sum(1).tolist() == [1, 2, 3]


def test_a_schema_configuration_drives_the_factories(write, tokenizer):
    from quadriga.config.schema import DataConfig

    config = DataConfig()
    config.train_files = str(write([row("", i, prompt=word) for i, word in enumerate(WORDS)]))
    config.train_batch_size = 2
    loader = create_rl_loader(config, create_rl_dataset(config.train_files, config, tokenizer), tokenizer)
    assert len(loader.next_batch()[1]) == 2


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.data())
def test_balancing_never_moves_a_row_to_another_mini_batch(ranks, batches, rows_per_rank, data):
    size = ranks * rows_per_rank
    lengths = data.draw(st.lists(st.integers(1, 99), min_size=size * batches, max_size=size * batches))
    order = balance_over_ranks(lengths, ranks, size)
    share = len(lengths) // ranks
    for batch in range(batches):
        dealt = [
            row
            for rank in range(ranks)
            for row in order[rank * share + batch * rows_per_rank : rank * share + (batch + 1) * rows_per_rank]
        ]
        assert sorted(dealt) == list(range(batch * size, (batch + 1) * size))


def test_balancing_evens_out_the_tokens_of_ranks():
    lengths = [100, 90, 80, 70, 10, 20, 30, 40]
    order = balance_over_ranks(lengths, 2)
    tokens = [sum(lengths[row] for row in order[:4]), sum(lengths[row] for row in order[4:])]
    assert max(tokens) - min(tokens) <= 20


def test_rows_that_cannot_be_dealt_out_evenly_are_refused():
    with pytest.raises(DataError, match="cannot be dealt out evenly to 4 ranks"):
        balance_over_ranks([1] * 6, 4)
