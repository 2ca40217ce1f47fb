"""Runs that are scored by a reward model: alone, beside a function, and with another tokenizer than the policy's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_policy import LETTERS, write_model, write_task
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from quadriga.config.load import load_config
from quadriga.engine import TrainingEngine
from quadriga.models.load import load_reward_model
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.main_ppo import run_ppo
from quadriga.workers.reward_model import RewardModelWorker, rewritten

LIKED = "aeiou"


def write_reward_model(folder: Path, source: Path) -> Path:
    """A classifier with the tokens of `source` whose score is the likedness of the last token, near ±1."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = AutoConfig.from_pretrained(source, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    liked = torch.zeros(config.vocab_size, dtype=torch.bool)
    liked[[tokenizer.get_vocab()[c] for c in LIKED]] = True
    with torch.no_grad():
        for layer in model.model.layers:  # no mixing: the last hidden state is the last token's own embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.get_input_embeddings().weight
        embedding.normal_()
        embedding[:, 0] = torch.where(liked, 3.0, -3.0)
        model.score.weight.zero_()
        model.score.weight[0, 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored_run(config: dict) -> tuple[list[dict], list[dict]]:
    """Metrics, and the rows of the first step."""
    run_ppo(config)
    run = Path(config["trainer"]["default_local_dir"])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples" / "train_00000001.jsonl").read_text().splitlines()]
    return metrics, samples


@pytest.fixture
def task(tmp_path):
    config = write_task(tmp_path)
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["actor_rollout_ref"]["rollout"]["ignore_eos"] = True  # the last token is a letter
    config["trainer"] |= {"total_training_steps": 8, "test_freq": -1}
    config["reward_model"] = {"enable": True, "model": {"path": str(tmp_path / "rm")}}
    return config


def test_a_reward_model_alone_teaches(task, tmp_path):
    write_reward_model(tmp_path / "rm", tmp_path / "model")
    task["custom_reward_function"] = {}
    metrics, samples = scored_run(task | {"reward": {"on_error": 0.0, "max_error_rate": 1.0}})
    for row in samples:
        if len(row["response"]) == 6:  # of letters alone
            assert (row["score"] > 0) == (row["response"][-1] in LIKED)
    scores = [m["critic/score/mean"] for m in metrics if "critic/score/mean" in m]
    assert scores[-1] > scores[0] + 0.3


def test_the_score_of_an_episode_lies_on_the_last_token_that_the_policy_wrote(task, tmp_path):
    """Not so many tokens after the prompt as it wrote: between them it may have read some."""
    write_reward_model(tmp_path / "rm", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    worker = object.__new__(RewardModelWorker)
    worker.config = load_config(task)
    scorer = load_reward_model(worker.config.reward_model.model, tokenizer, False)
    worker.engine, worker.rewrites = TrainingEngine(scorer, device="cpu"), False
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(list(text)) for text in ("bcdbae", "abcdbb", "bcdeee")])
    written = torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": written}
    scores = worker.compute_rm_score(DataProto.from_dict(rows)).batch["rm_scores"]
    assert (scores != 0).tolist() == [[False] * 4 + [True], [False] * 4 + [True], [False] * 5]
    assert scores[0, 4] > 0 > scores[1, 4]


def test_an_episode_is_read_by_another_tokenizer_as_the_conversation_it_was(tmp_path):
    ours, theirs = (
        AutoTokenizer.from_pretrained(write_model(tmp_path / name, letters=letters))
        for name, letters in (("a", LETTERS), ("b", LETTERS[::-1]))
    )
    theirs.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    ids = torch.tensor([ours.convert_tokens_to_ids(list("abcdef"))] * 2)
    mask = torch.tensor([[1, 0, 0, 1, 1]] * 2)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "cd"}]
    columns = {"raw_prompt": object_array(["a", "a"]), "messages": object_array([said, []])}
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    made = rewritten(DataProto.from_dict(rows, columns), ours, theirs).batch
    texts = [theirs.decode(row[kept.bool()]) for row, kept in zip(made["input_ids"], made["attention_mask"])]
    assert [text.replace(" ", "") for text in texts] == ["uaabtcd", "abcdef"]


def test_model_and_function_add_up(task, tmp_path):
    write_reward_model(tmp_path / "rm", tmp_path / "model")
    task["trainer"]["total_training_steps"] = 1
    _, samples = scored_run(task)
    for row in samples:
        if len(row["response"]) < 6:
            continue
        by_function = sum(c in LIKED for c in row["response"]) / 6
        by_model = row["score"] - by_function
        assert (by_model > 0) == (row["response"][-1] in LIKED)
        assert abs(by_model) > 0.5


def test_a_reward_model_with_another_tokenizer_reads_the_text_not_the_ids(task, tmp_path):
    """Its tokens have other numbers; its scores are those of the letters all the same."""
    write_model(tmp_path / "other", letters=LETTERS[::-1])
    write_reward_model(tmp_path / "rm", tmp_path / "other")
    task["custom_reward_function"] = {}
    task["trainer"]["total_training_steps"] = 1
    _, samples = scored_run(task | {"reward": {"on_error": 0.0, "max_error_rate": 1.0}})
    told = [(row["score"] > 0, row["response"][-1] in LIKED) for row in samples if len(row["response"]) == 6]
    assert len(told) > 32
    assert all(said == is_liked for said, is_liked in told)
