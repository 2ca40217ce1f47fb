"""Which run a command means: a new one, one to go on with, one that is over, or another one that is in the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_pairs import pair_job, write_pairs
from tiny_policy import write_model, write_prompts, write_task

from quadriga.checkpoint.store import CheckpointStore
from quadriga.config.load import compose, load_config
from quadriga.config.run_name import new_name
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SFTConfig
from quadriga.errors import ConfigError
from quadriga.tracking import RunDirectory
from quadriga.trainer import watching
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.saver import Saver
from quadriga.trainer.supervised.entry import run_supervised


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A short run in a working folder of its own, without a name."""
    config = write_task(tmp_path / "task")
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["trainer"] |= {"total_training_steps": 1, "test_freq": -1}
    del config["trainer"]["default_local_dir"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return config


def recorded(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_commands_of_the_readme_follow_each_other(task, capsys):
    """The quickstart, the quickstart again, then a run of one's own: three runs, each in a directory of its own."""
    short = ["trainer.executor=local", "trainer.total_training_steps=1", "data.train_batch_size=8"]
    short += ["data.val_max_samples=8", "trainer.device=cpu"]
    for config in (compose(short, "quickstart"), compose(short, "quickstart"), task):
        run_ppo(config)
        assert "a new run in outputs/quadriga/" in capsys.readouterr().out
    folders = sorted(Path("outputs/quadriga").iterdir())
    assert [folder.name.split("-")[0] for folder in folders] == ["arithmetic", "arithmetic", "model"]
    assert all(1 in recorded(folder) for folder in folders)


def test_a_quickstart_with_a_name_goes_on_where_it_was(task, capsys):
    """As the first page and the run's own first line say."""
    short = ["trainer.executor=local", "data.train_batch_size=8", "data.val_max_samples=8", "trainer.device=cpu"]
    for steps in (1, 2):
        run_ppo(
            compose([*short, "trainer.experiment_name=mine", f"trainer.total_training_steps={steps}"], "quickstart")
        )
        assert "a new run" not in capsys.readouterr().out
    assert recorded(Path("outputs/quadriga/mine")) == [0, 1, 2]


def test_a_name_of_ones_own_is_gone_on_with_and_said_to_be_over(task, capsys):
    task["trainer"]["experiment_name"] = "mine"
    run_ppo(task)
    task["trainer"]["total_training_steps"] = 2
    run_ppo(task)
    folder = Path("outputs/quadriga/mine")
    assert recorded(folder) == [1, 2]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    capsys.readouterr()
    run_ppo(task)
    said = capsys.readouterr().out
    assert "nothing is left to do" in said
    assert "trainer.experiment_name" in said
    assert "→" not in said, "what the run before achieved is not shown as new"
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("what", ["model", "task"])
def test_another_model_or_task_does_not_go_on_in_the_same_directory(task, tmp_path, what):
    task["trainer"] |= {"experiment_name": "mine"}
    run_ppo(task)
    if what == "model":
        task["actor_rollout_ref"]["model"]["path"] = str(write_model(tmp_path / "other_model"))
    else:
        task["data"]["train_files"] = str(write_prompts(tmp_path / "other.jsonl"))
    task["trainer"]["total_training_steps"] = 2
    with pytest.raises(ConfigError, match="a run of another model or task") as caught:
        run_ppo(task)
    assert "trainer.experiment_name" in caught.value.fix
    assert recorded(Path("outputs/quadriga/mine")) == [1]
    on_purpose = {"resume_mode": "resume_path", "experiment_name": "third"}
    task["trainer"] |= {**on_purpose, "resume_from_path": "outputs/quadriga/mine/checkpoints/global_step_1"}
    run_ppo(task)
    assert recorded(Path("outputs/quadriga/third")) == [2]


def test_supervised_runs_have_names_of_the_same_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "start")
    job = pair_job(write_pairs(tmp_path / "pairs.jsonl"), model, tmp_path / "run", trainer={"total_training_steps": 1})
    job["trainer"] |= {"resume_mode": "auto"}
    del job["trainer"]["default_local_dir"]
    run_supervised(job, "dpo")
    run_supervised(job, "dpo")
    assert len(list(Path("outputs/quadriga").glob("start-20*"))) == 2
    job["trainer"]["experiment_name"] = "mine"
    run_supervised(job, "dpo")
    job["data"] |= {"train_files": str(write_pairs(tmp_path / "others.jsonl"))}
    with pytest.raises(ConfigError, match="a run of another model or task"):
        run_supervised(job, "dpo")


def test_runs_that_start_at_the_same_moment_have_two_names():
    """Before either has made its folder."""
    assert new_name("Qwen/Qwen2.5-0.5B").startswith("Qwen2.5-0.5B-20")
    assert len({new_name("Qwen/Qwen2.5-0.5B") for _ in range(20)}) == 20


@pytest.mark.parametrize("name", ["", "../../x", "/x", "a/./b", "a\nb", "."])
@pytest.mark.parametrize("schema", [Config, SFTConfig])
def test_a_name_that_is_no_folder_below_outputs_is_refused(name, schema):
    with pytest.raises(ConfigError, match=r"trainer.experiment_name=.* is no name"):
        load_config({"trainer": {"experiment_name": name}}, schema)


def test_a_folder_of_ones_own_is_a_name(tmp_path):
    assert load_config({"trainer": {"default_local_dir": "~/runs/mine"}}).trainer.experiment_name == "mine"
    assert load_config({"trainer": {"default_local_dir": "."}}).trainer.experiment_name == Path.cwd().name


# ---- what is recorded, and what is known of it ---------------------------------------------------------------------


def test_lines_that_are_missing_behind_a_checkpoint_are_said(task, capsys):
    task["trainer"] |= {"experiment_name": "mine", "total_training_steps": 3, "save_freq": 1}
    run_ppo(task)
    metrics = Path("outputs/quadriga/mine/metrics.jsonl")
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:1]))
    task["trainer"]["total_training_steps"] = 4
    capsys.readouterr()
    run_ppo(task)
    assert "lacks 2 of the 3 steps that were done, the first is step 2" in " ".join(capsys.readouterr().out.split())
    assert recorded(metrics.parent) == [1, 4]


def test_lines_are_durable_before_the_checkpoint_that_follows_them(tmp_path):
    class Crew:
        def copy_state(self):
            return 0

        def begin_writing(self, draft):
            draft.folder("actor")

        def written(self):
            return []

    happened = []
    store = CheckpointStore(tmp_path / "checkpoints")
    commit = store.commit
    store.commit = lambda draft: (happened.append("commit"), commit(draft))
    saver = Saver(store, Crew(), 5, flush=lambda: happened.append("flush"))
    saver.start(1, {"step": 1})
    saver.step_recorded()
    saver.finish()
    assert happened == ["flush", "commit"]


def test_lines_are_synced_to_disk(tmp_path, monkeypatch):
    import os

    directory = RunDirectory(tmp_path)
    directory.begin()
    directory.append_metrics(1, {"a": 1.0})
    synced = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    directory.sync_metrics()
    assert synced == [str(directory.metrics_file), str(directory.path)]
    directory.close()


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/venv/bin/quadriga", "train", "trainer.save_freq=1"], "quadriga train trainer.save_freq=1"),
        (["-m", "quadriga.trainer.main_ppo", "a='b c'"], "python -m quadriga.trainer.main_ppo 'a='\"'\"'b c'\"'\"''"),
    ],
)
def test_the_command_that_goes_on_names_the_run(tmp_path, monkeypatch, words, expected):
    store = CheckpointStore(tmp_path / "mine" / "checkpoints")
    config = load_config({"trainer": {"default_local_dir": str(tmp_path / "mine")}})
    assert "no checkpoint was written yet" in watching.how_to_go_on(config)
    with store.writing(7) as draft:
        draft.write_state({"step": 7})
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", *words])
    spec = type("Spec", (), {"name": "quadriga.trainer.main_ppo"})() if "-m" in words else None
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    said = watching.how_to_go_on(config)
    assert f"the checkpoint of step 7 is {tmp_path / 'mine/checkpoints/global_step_7'}" in said
    assert said.endswith(f"go on from there with: {expected} trainer.experiment_name=mine")
