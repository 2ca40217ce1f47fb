"""Checkpoints of a run: whole or not at all, found again, thinned out, never trusted unread."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.checkpoint import Checkpoint, CheckpointStore, locate
from quadriga.checkpoint import disk as disk_module
from quadriga.checkpoint.manifest import MANIFEST
from quadriga.errors import CheckpointError


def write(store: CheckpointStore, step: int, content: str = "weights") -> Path:
    with store.writing(step) as draft:
        (draft.folder("actor") / "weights").write_text(f"{content} {step}")
        (draft.folder("huggingface") / "config.json").write_text("{}")
        draft.write_state({"step": step, "content": content})
    return store.folder / f"global_step_{step}"


def found(store: CheckpointStore) -> Checkpoint:
    checkpoint = CheckpointStore(store.folder).find("auto")
    assert checkpoint is not None
    return checkpoint


def asked_for(store: CheckpointStore, path: Path | str) -> Checkpoint:
    checkpoint = store.find("resume_path", path)
    assert checkpoint is not None
    return checkpoint


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# ---- writing and finding ----


def test_what_was_written_is_found_and_read(store):
    state = {
        "step": 5,
        "loader": {"epoch": 1, "cursor": [3, 4]},
        "kl": 0.1 + 0.2,
        "tiny": 5e-324,
        "none": None,
        "ü": True,
    }
    with store.writing(5) as draft:
        (draft.folder("actor") / "weights").write_text("w")
        draft.write_state(state)
    checkpoint = found(store)
    assert (checkpoint.step, checkpoint.roles, checkpoint.read_state()) == (5, ["actor"], state)
    assert (checkpoint.folder("actor") / "weights").read_text() == "w"
    assert names(store) == ["global_step_5", "latest"]
    assert (store.folder / "latest").read_text() == "global_step_5\n"


def test_a_run_without_checkpoints_starts_anew(store):
    assert store.find("auto") is None
    assert not store.folder.exists()


def test_a_disabled_resume_finds_nothing(store):
    write(store, 5)
    assert store.find("disable") is None


def test_the_newest_is_the_one_written_last_whatever_its_step(store):
    """A run that went back to step 10 and got to 15 goes on from 15, not from the 30 that it left behind."""
    for step in (10, 20, 30, 15):
        write(store, step)
    assert found(store).step == 15
    assert [c.step for c in store.checkpoints()] == [15, 30, 20, 10]


def test_steps_are_numbers_not_text(store):
    write(store, 9)
    write(store, 10)
    assert found(store).step == 10


def test_a_part_that_is_not_there_is_named(store):
    write(store, 1)
    with pytest.raises(CheckpointError, match="no part 'critic'; it has actor, huggingface"):
        found(store).folder("critic")


def test_a_path_may_be_a_checkpoint_a_store_or_a_run_directory(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    write(store, 1)
    write(store, 2)
    other = CheckpointStore(tmp_path / "other")
    assert asked_for(other, store.folder / "global_step_1").step == 1
    assert asked_for(other, str(store.folder)).step == 2
    assert asked_for(other, tmp_path / "run").step == 2


@pytest.mark.parametrize("path", [None, "nowhere", "."])
def test_a_path_without_checkpoint_is_refused(store, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        store.find("resume_path", path)


# ---- failing while writing ----


def test_a_failed_write_leaves_nothing_and_the_previous_one_stays(store):
    write(store, 1)
    with pytest.raises(ZeroDivisionError), store.writing(2) as draft:
        (draft.folder("actor") / "weights").write_text(str(1 / 0))
    assert names(store) == ["global_step_1", "latest"]
    assert found(store).step == 1


def test_a_checkpoint_without_driver_state_is_not_committed(store):
    with pytest.raises(CheckpointError, match="write_state"), store.writing(2) as draft:
        draft.folder("actor")
    assert names(store) == []


def test_shards_of_a_rank_that_are_on_another_disk_are_missed_before_the_commit(store):
    def two_of_three_ranks_write_elsewhere() -> None:
        with store.writing(2) as draft:
            (draft.folder("actor") / "engine.json").write_text(json.dumps({"world_size": 3}))
            (draft.folder("actor") / "rank_00000_0000.safetensors").write_bytes(b"")
            draft.write_state({})

    with pytest.raises(CheckpointError, match=r"rank\(s\) 1, 2 .*\n.*share"):
        two_of_three_ranks_write_elsewhere()
    assert names(store) == []


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": [1, {2}]}}, r"state\.a\.b\[1\] is a set"),
        ({"a": {1: 2}}, "state.a has the key 1"),
        ({"a": b""}, "bytes"),
    ],
)
def test_state_that_json_cannot_hold_is_refused_with_its_place(store, state, where):
    with pytest.raises(CheckpointError, match=where), store.writing(1) as draft:
        draft.write_state(state)


def test_too_little_room_is_told_before_anything_is_written(store, monkeypatch):
    write(store, 1)
    with pytest.raises(CheckpointError, match=r"has .* left, a checkpoint needs .*TiB"), store.writing(2, 1 << 60):
        pytest.fail("the block must not be entered")
    usage = shutil.disk_usage(store.folder)
    monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda folder: usage._replace(free=1 << 20))
    with pytest.raises(CheckpointError, match=r"has 1\.0 MiB left"), store.writing(2):
        pytest.fail("the block must not be entered")
    assert names(store) == ["global_step_1", "latest"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=str(tmp_path / "file")),
        CheckpointStore(tmp_path / "file" / "c").writing(1),
    ):
        pytest.fail("the block must not be entered")


def test_everything_is_on_disk_before_it_gets_its_name(store, monkeypatch):
    write(store, 1)
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recorded_rename(source, target) -> None:
        inside = {str(path) for path in Path(source).rglob("*")} | {str(source)}
        synced = {path.replace(f".{MANIFEST}.", f"{MANIFEST}\0").partition("\0")[0] for kind, path in events}
        assert inside <= synced, inside - synced
        events.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    final = write(store, 2)
    after = events[events.index(("rename", str(final))) + 1 :]
    assert after[0] == ("sync", str(store.folder))
    assert ".latest." in after[1][1]


# ---- writing a step again ----


def test_a_step_can_be_written_again(store):
    write(store, 1, "old")
    write(store, 1, "new")
    assert found(store).read_state()["content"] == "new"
    assert names(store) == ["global_step_1", "latest"]


def test_a_failed_second_write_of_a_step_keeps_the_first(store, monkeypatch):
    write(store, 1, "old")
    rename = os.rename

    def failing(source, target):
        if ".tmp-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(store, 1, "new")
    monkeypatch.undo()
    assert found(store).read_state()["content"] == "old"
    assert names(store) == ["global_step_1", "latest"]


def test_an_unusable_folder_in_the_way_is_kept_under_another_name(store):
    foreign = store.folder / "global_step_1"
    foreign.mkdir(parents=True)
    (foreign / "data.pt").write_text("of another program")
    write(store, 1)
    assert found(store).step == 1
    (aside,) = store.folder.glob("global_step_1.unusable-*")
    assert (aside / "data.pt").read_text() == "of another program"


# ---- damage ----


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped bit": lambda c: flip(c / "actor" / "weights"),
    "flipped bit in the state": lambda c: flip(c / "state.json"),
    "flipped bit in the manifest": lambda c: flip(c / MANIFEST),
    "truncated": lambda c: os.truncate(c / "actor" / "weights", 3),
    "grown": lambda c: (c / "actor" / "weights").write_text("much longer than it was"),
    "missing file": lambda c: (c / "actor" / "weights").unlink(),
    "missing folder": lambda c: shutil.rmtree(c / "huggingface"),
    "missing manifest": lambda c: (c / MANIFEST).unlink(),
    "empty manifest": lambda c: (c / MANIFEST).write_text(""),
    "manifest of other things": lambda c: (c / MANIFEST).write_text("[1]"),
    "folder in place of a file": lambda c: ((c / "state.json").unlink(), (c / "state.json").mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(store, damage, caplog):
    write(store, 1)
    damage(write(store, 2))
    with caplog.at_level(logging.WARNING):
        assert found(store).step == 1
    assert "global_step_2" in caplog.text
    with pytest.raises(CheckpointError, match="global_step_2"):
        store.find("resume_path", store.folder / "global_step_2")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_with_nothing_but_damage_the_run_is_not_begun_anew_unasked(store, damage):
    damage(write(store, 2))
    with pytest.raises(CheckpointError, match=r"(?s)none of the checkpoints.*resume_mode=disable"):
        store.find("auto")


def test_every_flipped_byte_of_a_manifest_is_noticed(store):
    path = write(store, 1) / MANIFEST
    content = path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        try:
            Checkpoint(path.parent).verify()
        except CheckpointError:
            continue
        assert json.loads(changed) == json.loads(content)  # white space


def test_a_checkpoint_of_a_later_format_stops_the_resume(store):
    write(store, 1)
    path = write(store, 2) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99, "versions": {"quadriga": "9.1"}}))
    with pytest.raises(CheckpointError, match=r"(?s)format 99.*9\.1"):
        store.find("auto")
    write(store, 3)  # but it does not keep a run that was started anew from saving


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname"])
def test_a_manifest_cannot_name_files_elsewhere(store, name):
    from quadriga.checkpoint.manifest import FileEntry, Manifest, encode

    path = write(store, 1)
    (path / MANIFEST).write_bytes(encode(Manifest(1, 1, {name: FileEntry(0, "")}, "", {})))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        locate(path)


# ---- keeping ----


def test_only_the_newest_stay_and_those_of_earlier_processes_count(tmp_path):
    for step in (1, 2, 3):
        write(CheckpointStore(tmp_path), step)
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 4)
    assert names(store) == ["global_step_3", "global_step_4", "latest"]


def test_keeping_one_never_leaves_none(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for step in (3, 2, 1):
        write(store, step)
        assert found(store).step == step
    assert names(store) == ["global_step_1", "latest"]


def test_a_failed_write_deletes_no_old_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    with pytest.raises(CheckpointError), store.writing(2):
        pass
    assert found(store).step == 1


def test_what_is_no_checkpoint_is_not_counted_and_not_deleted(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "global_step_7").mkdir()
    (tmp_path / "global_step_notes").write_text("mine")
    for step in (1, 2, 3):
        write(store, step)
    assert names(store) == ["global_step_2", "global_step_3", "global_step_7", "global_step_notes", "latest"]


def test_keep_must_leave_something(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


# ---- what dead and living processes leave ----


def test_the_draft_of_a_dead_process_is_deleted(store):
    write(store, 1)
    (store.folder / ".global_step_2.tmp-0123abcd" / "actor").mkdir(parents=True)
    assert found(store).step == 1
    assert names(store) == ["global_step_1", "latest"]


def test_the_draft_of_a_living_process_is_left_alone(store):
    with store.writing(1) as draft:
        draft.write_state({})
        assert CheckpointStore(store.folder).find("auto") is None
        assert draft.path.is_dir()
    assert found(store).step == 1


def died_while_replacing(store: CheckpointStore, tmp_path: Path) -> Path:
    """A process died between moving the old checkpoint of a step away and giving the new one its name; the new one."""
    write(store, 1, "old").rename(store.folder / ".global_step_1.replaced-00")
    return write(CheckpointStore(tmp_path / "other"), 1, "new").rename(store.folder / ".global_step_1.tmp-00")


def test_a_complete_draft_gets_its_name_if_the_name_is_free(store, tmp_path):
    died_while_replacing(store, tmp_path)
    assert found(store).read_state()["content"] == "new"
    assert names(store) == ["global_step_1", "latest"]


def test_a_replaced_checkpoint_comes_back_if_the_new_one_is_not_complete(store, tmp_path):
    flip(died_while_replacing(store, tmp_path) / "actor" / "weights")
    assert found(store).read_state()["content"] == "old"
    assert names(store) == ["global_step_1", "latest"]


def test_the_driver_side_needs_no_torch():
    code = "import sys, quadriga.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
