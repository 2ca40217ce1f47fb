"""Checkpoints of a supervised run: what was killed goes on as if it had not been, on any number of processes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_sft import REPO, ROWS, as_arguments, read_metrics, run_module, sft_job, write_rows, write_shape

from quadriga.checkpoint.store import CheckpointStore
from quadriga.errors import CheckpointError, ConfigError
from quadriga.trainer.fsdp_sft_trainer import run_sft

STEPS = 6


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> Path:
    return write_shape(tmp_path_factory.mktemp("shape"))


@pytest.fixture
def job(tmp_path, shape):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)

    def make(name, **changes):
        trainer = {"total_training_steps": STEPS, "save_freq": 2, "resume_mode": "auto", **changes.get("trainer", {})}
        return sft_job(rows, shape, tmp_path / name, **{**changes, "trainer": trainer})

    return make


def result(run_dir: Path) -> tuple[list, bytes]:
    losses = [(line["step"], line["train/loss"], line["train/lr"]) for line in read_metrics(run_dir)]
    return losses, (run_dir / "huggingface" / "model.safetensors").read_bytes()


def test_a_stopped_run_goes_on_bit_for_bit(job, tmp_path, capsys):
    run_sft(job("whole"))
    half = job("halves", trainer={"save_freq": 3})
    # Stopped after step 4, whose work is lost: the schedule must be that of the whole run, so it is killed, not shortened.
    run_until_step(half, tmp_path / "halves", 4)
    run_sft(half)
    assert "resumed after step 3 of 6" in capsys.readouterr().out
    assert result(tmp_path / "halves") == result(tmp_path / "whole")


def run_until_step(config, run_dir: Path, step: int) -> None:
    """Train in a process of its own and kill it once `step` is in metrics.jsonl."""
    slow = {**config["trainer"], "total_training_steps": STEPS}
    arguments = as_arguments({**config, "trainer": slow})
    # Each step waits a little, so that the kill falls before the end.
    program = (
        "import sys, time; from quadriga.trainer.supervised import trainer as t\n"
        "step = t.SupervisedTrainer.training_step\n"
        "t.SupervisedTrainer.training_step = lambda self: (time.sleep(0.3), step(self))[1]\n"
        "from quadriga.trainer.fsdp_sft_trainer import command; sys.exit(command(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=REPO, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    try:
        while not (run_dir / "metrics.jsonl").exists() or len(read_metrics(run_dir)) < step:
            assert time.monotonic() < deadline, "the run did not get that far"
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped(job, tmp_path):
    run_sft(job("whole"))
    run_until_step(job("changed"), tmp_path / "changed", 3)
    done = run_module(as_arguments(job("changed")), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed after step 2" in done.stdout
    whole, changed = result(tmp_path / "whole")[0], result(tmp_path / "changed")[0]
    for (step, loss, rate), (other_step, other_loss, other_rate) in zip(whole, changed, strict=True):
        assert (step, rate) == (other_step, other_rate)
        assert loss == pytest.approx(other_loss, abs=1e-5)


def test_a_finished_run_does_nothing_more_says_so_and_keeps_its_records(job, tmp_path, capsys):
    run_sft(job("run"))
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files_of(tmp_path / "run")}
    capsys.readouterr()
    assert run_sft(job("run", optim={"lr": 0.5})) == {}
    said = capsys.readouterr().out
    assert "nothing is left to do" in said
    assert "→" not in said, "nothing old is shown as new"
    after = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files_of(tmp_path / "run")}
    assert after == before
    assert "lr: 0.01" in (tmp_path / "run" / "config.yaml").read_text()


def files_of(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and file.name != ".lock"]


def test_a_run_that_was_ended_before_its_model_had_its_place_puts_it_there(job, tmp_path):
    run_sft(job("run"))
    model = (tmp_path / "run" / "huggingface" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "huggingface")
    run_sft(job("run"))
    assert (tmp_path / "run" / "huggingface" / "model.safetensors").read_bytes() == model


def test_old_checkpoints_are_thinned_out_and_the_newest_is_the_exported_model(job, tmp_path):
    from safetensors.torch import load_file

    run_sft(job("run", trainer={"max_ckpt_to_keep": 2}))
    kept = CheckpointStore(tmp_path / "run" / "checkpoints").checkpoints()
    assert [checkpoint.step for checkpoint in kept] == [6, 4]
    inside = load_file(kept[0].folder("huggingface") / "model.safetensors")
    published = load_file(tmp_path / "run" / "huggingface" / "model.safetensors")
    assert all(torch.equal(inside[name], published[name]) for name in published)


def test_other_data_than_before_is_refused(job, tmp_path):
    run_sft(job("run"))
    fewer = write_rows(tmp_path / "fewer.jsonl", ROWS[:-2])
    with pytest.raises(ConfigError, match="another model or task"):
        run_sft(job("run", data={"train_files": str(fewer)}))
    write_rows(tmp_path / "rows.jsonl", ROWS[:-2])
    with pytest.raises(CheckpointError, match=r"training set is not the one|num_rows=12"):
        run_sft(job("run", trainer={"total_training_steps": STEPS + 1}))


def test_a_checkpoint_of_another_run_can_be_named(job, tmp_path):
    run_sft(job("first", trainer={"total_training_steps": 2}))
    more = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "first"), "total_training_steps": 3}
    run_sft(job("nothing", trainer={**more, "total_training_steps": 2}))
    assert not (tmp_path / "nothing" / "metrics.jsonl").exists(), "it was over"
    run_sft(job("second", trainer=more))
    assert [line["step"] for line in read_metrics(tmp_path / "second")] == [3]


def test_lora_and_its_optimiser_come_back(job, tmp_path):
    run_sft(job("base", trainer={"total_training_steps": 1}))
    model = {"from_config": None, "partial_pretrain": str(tmp_path / "base" / "huggingface"), "lora_rank": 2}
    run_sft(job("whole", model=model))
    run_until_step(job("parts", model=model), tmp_path / "parts", 3)
    run_sft(job("parts", model=model))
    assert result(tmp_path / "parts") == result(tmp_path / "whole")
