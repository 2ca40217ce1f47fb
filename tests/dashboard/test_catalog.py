from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from run_folders import metrics_line, write_run, write_status

from quadriga.dashboard.catalog import STATES, Catalog
from quadriga.errors import QuadrigaError


def states(root: Path) -> dict[str, str]:
    return {run.name: run.state(time.time()) for run in Catalog([root]).look()}


def test_runs_are_found_at_any_depth_and_in_several_roots(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "project" / "a")
    write_run(tmp_path / "two" / "b")
    write_run(tmp_path / "itself")
    catalog = Catalog([tmp_path / "one", tmp_path / "two", tmp_path / "itself", tmp_path / "none"])
    assert sorted(run.name for run in catalog.look()) == sorted(["b", f"{tmp_path.name}/itself", "project/a"])
    assert "none is not there" in catalog.problems[0]


def test_the_state_of_a_run_follows_from_what_it_wrote_last_and_from_its_process(tmp_path: Path) -> None:
    long_ago = time.time() - 3600
    write_run(tmp_path / "finished")
    write_run(tmp_path / "failed", state="failed", error="DataError: no rows")
    write_run(tmp_path / "stopped", state="stopped")
    write_run(tmp_path / "running", state="running", total=40)
    write_run(tmp_path / "killed", state="running", pid=2**22 - 1)
    write_run(tmp_path / "pid taken by another", state="running", process="1")
    write_run(tmp_path / "silent", state="running", updated=long_ago)
    write_run(tmp_path / "hangs", state="running", phases=["step", "gen"], phase_since=long_ago, phase_usual_s=1.0)
    write_run(tmp_path / "slow but usual", state="running", phases=["gen"], phase_since=long_ago, phase_usual_s=1e4)
    write_run(tmp_path / "elsewhere", state="running", host="cluster-7", updated=time.time() - 60)
    write_run(tmp_path / "copied", state="running", host="cluster-7", updated=long_ago)
    assert states(tmp_path) == {
        "finished": "finished",
        "failed": "failed",
        "stopped": "interrupted",
        "running": "running",
        "killed": "interrupted",
        "pid taken by another": "interrupted",
        "silent": "stalled",
        "hangs": "stalled",
        "slow but usual": "running",
        "elsewhere": "running",
        "copied": "interrupted",
    }


def test_a_copy_of_a_live_run_on_the_same_machine_does_not_go_on(tmp_path: Path) -> None:
    origin = write_run(tmp_path / "origin")
    write_status(origin, state="running", total_steps=40, folder=str(origin))
    shutil.copytree(origin, tmp_path / "copy")
    (tmp_path / "link").symlink_to(origin)
    assert states(tmp_path) == {"origin": "running", "copy": "interrupted", "link": "running"}
    write_status(origin, state="running", folder="/not/there/on/this/machine")
    assert states(tmp_path)["origin"] == "running", "seen through another mount, it may be the same"


def test_runs_that_were_started_before_in_the_same_folder_are_listed_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "p" / "a")
    write_run(folder / "earlier" / "1", state="failed")
    catalog = Catalog([tmp_path])
    assert sorted(run.name for run in catalog.look()) == ["p/a", "p/a/earlier/1"]
    assert catalog.find("a").path == folder
    write_run(folder / "earlier" / "2")
    assert len(Catalog([tmp_path]).look()) == 3


def test_workers_that_are_being_replaced_are_no_stall(tmp_path: Path) -> None:
    quiet = {"state": "running", "updated": time.time() - 60, "phase_since": time.time() - 60}
    write_run(tmp_path / "restarts", phases=["restart"], **quiet)
    write_run(tmp_path / "silent", phases=["step"], **quiet)
    assert states(tmp_path) == {"restarts": "running", "silent": "stalled"}


def test_the_newest_value_of_a_metric_that_few_steps_have_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=25)
    (run,) = Catalog([tmp_path]).look()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert run.newest_of("val/arithmetic/acc/mean@1") == lines[19]["val/arithmetic/acc/mean@1"]
    assert run.newest_of("actor/entropy") == 1 / 25
    assert run.newest_of("none") is None


def test_a_row_tells_progress_time_left_and_the_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run", state="running", total=50)
    write_run(tmp_path / "failed", state="failed", error="DataError: no rows\n  fix: add some")
    rows = {run.name: run.row(time.time()) for run in Catalog([tmp_path]).look()}
    row = rows["run"]
    assert (row["step"], row["total"], row["eta_s"]) == (20, 50, pytest.approx(60.0))
    assert row["main"]["name"] == "critic/score/mean"
    assert row["changed"] == {"actor_rollout_ref.actor.optim.lr": 0.001}
    assert rows["failed"]["error"].startswith("DataError: no rows")
    assert rows["failed"]["eta_s"] is None


def test_the_spark_line_of_a_long_run_is_read_at_a_few_places(tmp_path: Path) -> None:
    write_run(tmp_path / "long", steps=5000)
    write_run(tmp_path / "short", steps=10)
    sparks = {run.name: run.spark_line() for run in Catalog([tmp_path]).look()}
    assert len(sparks["long"]) == 32
    assert sparks["long"] == sorted(sparks["long"])
    assert len(sparks["short"]) == 10


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\x00\xff",
        b"[" * 100_000,
        b'{"state": 7, "step": "x", "total_steps": [], "alarms": 3, "changed": [1], "phases": "gen", "validations": {"a": 1}}',
        b'{"state": "running", "updated": "yesterday", "pid": "root", "step": 1e999, "phase_since": NaN}',
    ],
)
def test_foreign_and_damaged_status_files_make_a_row_all_the_same(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_bytes(content)
    (run,) = Catalog([tmp_path]).look()
    row = run.row(time.time())
    assert row["name"] == "run"
    assert row["state"] in STATES
    json.dumps(row, allow_nan=False)


def test_half_written_and_foreign_metrics_do_not_hide_the_good_lines(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "critic/score/me')
    (run,) = Catalog([tmp_path]).look()
    assert run.step == 5
    assert run.newest["step"] == 5


def test_a_run_that_grows_or_vanishes_is_seen_to(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5, state="running", total=10)
    catalog = Catalog([tmp_path])
    (run,) = catalog.look()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(6, 10, 0.5, time.time())) + "\n")
    write_status(folder, state="running", step=6, total_steps=10)
    run.refresh()
    assert run.step == 6
    shutil.rmtree(folder)
    with pytest.raises(QuadrigaError, match="not here"):
        catalog.get(run.id)


def test_a_run_is_found_by_folder_name_or_the_end_of_its_name(tmp_path: Path) -> None:
    write_run(tmp_path / "p" / "a")
    write_run(tmp_path / "q" / "a")
    write_run(tmp_path / "q" / "b")
    catalog = Catalog([tmp_path])
    assert catalog.find(str(tmp_path / "p" / "a")).path == tmp_path / "p" / "a"
    assert catalog.find("b").name == "q/b"
    assert catalog.find("q/a").name == "q/a"
    with pytest.raises(QuadrigaError, match=r"name of 2 runs[\s\S]*p/a, q/a"):
        catalog.find("a")
    twice = Catalog([tmp_path / "p", tmp_path / "q"])
    with pytest.raises(QuadrigaError, match=f"{tmp_path}/p/a, {tmp_path}/q/a"):
        twice.find("a")
    with pytest.raises(QuadrigaError, match="no run c"):
        catalog.find("c")
