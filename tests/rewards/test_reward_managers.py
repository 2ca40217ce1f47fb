"""From token ids to the reward tensor: RewardManager and the managers naive, dapo, batch."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from reward_samples import HOSTILE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quadriga.config import load_config
from quadriga.errors import ConfigError, DataError, RewardError
from quadriga.protocol import DataProto
from quadriga.rewards import (
    DAPORewardManager,
    NaiveRewardManager,
    RewardFunction,
    RewardManager,
    RewardPool,
    build_manager,
    load_reward_manager,
    register_manager,
)
from quadriga.rewards.managers import BaseRewardManager, BatchRewardManager


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A real tokenizer, one token per character."""
    characters = "0123456789#.+-=/ abcdefghijklmnopqrstuvwxyzQ:?\\{}"
    vocabulary = {"<pad>": 0, "<eos>": 1, **{c: k + 2 for k, c in enumerate(characters)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool() as shared:
        yield shared


def batch_of(
    tokenizer: PreTrainedTokenizerFast,
    rows: list[tuple[str, str, Any]],
    source: str | list[str] = "openai/gsm8k",
    extra: list[Any] | None = None,
) -> DataProto:
    """(prompt, response, ground truth) per row, padded as rollouts are: prompts left, responses right with an EOS."""
    prompts = [tokenizer(p)["input_ids"] for p, _, _ in rows]
    answers = [tokenizer(r)["input_ids"] + [1] if r is not None else [] for _, r, _ in rows]
    width, length = max(map(len, prompts)) + 2, max(map(len, answers)) + 3
    tensors = {
        "prompts": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "responses": torch.tensor([a + [0] * (length - len(a)) for a in answers]),
        "attention_mask": torch.tensor(
            [
                [0] * (width - len(p)) + [1] * (len(p) + len(a)) + [0] * (length - len(a))
                for p, a in zip(prompts, answers)
            ]
        ),
    }
    sources = [source] * len(rows) if isinstance(source, str) else source
    columns: dict[str, Any] = {
        "data_source": sources,
        "reward_model": [{"style": "rule", "ground_truth": truth} for _, _, truth in rows],
    }
    if extra is not None:
        columns["extra_info"] = extra
    non_tensors = {}
    for name, values in columns.items():
        column = np.empty(len(rows), dtype=object)
        column[:] = values
        non_tensors[name] = column
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def test_the_score_stands_on_the_last_valid_token(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("2+3?", "#### 5", "5"), ("2+4?", "it is so #### 7", "6"), ("q", "#### 41", 41)])
    rewards = RewardManager(tokenizer, 0, pool=pool)(data)
    assert isinstance(rewards, torch.Tensor)
    assert rewards.dtype == torch.float32
    assert rewards.shape == data.batch["responses"].shape
    expected = torch.zeros_like(rewards)
    expected[0, len("#### 5")] = 1.0  # the EOS after it is the last valid token
    expected[2, len("#### 41")] = 1.0
    assert torch.equal(rewards, expected)


def test_the_two_argument_form_opens_its_own_pool(tokenizer: PreTrainedTokenizerFast) -> None:
    manager = RewardManager(tokenizer=tokenizer, num_examine=0)
    assert manager(batch_of(tokenizer, [("q", "#### 5", "5")])).sum() == 1.0  # type: ignore[union-attr]
    manager.close()


def test_return_dict_holds_the_tensor_and_nothing_else(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", "#### 5", "5")])
    manager = RewardManager(tokenizer, 0, pool=pool)
    answer = manager(data, return_dict=True)
    assert isinstance(answer, dict)
    assert list(answer) == ["reward_tensor"]
    assert torch.equal(answer["reward_tensor"], manager(data))  # type: ignore[arg-type]


def test_scores_of_a_reward_model_are_passed_on(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", "#### 5", "5")])
    data.batch["rm_scores"] = torch.full(data.batch["responses"].shape, 0.25)
    manager = RewardManager(tokenizer, 0, pool=pool)
    assert torch.equal(manager(data), data.batch["rm_scores"])  # type: ignore[arg-type]
    answer = manager(data, return_dict=True)
    assert isinstance(answer, dict)
    assert torch.equal(answer["reward_tensor"], data.batch["rm_scores"])


def test_an_empty_response_gets_no_reward_anywhere(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", None, "5"), ("q", "#### 5", "5")])  # type: ignore[list-item]
    manager = NaiveRewardManager(tokenizer, 0, pool=pool, compute_score=None)
    answer = manager(data, return_dict=True)
    assert isinstance(answer, dict)
    assert answer["reward_tensor"][0].abs().sum() == 0
    assert answer["reward_extra_info"]["outcome"] == ["unparsed", "correct"]


def test_numbers_in_the_prompt_earn_nothing(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("for example #### 5", "hm", "5")])
    assert RewardManager(tokenizer, 0, pool=pool)(data).sum() == 0  # type: ignore[union-attr]


def test_every_row_is_scored_by_its_own_data_source(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    rows = [("q", "#### 5", "5"), ("q", "\\boxed{5}", "5"), ("q", "\\boxed{5}", "5"), ("q", "5", "5")]
    sources = ["openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "openai/gsm8k"]
    rewards = RewardManager(tokenizer, 0, pool=pool)(batch_of(tokenizer, rows, sources))
    assert isinstance(rewards, torch.Tensor)
    assert rewards.sum(dim=1).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_an_unknown_data_source_lists_the_known_ones(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", "#### 5", "5")], "who/knows")
    with pytest.raises(RewardError, match=r"'who/knows'.*openai/gsm8k"):
        RewardManager(tokenizer, 0, pool=pool)(data)


def test_examples_are_printed_per_data_source(
    tokenizer: PreTrainedTokenizerFast, pool: RewardPool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("one", "#### 5", "5"), ("two", "#### 5", "5"), ("three", "#### 5", "5"), ("four", "6", "5")]
    sources = ["gsm8k", "gsm8k", "gsm8k", "arithmetic"]
    RewardManager(tokenizer, 2, pool=pool)(batch_of(tokenizer, rows, sources))
    printed = capsys.readouterr().out
    assert printed.count("[prompt]") == 3
    assert "three" not in printed
    assert "<pad>" not in printed
    assert "[score] 0 (wrong)" in printed


def test_a_prompt_without_valid_tokens_prints_as_empty(
    tokenizer: PreTrainedTokenizerFast, pool: RewardPool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = batch_of(tokenizer, [("abc", "#### 5", "5")])
    data.batch["attention_mask"][:, : data.batch["prompts"].shape[1]] = 0
    RewardManager(tokenizer, 1, pool=pool)(data)
    assert "[prompt] \n" in capsys.readouterr().out


def test_naive_adds_what_the_function_said(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", "#### 5", "5"), ("q", "#### 6", "5"), ("q", "no", "5")])
    answer = NaiveRewardManager(tokenizer, 0, pool=pool)(data, return_dict=True)
    assert isinstance(answer, dict)
    info = answer["reward_extra_info"]
    assert info["pred"] == ["5", "6", None]
    assert info["acc"] == [1.0, 0.0, 0.0]
    assert answer["reward_metrics"]["reward/unparsed"] == pytest.approx(1 / 3)


def test_extra_info_reaches_the_function(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return extra_info['bonus']\n"
    )
    data = batch_of(tokenizer, [("q", "a", "5"), ("q", "b", "5")], extra=[{"bonus": 2.0}, {"bonus": 3.0}])
    manager = NaiveRewardManager(tokenizer, 0, compute_score=f"{module}:compute_score")
    assert manager(data).sum(dim=1).tolist() == [2.0, 3.0]  # type: ignore[union-attr]
    manager.close()


def test_a_sample_whose_scoring_failed_says_why(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'no': raise ValueError('cannot read ' + solution_str)\n"
        "    return {'score': 1.0, 'error': 'own'}\n"
    )
    data = batch_of(tokenizer, [("q", "#### 5", "5"), ("q", "no", "5")])
    with RewardPool(RewardFunction(f"{module}:compute_score"), on_error=0.0) as pool:
        info = NaiveRewardManager(tokenizer, 0, pool=pool)(data, return_dict=True)["reward_extra_info"]  # type: ignore[index]
    assert info["outcome"] == ["correct", "error"]
    assert info["error"][0] == "own"
    assert info["error"][1].endswith("ValueError: cannot read no\n")


def test_scores_are_the_same_when_samples_were_streamed(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", "#### 5", "5"), ("q", "#### 6", "5")])
    manager = NaiveRewardManager(tokenizer, 0, pool=pool)
    handles = [pool.submit([sample])[0] for sample in manager.samples(data)]
    streamed = manager.assemble(data, [handle.result(30) for handle in handles])
    assert torch.equal(streamed, manager(data))  # type: ignore[arg-type]


def test_a_missing_column_or_truth_names_it(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", "#### 5", "5")])
    data.non_tensor_batch["reward_model"][0] = {"style": "rule"}
    with pytest.raises(DataError, match=r"row 0.*ground_truth"):
        RewardManager(tokenizer, 0, pool=pool)(data)
    del data.non_tensor_batch["reward_model"]
    with pytest.raises(DataError, match="no column 'reward_model'"):
        RewardManager(tokenizer, 0, pool=pool)(data)


def test_rows_of_ones_own_need_neither_data_source_nor_ground_truth(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rows as other libraries have them: a prompt, and whatever columns the function asks for."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, answer, extra_info, ground_truth):\n"
        "    assert ground_truth is None and extra_info['level'] == 2 and extra_info['split'] == 'x', extra_info\n"
        "    return float(str(answer) in solution_str)\n"
    )
    data = batch_of(tokenizer, [("q", "it is 5", None), ("q", "it is 6", None)], extra=[{"split": "x"}] * 2)
    del data.non_tensor_batch["reward_model"], data.non_tensor_batch["data_source"]
    data.non_tensor_batch["answer"] = np.array([5, 5], dtype=object)
    data.non_tensor_batch["level"] = np.array([2, 2])
    with RewardPool(f"{tmp_path}/mine.py:compute_score") as pool:
        manager = NaiveRewardManager(tokenizer, 1, pool=pool)
        assert manager(data).sum(dim=1).tolist() == [1.0, 0.0]
        data.non_tensor_batch["ground_truth"] = np.array(["a", "b"], dtype=object)
        assert [sample.ground_truth for sample in manager.samples(data)] == ["a", "b"]


def test_dapo_takes_a_growing_penalty_for_length(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    texts = ["#### 5", "#### 5aaa", "#### 5aaaaaaaa"]  # 7, 10 and 15 tokens with the EOS
    data = batch_of(tokenizer, [("q", text, "5") for text in texts], "gsm8k")
    buffer = {"enable": True, "len": 8, "penalty_factor": 2.0, "log": True}
    manager = DAPORewardManager(tokenizer, 0, pool=pool, max_resp_len=16, overlong_buffer_cfg=OmegaConf.create(buffer))
    answer = manager(data, return_dict=True)
    assert isinstance(answer, dict)
    assert answer["reward_tensor"].sum(dim=1).tolist() == [1.0, 1.0 - 2 / 8 * 2.0, 1.0 - 7 / 8 * 2.0]
    assert answer["reward_extra_info"]["overlong"] == [False, True, True]
    assert answer["reward_extra_info"]["overlong_reward"] == [0.0, -0.5, -1.75]
    assert answer["reward_metrics"]["reward/extra/overlong"] == pytest.approx(2 / 3)


def test_dapo_without_the_buffer_is_naive(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    data = batch_of(tokenizer, [("q", "#### 5aaaaaaaa", "5")], "gsm8k")
    assert DAPORewardManager(tokenizer, 0, pool=pool, max_resp_len=4)(data).sum() == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{"enable": True, "len": 8}, {"enable": True, "len": 0}, {"enabled": True}])
def test_dapo_refuses_a_buffer_that_cannot_be(
    options: dict[str, Any], tokenizer: PreTrainedTokenizerFast, pool: RewardPool
) -> None:
    with pytest.raises(ConfigError, match="overlong_buffer_cfg"):
        DAPORewardManager(tokenizer, 0, pool=pool, max_resp_len=4, overlong_buffer_cfg=options)


def test_batch_calls_the_function_once_for_all(tokenizer: PreTrainedTokenizerFast) -> None:
    data = batch_of(tokenizer, [("q", "a", 1), ("q", "b", 2), ("q", "c", 3)])
    manager = BatchRewardManager(tokenizer, 0, compute_score=f"{HOSTILE}:for_a_batch")
    assert manager(data).sum(dim=1).tolist() == [1.0, 2.0, 3.0]  # type: ignore[union-attr]
    manager.close()


def test_batch_needs_a_function_for_batches(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    with pytest.raises(ConfigError, match="whole batch"):
        BatchRewardManager(tokenizer, 0)
    with pytest.raises(ConfigError, match="one sample at a time"):
        BatchRewardManager(tokenizer, 0, compute_score=RewardFunction("a:b"), pool=pool)


def test_managers_are_found_by_name(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    assert type(build_manager("naive", tokenizer, 0, pool=pool)) is NaiveRewardManager
    assert type(build_manager("dapo", tokenizer, 0, pool=pool, max_resp_len=8)) is DAPORewardManager
    with pytest.raises(ConfigError, match=r"'naiv'. Known: batch, dapo, judge, naive"):
        build_manager("naiv", tokenizer, 0, pool=pool)
    with pytest.raises(ConfigError, match="cannot be found"):
        build_manager("no_such_module:Manager", tokenizer, 0, pool=pool)


def test_a_manager_can_be_registered(tokenizer: PreTrainedTokenizerFast, pool: RewardPool) -> None:
    @register_manager("half")
    class HalfManager(BaseRewardManager):
        def adjust(self, result: Any, response_length: int) -> Any:
            result.score /= 2
            return result

    manager = build_manager("half", tokenizer, 0, pool=pool)
    assert manager(batch_of(tokenizer, [("q", "#### 5", "5")])).sum() == 0.5
    with pytest.raises(ConfigError, match="already"):
        register_manager("naive")(HalfManager)


def test_an_enum_as_the_name_of_a_manager_leaves_every_other_look_up_whole(
    tokenizer: PreTrainedTokenizerFast, pool: RewardPool
) -> None:
    class Own(Enum):
        THIRD = "third"

    @register_manager(Own.THIRD)  # type: ignore[arg-type]
    class ThirdManager(BaseRewardManager):
        pass

    assert type(build_manager("third", tokenizer, 0, pool=pool)) is ThirdManager
    with pytest.raises(ConfigError, match=r"'naiv'. Known: batch, .*third"):
        build_manager("naiv", tokenizer, 0, pool=pool)
    with pytest.raises(ConfigError, match="no_such_manager"):
        load_config({"reward_model": {"reward_manager": "no_such_manager"}})


def test_any_class_in_a_file_can_be_the_manager(
    tokenizer: PreTrainedTokenizerFast, pool: RewardPool, tmp_path: Path
) -> None:
    file = tmp_path / "my_manager.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key, scale):\n"
        "        self.compute_score, self.scale = compute_score, scale\n"
        "    def __call__(self, data, return_dict=False):\n"
        "        return self.scale * self.compute_score('gsm8k', '#### 5', '5', {})['score']\n"
    )
    assert build_manager(f"{file}:Mine", tokenizer, 0, pool=pool, scale=3.0)(None) == 3.0


@pytest.mark.parametrize("kind", ["naive", "dapo", "batch"])
def test_a_configuration_describes_manager_and_pool(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    function: dict[str, Any] = {
        "path": HOSTILE,
        "name": "for_a_batch" if kind == "batch" else "behave",
        "reward_kwargs": {},
    }
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": False}
    config = OmegaConf.create(
        {
            "data": {"reward_fn_key": "data_source"},
            "custom_reward_function": function,
            "reward_model": {
                "reward_manager": kind,
                "reward_kwargs": {"max_resp_len": 64, "overlong_buffer_cfg": buffer} if kind == "dapo" else {},
            },
            "reward": {
                "num_workers": 1,
                "timeout_s": 10.0,
                "max_retries": 0,
                "on_error": 0.0,
                "max_error_rate": 0.5,
                "memory_limit_mb": 1024,
            },
        }
    )
    manager = load_reward_manager(config, tokenizer, 0)
    assert manager(batch_of(tokenizer, [("q", "a", 4), ("q", "b", 5)])).sum(dim=1).tolist() == [4.0, 5.0]
    manager.pool.close()


def test_a_plain_namespace_will_do_as_a_configuration(tokenizer: PreTrainedTokenizerFast) -> None:
    config = SimpleNamespace(
        data=SimpleNamespace(reward_fn_key="data_source"),
        custom_reward_function=SimpleNamespace(
            path=None, name="compute_score", reward_kwargs={"gsm8k": {"method": "flexible"}}
        ),
        reward_model=SimpleNamespace(reward_manager="naive", reward_kwargs={}),
        reward=SimpleNamespace(
            num_workers=1, timeout_s=10.0, max_retries=0, on_error=0.0, max_error_rate=0.5, memory_limit_mb=1024
        ),
    )
    manager = load_reward_manager(config, tokenizer, 0)
    assert manager(batch_of(tokenizer, [("q", "it is 5", "5")])).sum() == 1.0
    manager.pool.close()
