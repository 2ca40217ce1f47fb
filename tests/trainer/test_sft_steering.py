"""A supervised run that is told something while it goes on, in one process and in several."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tiny_sft import ROWS, as_arguments, read_metrics, run_module, sft_job, write_rows, write_shape

from quadriga.config.supervised_schema import SFTConfig
from quadriga.dashboard.catalog import Catalog
from quadriga.errors import RunStopped
from quadriga.tracking.steering import parse_command, tell
from quadriga.trainer.fsdp_sft_trainer import run_sft

STEERED = {
    "steering": True,
    "total_training_steps": 4,
    "test_freq": -1,
    "save_freq": -1,
    "resume_mode": "auto",
    "experiment_name": "steered",
}


@pytest.fixture
def job(tmp_path):
    rows, shape = write_rows(tmp_path / "rows.jsonl", ROWS), write_shape(tmp_path / "shape")
    return sft_job(rows, shape, tmp_path / "run", trainer=STEERED, optim={"lr_scheduler": "constant"})


def told(run: Path, monkeypatch: pytest.MonkeyPatch, *commands: list[str]) -> None:
    """What the run will find in its first step: to its clock, it was told that after it had begun."""
    later = time.time() + 3600
    run.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        for words in commands:
            tell(run, parse_command(words, SFTConfig))


def rates(run: Path) -> list[float]:
    return [line["train/lr"] for line in read_metrics(run)]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("global_step_*"))


def test_it_sets_validates_saves_and_stops_and_goes_on_with_what_was_set(job, tmp_path, monkeypatch, capsys) -> None:
    run = tmp_path / "run"
    told(run, monkeypatch, ["set", "optim.lr=5e-3"], ["validate"], ["save"])
    monkeypatch.setattr("quadriga.trainer.supervised.trainer.SupervisedTrainer.training_step", stopping_in_step_3(run))
    with pytest.raises(RunStopped, match="stopped after step 3 of 4"):
        run_sft(job)
    assert rates(run) == pytest.approx([1e-2, 5e-3, 5e-3])
    assert ["val/loss" in line for line in read_metrics(run)] == [True, False, False]
    assert checkpoints(run) == ["global_step_1", "global_step_3"]
    (seen,) = Catalog([run]).look()
    assert seen.state(time.time()) == "interrupted"
    assert "steered after step 1: set optim.lr=0.005: 0.01 → 0.005" in capsys.readouterr().out
    monkeypatch.undo()
    run_sft(job)
    assert rates(run) == pytest.approx([1e-2, 5e-3, 5e-3, 5e-3])
    assert "optim.lr=0.005, as told after step 1" in capsys.readouterr().out


def stopping_in_step_3(run: Path):
    from quadriga.trainer.supervised.trainer import SupervisedTrainer

    step = SupervisedTrainer.training_step

    def stepping(trainer):
        if trainer.step == 2:
            tell(run, parse_command(["stop"], SFTConfig))
        return step(trainer)

    return stepping


def test_without_the_key_nothing_is_heard(job, tmp_path, monkeypatch) -> None:
    told(tmp_path / "run", monkeypatch, ["stop"])
    job["trainer"]["steering"] = False
    run_sft(job)
    assert len(read_metrics(tmp_path / "run")) == 4


@pytest.mark.slow
def test_all_processes_do_what_one_of_them_was_told(job, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    told(run, monkeypatch, ["set", "optim.lr=5e-3"], ["stop"])
    done = run_module(as_arguments(job), processes=2)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "stopped after step 1 of 4, as asked" in line]
    assert [line.startswith("RunStopped") for line in said] == [True, False], (
        done.stderr
    )  # torchrun's summary has it too
    assert checkpoints(run) == ["global_step_1"]
    done = run_module(as_arguments(job), processes=2)
    assert done.returncode == 0, done.stderr
    assert rates(run) == pytest.approx([1e-2, 5e-3, 5e-3, 5e-3])
    alone = tmp_path / "alone"
    told(alone, monkeypatch, ["set", "optim.lr=5e-3"])
    job["trainer"]["default_local_dir"] = str(alone)
    run_sft(job)
    losses = [[line["train/loss"] for line in read_metrics(folder)] for folder in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["command"] for event in events if event["kind"] == "steered"] == ["set optim.lr=0.005", "stop"]
