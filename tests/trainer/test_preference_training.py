"""Reward models and DPO: they learn the preference, whatever the cut into micro-batches and processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_pairs import pair_job, write_pairs
from tiny_policy import write_model
from tiny_sft import as_arguments, read_metrics, run_module

from quadriga.config import load_config
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.dashboard.catalog import Catalog
from quadriga.dashboard.samples import Query, sample_page
from quadriga.trainer.supervised.entry import run_supervised
from quadriga.trainer.supervised.trainer import SupervisedTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(tmp_path, model):
    pairs = write_pairs(tmp_path / "pairs.jsonl")

    def make(name="run", **changes):
        return pair_job(pairs, model, tmp_path / name, **changes)

    return make


def trainer_of(kind, config) -> SupervisedTrainer:
    return SupervisedTrainer(load_config(config, SCHEMAS[kind]))


@pytest.mark.parametrize(("kind", "model_keys"), [("rm", {}), ("dpo", {}), ("dpo", {"lora_rank": 4})])
def test_it_learns_which_answer_is_better(job, tmp_path, model, kind, model_keys):
    held_out = write_pairs(tmp_path / "held_out.jsonl", 32, seed=1)
    config = job()
    config["model"] |= model_keys
    config["data"]["val_files"] = str(held_out)
    config["trainer"]["test_freq"] = 6
    if model_keys:
        config["optim"]["lr"] = 2e-2
    before = trainer_of(kind, config).validate()
    after = run_supervised(config, kind)
    assert before["val/loss"] == pytest.approx(0.6931, abs=1e-3)  # neither answer is preferred at the start
    assert after["val/loss"] < 0.5
    assert after["val/accuracy"] > 0.9 > before["val/accuracy"]
    assert after["val/chosen_reward"] > after["val/rejected_reward"]
    (run,) = Catalog([tmp_path / "run"]).look()
    kept = sample_page(run, Query("val", run.step))["rows"]
    assert len(kept) == 32
    assert sum(row["outcome"] == "correct" for row in kept) / 32 == pytest.approx(after["val/accuracy"])
    assert kept[0]["chosen"]["text"] != kept[0]["rejected"]["text"]
    margins = [row["chosen"]["reward"] - row["rejected"]["reward"] for row in kept]
    assert sum(margins) / 32 == pytest.approx(after["val/margin"], rel=1e-3)
    page = (tmp_path / "run" / "summary.html").read_text()
    assert "after step 6</th>" in page
    assert "prefers this answer by" in page


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_loss_and_gradient_do_not_depend_on_the_cut(job, kind):
    def first_steps(**data):
        trainer = trainer_of(kind, {**job(), "data": {**job()["data"], **data}})
        return [trainer.training_step() for _ in range(3)]

    whole = first_steps()
    for cut in ({"micro_batch_size_per_gpu": 1}, {"micro_batch_size_per_gpu": 5}, {"max_token_len_per_gpu": 32}):
        for step, other in zip(whole, first_steps(**cut), strict=True):
            for name in ("train/loss", "train/grad_norm", "train/margin"):
                assert other[name] == pytest.approx(step[name], rel=1e-4, abs=1e-5), (cut, name)


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_two_processes_compute_what_one_computes(job, tmp_path, kind):
    short = {"total_training_steps": 3}
    run_supervised(job("one", trainer=short), kind)
    done = run_module(
        [kind, *as_arguments(job("two", trainer=short))], processes=2, module="quadriga.trainer.supervised"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for alone, together in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/margin"):
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name
    assert read_metrics(tmp_path / "two")[-1]["val/loss"] == pytest.approx(
        read_metrics(tmp_path / "one")[-1]["val/loss"], rel=1e-4
    )


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_a_stopped_run_goes_on_bit_for_bit(job, tmp_path, kind):
    trainer = {"total_training_steps": 4, "save_freq": 2, "resume_mode": "auto"}
    run_supervised(job("whole", trainer=trainer), kind)
    halves = trainer_of(kind, job("halves", trainer=trainer))
    halves.training_step()
    halves.training_step()
    halves.save()
    run_supervised(job("halves", trainer=trainer), kind)
    weights = [(tmp_path / name / "huggingface" / "model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert weights[0] == weights[1]


def test_the_reference_of_dpo_is_the_start_also_after_a_resume(job):
    trainer = trainer_of("dpo", job())
    for _ in range(3):
        trainer.training_step()
    trainer.save()
    again = trainer_of("dpo", job(trainer={"resume_mode": "auto"}))
    again.resume()
    assert again.step == 3
    first, second = trainer.training_step(), again.training_step()
    assert second["train/loss"] == first["train/loss"]
    assert second["train/margin"] == first["train/margin"] != 0


def test_the_reward_model_folder_loads_in_transformers_and_in_quadriga(job, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from quadriga.commands.export import main as export
    from quadriga.config.schema_models import OtherModelConfig
    from quadriga.engine import TrainingEngine
    from quadriga.models.load import load_reward_model
    from quadriga.protocol import DataProto

    run_supervised(job(), "rm")
    folder = tmp_path / "exported"
    assert export([str(tmp_path / "run"), "--output", str(folder)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in ("say aaeiou", "say xbcdfg", "say bx")]
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = [theirs(input_ids=torch.tensor([row])).logits.item() for row in ids]
    width = max(map(len, ids))
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    batch = DataProto.from_dict(
        tensors={"input_ids": padded, "attention_mask": mask, "response_mask": mask[:, 1:].contiguous()}
    )
    ours = TrainingEngine(load_reward_model(OtherModelConfig(path=str(folder), trust_remote_code=False)))
    assert ours.scores(batch, 1000).tolist() == pytest.approx(expected, abs=1e-4)
    assert expected[0] > expected[1]
