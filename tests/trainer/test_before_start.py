"""What this machine lacks is told before Ray is started, all at once, within seconds."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path

import pytest
from tiny_pairs import pair_job, write_pairs
from tiny_policy import write_model, write_task

from quadriga.config import load_config
from quadriga.config.plan import count_rows
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.data.files import load_rows
from quadriga.errors import CheckpointError, ConfigError, DataError
from quadriga.trainer.before_start import problems_here, supervised_problems_here
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.supervised.entry import run_supervised


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


def test_an_adapter_and_a_reward_model_that_are_not_there_are_missed_before_the_start(tmp_path):
    adapter = {"model": {"lora_adapter_path": str(tmp_path / "adapter")}}
    text = problems(tmp_path, actor_rollout_ref=adapter, reward_model={"enable": True})
    assert "adapter: there is no adapter_config.json and no adapter_model.safetensors" in text
    assert "reward_model.model.path is the policy itself" in text


def test_tokenizers_and_the_critics_model_that_are_not_there_are_missed_before_the_start(tmp_path):
    policy, critic = {"model": {"tokenizer_path": "/no/tokenizer"}}, {"model": {"path": "/no/critic"}}
    told = problems(tmp_path, actor_rollout_ref=policy, critic=critic)
    assert "folder /no/tokenizer does not exist" in told
    assert "folder /no/critic does not exist" in told
    model = {**MODEL, "tokenizer_path": "/no/tokenizer"}
    data = {"train_files": write_rows(tmp_path / "rows.jsonl", {"question": "2+2=", "answer": "4"})}
    assert "folder /no/tokenizer does not exist" in supervised("sft", tmp_path, data=data, model=model)


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


def test_a_run_directory_that_is_a_file_is_told_at_once(tmp_path):
    (tmp_path / "run").touch()
    assert "run cannot be made: there is a file of that name" in problems(tmp_path)


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


def test_a_network_interface_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    for told in (problems(tmp_path), supervised("sft", tmp_path, model=MODEL, data={"train_files": "builtin:x"})):
        assert "GLOO_SOCKET_IFNAME=eth7: this machine has no network interface 'eth7', only " in told


# ---- sft, rm, dpo ----


def supervised(kind: str, tmp_path: Path, **sections) -> str:
    trainer = {"default_local_dir": str(tmp_path / "run"), **sections.pop("trainer", {})}
    config = load_config({"trainer": trainer, **sections}, SCHEMAS[kind])
    return "\n".join(f"{what} {fix}" for what, fix in supervised_problems_here(config))


MODEL = {"partial_pretrain": "builtin:arithmetic"}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_what_a_supervised_run_lacks_is_told_at_once(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # nothing heavy is loaded for it
    data = {"train_files": str(tmp_path / "none.jsonl"), "val_files": str(tmp_path / "none.txt")}
    config = {"data": data, "model": {"partial_pretrain": str(tmp_path / "no_model")}}
    config["trainer"] = {"default_local_dir": "/dev/null/run"}
    with pytest.raises(ConfigError) as raised:
        run_supervised(config, kind)
    assert str(raised.value).startswith("4 problems")
    for part in ("none.jsonl does not exist", "none.txt", "no_model does not exist", "/dev/null/run cannot be made"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "row", "keys", "problem"),
    [
        ("sft", {"question": "2+2=", "answer": "4"}, {}, ""),
        ("sft", {"question": "2+2="}, {}, "row 0 has no column 'answer', only question"),
        ("sft", {"messages": CHAT["prompt"]}, {"messages_key": "messages"}, "has no chat template"),
        ("sft", {"messages": CHAT["prompt"]}, {"messages_key": "messages", "chat_template": "{{ messages }}"}, ""),
        ("sft", {"extra": {"q": "2+2="}, "answer": "4"}, {"prompt_key": "extra", "prompt_dict_keys": ["q"]}, ""),
        ("dpo", PAIR, {}, ""),
        ("rm", {"prompt": "2+2=", "chosen": "4"}, {}, "row 0 has no column 'rejected'"),
        ("dpo", {**PAIR, "chosen": CHAT["prompt"]}, {}, "has no chat template"),
        ("dpo", {**PAIR, "chosen": 4}, {}, "expected a non-empty list of messages"),
    ],
)
def test_the_first_row_of_a_supervised_run_is_looked_at(tmp_path, kind, row, keys, problem):
    data = {"train_files": write_rows(tmp_path / "rows.jsonl", row), **keys}
    told = supervised(kind, tmp_path, data=data, model=MODEL)
    assert problem in told if problem else told == ""
    assert not (tmp_path / "run").exists(), "nothing is made yet"


def test_a_supervised_run_takes_its_directory_before_it_loads_anything(tmp_path, monkeypatch):
    """Another run may have begun after the look."""
    monkeypatch.setattr("quadriga.trainer.supervised.entry.supervised_problems_here", lambda config: [])
    monkeypatch.setattr("quadriga.tracking.run_lock.RunLock.acquire", refuse)
    rows = write_rows(tmp_path / "rows.jsonl", {"question": "2+2=", "answer": "4"})
    loaded = []
    monkeypatch.setattr("quadriga.trainer.supervised.trainer.objective_of", loaded.append)
    with pytest.raises(ConfigError, match="in use"):
        run_supervised(
            {"data": {"train_files": rows}, "model": MODEL, "trainer": {"default_local_dir": str(tmp_path / "run")}},
            "sft",
        )
    assert loaded == []


def refuse(lock, wait_s=0.0):
    raise ConfigError("in use")


# ---- a disk without room ----


@pytest.mark.parametrize("kind", ["ppo", "dpo"])
def test_a_run_whose_disk_has_no_room_for_a_checkpoint_ends_before_its_first_step(tmp_path, monkeypatch, kind):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("quadriga.checkpoint.disk.shutil.disk_usage", lambda folder: usage._replace(free=1 << 20))
    if kind == "ppo":
        config = write_task(tmp_path / "task")
        run = tmp_path / "task" / "run"
        config["trainer"] |= {"total_training_steps": 1}
    else:
        config = pair_job(write_pairs(tmp_path / "pairs.jsonl"), write_model(tmp_path / "model"), tmp_path / "run")
        run = tmp_path / "run"
    with pytest.raises(CheckpointError, match=r"has 1.0 MiB left, a checkpoint needs \d"):
        run_ppo(config) if kind == "ppo" else run_supervised(config, kind)
    assert not (run / "metrics.jsonl").exists() or not steps_in(run)


def steps_in(run: Path) -> list[int]:
    return [step for line in (run / "metrics.jsonl").read_text().splitlines() if (step := json.loads(line)["step"]) > 0]


# ---- files that cannot be read ----


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_file_that_the_disk_does_not_give_is_one_sentence(tmp_path, suffix):
    """Reading the first bytes of a process's memory is an input/output error, whoever asks."""
    file = tmp_path / f"rows{suffix}"
    file.symlink_to("/proc/self/mem")
    if suffix != ".json":  # of which no first row can be had
        for told in (
            problems(tmp_path, data={"train_files": str(file)}),
            supervised("sft", tmp_path, data={"train_files": str(file)}, model=MODEL),
        ):
            assert f"{file} cannot be read{': Input/output error' if suffix == '.jsonl' else ''}" in told
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(str(file))
    assert count_rows(str(file))[0] is None


def test_a_row_without_a_truth_is_named_when_the_files_are_read(tmp_path):
    from quadriga.data import RLDataset
    from quadriga.models import load_tokenizer
    from quadriga.rewards import check_truths

    good = {"prompt": "2+2=", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}
    file = write_rows(tmp_path / "rows.jsonl", good, {**good, "reward_model": None})
    dataset = RLDataset(file, load_tokenizer("builtin:arithmetic"), max_prompt_length=8)
    with pytest.raises(DataError, match=r"rows.jsonl, row 1 has no reward_model.ground_truth"):
        check_truths(load_config({}), [dataset])
    check_truths(load_config({"custom_reward_function": {"path": "mine.py"}}), [dataset])
