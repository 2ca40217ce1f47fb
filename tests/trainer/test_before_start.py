"""What this machine lacks is told before Ray is started, all at once, within seconds."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.trainer.before_start import problems_here
from quadriga.trainer.main_ppo import run_ppo


def write_rows(file: Path, *rows: dict) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


CHAT = {"prompt": [{"role": "user", "content": "2+2?"}], "data_source": "x", "reward_model": {"ground_truth": "4"}}


def problems(tmp_path: Path, **sections) -> str:
    trainer = {"default_local_dir": str(tmp_path / "run"), **sections.pop("trainer", {})}
    found = problems_here(load_config({"trainer": trainer, **sections}))
    return "\n".join(f"{what} {fix}" for what, fix in found)


def test_everything_that_is_missing_is_told_at_once_and_no_ray_is_started(tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = {
        "data": {"train_files": str(tmp_path / "none.parquet"), "val_files": str(tmp_path / "none.txt")},
        "actor_rollout_ref": {"model": {"path": str(tmp_path / "no_model")}},
        "custom_reward_function": {"path": str(tmp_path / "no_reward.py")},
        "trainer": {"default_local_dir": str(tmp_path / "run")},
    }
    began = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        run_ppo(config)
    assert time.monotonic() - began < 5
    text = str(raised.value)
    assert text.startswith("4 problems")
    for part in ("none.parquet does not exist", "none.txt", "no_model does not exist", "no_reward.py"):
        assert part in text


def test_a_chat_without_a_template_is_found_in_the_first_row(tmp_path):
    rows = write_rows(tmp_path / "chats.jsonl", CHAT)
    assert "has no chat template" in problems(tmp_path, data={"train_files": rows, "val_files": rows})
    with_template = {"train_files": rows, "val_files": rows, "chat_template": "{{ messages }}"}
    assert problems(tmp_path, data=with_template) == ""


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", {"question": "2+2", "data_source": "x"})
    text = problems(tmp_path, data={"train_files": rows, "val_files": rows})
    assert "no column 'prompt', only question, data_source" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "cannot be read|thousand deep|not valid JSON"),
        ('{"prompt": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001, "thousand deep"),
        ('{"prompt": ' + "9" * 10_000 + "}", "digits"),
    ],
)
def test_json_that_breaks_a_reader_is_one_sentence_with_its_line(tmp_path, line, message):
    from quadriga.data.files import load_rows
    from quadriga.errors import DataError

    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(DataError, match=message) as raised:
        load_rows(str(file))
    assert str(file) in str(raised.value)
    assert len(str(raised.value)) < 1000


def hold(folder: str, held, done) -> None:
    from quadriga.tracking.run_directory import RunDirectory

    RunDirectory(folder).lock()
    held.set()
    done.wait(60)


def test_a_run_directory_in_use_is_told_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(str(tmp_path / "run"), held, done))
    other.start()
    try:
        assert held.wait(60)
        began = time.monotonic()
        assert f"in use by pid {other.pid}" in problems(tmp_path)
        assert time.monotonic() - began < 5
    finally:
        done.set()
        other.join(60)
    assert problems(tmp_path) == ""


def test_files_of_a_cluster_are_not_looked_for_here(tmp_path):
    sections = {"data": {"train_files": "/on/the/cluster.parquet"}, "ray_kwargs": {"ray_init": {"address": "auto"}}}
    assert problems(tmp_path, **sections) == ""


def test_a_folder_called_latest_is_named_before_the_run(tmp_path):
    (tmp_path / "run" / "checkpoints" / "latest").mkdir(parents=True)
    assert "latest is a folder" in problems(tmp_path)


@pytest.mark.parametrize("name", ["numpy.py", "torch/__init__.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path, monkeypatch, name):
    hiding = tmp_path / name
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert f"{hiding} hides the package" in problems(tmp_path)


def test_a_row_without_a_truth_is_named_when_the_files_are_read(tmp_path):
    from quadriga.data import RLDataset
    from quadriga.errors import DataError
    from quadriga.models import load_tokenizer
    from quadriga.rewards import check_truths

    good = {"prompt": "2+2=", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}
    file = write_rows(tmp_path / "rows.jsonl", good, {**good, "reward_model": None})
    dataset = RLDataset(file, load_tokenizer("builtin:arithmetic"), max_prompt_length=8)
    with pytest.raises(DataError, match=r"rows.jsonl, row 1 has no reward_model.ground_truth"):
        check_truths(load_config({}), [dataset])
    check_truths(load_config({"custom_reward_function": {"path": "mine.py"}}), [dataset])
