"""Supervised training: it learns, its loss is that of the global batch however it is cut, and its export loads anywhere."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_sft import ROWS, as_arguments, read_metrics, run_module, sft_job, write_rows, write_shape

from quadriga.config import load_config
from quadriga.config.supervised_schema import SFTConfig
from quadriga.dashboard.catalog import Catalog
from quadriga.dashboard.samples import Query, sample_page, sample_steps
from quadriga.dashboard.timeline import Timelines
from quadriga.data import SFTDataset
from quadriga.errors import ConfigError, DataError
from quadriga.trainer.fsdp_sft_trainer import command, run_sft
from quadriga.trainer.supervised.trainer import SupervisedTrainer


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> Path:
    return write_shape(tmp_path_factory.mktemp("shape"))


@pytest.fixture
def job(tmp_path, shape):
    """The configuration of a small run, as nested dicts; `job(section={...})` changes it."""
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)

    def make(**changes):
        return sft_job(rows, shape, tmp_path / "run", **changes)

    return make


def sft_trainer(config) -> SupervisedTrainer:
    return SupervisedTrainer(load_config(config, SFTConfig))


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "huggingface" / "model.safetensors")


# ---- learning --------------------------------------------------------------------------------------------------------


def test_loss_falls_on_a_tiny_job(job, tmp_path):
    run_sft(job(trainer={"total_training_steps": 60, "test_freq": 20}))
    metrics = read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(1, 61))
    assert metrics[-1]["train/loss"] < 0.5 < 2 < metrics[0]["train/loss"]
    validated = {line["step"]: line["val/loss"] for line in metrics if "val/loss" in line}
    assert list(validated) == [20, 40, 60]
    assert validated[60] < validated[20]


def test_a_run_leaves_what_a_viewer_needs(job, tmp_path, capsys):
    run_sft(job(trainer={"total_training_steps": 6, "test_freq": 3, "log_freq": 3}))
    printed = capsys.readouterr().out
    assert "step 3/6 · loss" in printed
    assert "held-out loss" in printed
    assert "step 2/6" not in printed
    (run,) = Catalog([tmp_path / "run"]).look()
    assert (run.kind, run.state(time.time()), run.step) == ("sft", "finished", 6)
    assert sample_steps(run)["val"] == [3, 6]
    sample = sample_page(run, Query("val", 6))["rows"][0]
    assert sample["prompt"] + sample["response"] == ROWS[0]["question"] + ROWS[0]["answer"]
    tokens = sample["tokens"]
    learnt = [value for value, mask in zip(tokens["trainer_log_probs"], tokens["mask"]) if mask]
    assert -sum(learnt) / len(learnt) == pytest.approx(sample["extras"]["loss"], abs=1e-3)
    assert "Loss" in (tmp_path / "run" / "summary.html").read_text()
    assert Timelines().steps(run)["steps"] == [1, 2, 3, 4, 5, 6]


def test_without_validation_files_examples_of_the_training_are_kept(job, tmp_path):
    run_sft(job(data={"val_files": None}, trainer={"total_training_steps": 2}))
    (run,) = Catalog([tmp_path / "run"]).look()
    assert sample_steps(run) == {"train": [2], "val": []}


def test_epochs_decide_the_length_and_the_schedule_ends_with_it(job, tmp_path):
    config = job(trainer={"total_epochs": 2})
    config["trainer"]["total_training_steps"] = None
    run_sft(config)
    metrics = read_metrics(tmp_path / "run")
    assert [line["train/epoch"] for line in metrics] == [0, 0, 0, 1, 1, 1]
    rates = [line["train/lr"] for line in metrics]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(1e-2)


def test_a_number_of_warm_up_steps_wins_over_the_usual_share(job, tmp_path):
    optim = {"lr": 1e-2, "lr_warmup_steps": 4, "lr_scheduler": "constant"}
    config = job(trainer={"total_training_steps": 6}, optim=optim)
    config["optim"].pop("lr_warmup_steps_ratio", None)
    run_sft(config)
    rates = [line["train/lr"] for line in read_metrics(tmp_path / "run")]
    assert rates == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, 1e-2, 1e-2, 1e-2])


def test_lora_trains_the_adapter_and_exports_plain_weights(job, tmp_path):
    run_sft(job())
    before = weights_of(tmp_path / "run")
    base = (tmp_path / "run" / "huggingface").rename(tmp_path / "base")
    run_sft(job(model={"from_config": None, "partial_pretrain": str(base), "lora_rank": 4}))
    after = weights_of(tmp_path / "run")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".self_attn." in name or ".mlp." in name for name in changed)


def test_conversations_are_learnt_through_the_messages_key(job, tmp_path):
    template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ '=' }}{% endif %}{% endfor %}"
    )
    chats = [
        {"chat": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]}
        for r in ROWS
    ]
    rows = write_rows(tmp_path / "chats.jsonl", chats)
    data = {"train_files": str(rows), "val_files": None, "messages_key": "chat", "chat_template": template}
    metrics = run_sft(job(data=data, trainer={"total_training_steps": 30}))
    assert metrics["train/loss"] < 2


# ---- the loss is that of the global batch ----------------------------------------------------------------------------


def by_hand(trainer: SupervisedTrainer) -> float:
    """Mean of −log p over all target tokens of the training rows, one row at a time, with the model's own forward pass."""
    total, tokens = 0.0, 0
    model = trainer.engine.model.huggingface
    model.set_attn_implementation("eager")
    for item in SFTDataset(
        trainer.config.data.train_files,
        trainer.objective.tokenizer,
        max_length=99,
        prompt_key="question",
        response_key="answer",
    ):
        ids = torch.tensor(item["input_ids"], dtype=torch.long)[None]
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(item["loss_mask"][1:], dtype=torch.bool)
        total, tokens = total - log_probs[mask].sum().item(), tokens + int(mask.sum())
    model.set_attn_implementation("quadriga_packed")
    return total / tokens


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size_per_gpu": 1}, {"max_token_len_per_gpu": 40, "max_length": 40}])
def test_loss_is_the_token_mean_of_the_whole_batch_however_it_is_cut(job, cut):
    trainer = sft_trainer(job(data={"train_batch_size": len(ROWS), **cut}))
    expected = by_hand(trainer)
    assert trainer.validate()["val/loss"] == pytest.approx(expected, abs=1e-6)
    assert trainer.training_step()["train/loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rows_per_pass", ["1", "null"])
def test_two_processes_compute_what_one_computes(job, tmp_path, rows_per_pass):
    data = {"micro_batch_size_per_gpu": rows_per_pass, "val_files": str(write_rows(tmp_path / "val.jsonl", ROWS[:5]))}
    one = job(trainer={"default_local_dir": str(tmp_path / "one"), "test_freq": 1})
    two = job(data=data, trainer={"default_local_dir": str(tmp_path / "two"), "test_freq": 1})
    one["data"]["val_files"] = two["data"]["val_files"]
    run_sft(one)
    done = run_module(as_arguments(two), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for alone, together in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True):
        for name in ("train/loss", "train/grad_norm", "val/loss", "train/lr"):
            assert together[name] == pytest.approx(alone[name], abs=2e-6 if alone["step"] > 1 else 1e-6), (
                name,
                alone["step"],
            )
    alone, together = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert max((alone[name] - together[name]).abs().max().item() for name in alone) < 1e-5


# ---- what it leaves behind -------------------------------------------------------------------------------------------


def test_the_export_loads_in_transformers_and_gives_the_same_log_probs(job, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = sft_trainer(job())
    trainer.fit()
    folder = tmp_path / "run" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "12+34=#### 46"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template is None
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(tokenizer([text]).input_ids)
    theirs = model(input_ids=ids).logits
    ours = trainer.engine.model.huggingface
    ours.set_attn_implementation("eager")
    assert torch.allclose(theirs, ours(input_ids=ids).logits, atol=1e-5)
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(job, tmp_path):
    def run(seed):
        run_sft(job(trainer={"seed": seed}))
        return (tmp_path / "run" / "huggingface" / "model.safetensors").read_bytes()

    assert run(1) == run(1) != run(2)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_dealt_out_names_the_nearest_sizes(job, monkeypatch):
    monkeypatch.setattr("quadriga.trainer.supervised.trainer.world_size", lambda: 3)
    with pytest.raises(ConfigError, match=r"train_batch_size=4 .* 3 processes(?s:.*)set it to 3 or 6"):
        sft_trainer(job())


def test_a_lora_target_that_matches_nothing_is_named(job, tmp_path):
    run_sft(job(trainer={"total_training_steps": 1}))
    base = {"from_config": None, "partial_pretrain": str((tmp_path / "run" / "huggingface").rename(tmp_path / "base"))}
    for wrong in (["q_prj"], ["q_proj", "v_prj"]):
        with pytest.raises(ConfigError, match=rf"model.target_modules.*{wrong[-1]}"):
            run_sft(job(model={**base, "lora_rank": 2, "target_modules": wrong}))


def test_an_answer_without_text_stops_the_run_unless_it_may_be_skipped(job, tmp_path):
    rows = write_rows(tmp_path / "gaps.jsonl", [*ROWS[:8], {"question": "1+1=", "answer": " "}])
    gaps = {"train_files": str(rows), "val_files": None}
    with pytest.raises(DataError, match="1 of 9 rows have nothing to learn from"):
        run_sft(job(data=gaps))
    run_sft(job(data={**gaps, "empty_response": "skip"}))


def test_an_empty_folder_is_no_model(job, tmp_path):
    with pytest.raises(ConfigError, match=r"has no .*config\.json"):
        run_sft(job(model={"from_config": str(tmp_path)}))


def test_unknown_keys_end_the_command_with_the_nearest_key(job, capsys):
    assert command([*as_arguments(job()), "optim.clip_gradient=1"]) == 1
    assert "did you mean optim.clip_grad?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "model"),
    [
        ("quadriga.trainer.fsdp_sft_trainer", {}),
        (
            "quadriga.trainer.sft_trainer",
            {"from_config": None, "path": "builtin:arithmetic"},
        ),  # as newer scripts spell it
    ],
)
def test_the_module_runs_without_torchrun(job, tmp_path, module, model):
    done = run_module(as_arguments(job(model=model, trainer={"total_training_steps": 1})), module=module, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "model written to" in done.stdout
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("module", ["fsdp_sft_trainer", "sft_trainer", "main_ppo"])
def test_main_is_a_hydra_application_as_in_verl(tmp_path, module):
    code = f"from quadriga.trainer.{module} import main; main()"
    command = [sys.executable, "-c", code, "--cfg", "job", "trainer.total_epochs=7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "total_epochs: 7" in done.stdout
