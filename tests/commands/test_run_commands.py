"""The commands that look at runs from a terminal: runs, watch, compare, samples, tell, dash."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dashboard"))

from run_folders import metrics_line, write_run, write_status

from quadriga.cli import run
from quadriga.commands.watch import Follower
from quadriga.config.schema import Config
from quadriga.dashboard.catalog import Run
from quadriga.tracking import RunDirectory, Tracking
from quadriga.tracking.steering import Steering
from quadriga.tracking.summary import report


def make_config(folder: Path, lr: float = 1e-6, **trainer: Any) -> Config:
    config = Config()
    config.trainer.default_local_dir, config.trainer.experiment_name = str(folder), folder.name
    config.trainer.logger = []
    config.actor_rollout_ref.actor.optim.lr = lr
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    return config


def record(folder: Path, steps: int, score: float, lr: float = 1e-6, **trainer: Any) -> Tracking:
    """A run of this process that has taken some steps and lives until it is closed."""
    tracking = Tracking(make_config(folder, lr, **trainer), RunDirectory(folder))
    tracking.events.append("start", {"total_steps": 10, "start_step": 0, "project": "p", "experiment": folder.name})
    for step in range(1, steps + 1):
        tracking.log(step, {"critic/score/mean": score * step / steps, "actor/entropy": 0.5, "timing_s/step": 1.0})
    return tracking


def end(tracking: Tracking, status: str, error: str = "") -> None:
    tracking.events.append("end", {"status": status, "error": error})
    tracking.close()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`outputs` in the working directory, with a finished and a failed run."""
    monkeypatch.chdir(tmp_path)
    end(record(tmp_path / "outputs" / "p" / "good", 10, 0.8, lr=1e-4), "finished")
    end(record(tmp_path / "outputs" / "p" / "bad", 4, 0.1), "failed", "DataError: no rows")
    rows = [
        {"uid": str(k), "prompt": f"{k}+1=", "response": f"#### {k}", "score": float(k % 2), "ground_truth": str(k + 1)}
        for k in range(6)
    ]
    RunDirectory(tmp_path / "outputs" / "p" / "good").write_samples(7, rows)
    return tmp_path / "outputs"


def test_runs_are_listed_with_state_step_and_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"p/good +train +finished +10/10", text)
    assert re.search(r"p/bad +train +failed DataError: no rows +4/10", text)
    assert run(["runs", "--state", "failed", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["p/bad"]
    assert run(["runs", "--root", str(root / "nowhere")]) == 1
    assert "there are no such runs" in capsys.readouterr().err


def test_a_terminal_of_80_columns_shows_which_run_it_is_and_how_it_went(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"arithmetic": {"first_step": 0, "first": 0.414, "last_step": 20, "last": 1.0}}
    write_run(root / "p" / "a_run_with_a_rather_long_name", alarms={"equal_groups": "so"}, validations=held)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, which has its own width
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["runs"]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"p/good +finished +10/10 +0.800", text)
    assert re.search(r"p/bad +failed", text)
    assert re.search(r"^p/a_run_with_a.* finished.* 20/20 .*41.4% → 100.0%", text, re.MULTILINE)
    assert "DataError" in text, "why it failed"
    assert run(["compare", *["good", "bad"] * 3]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^critic/score/mean +(0.800 +0.100 *){3}$", text, re.MULTILINE)
    assert "…" not in text, "keys and names can be read"


def test_a_run_without_a_step_is_compared_and_has_no_samples(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(record(root / "p" / "stillborn", 0, 0.0, lr=0.3), "failed", "DataError: no rows")
    assert run(["compare", "good", "stillborn"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"actor_rollout_ref.actor.optim.lr +0.0001 +0.3", text)
    assert re.search(r"critic/score/mean +0.800 *$", text, re.MULTILINE)
    assert run(["samples", "stillborn"]) == 1
    assert "p/stillborn has kept no samples" in capsys.readouterr().err


def test_runs_are_compared_by_what_was_set_and_what_came_of_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "good", "bad"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"actor_rollout_ref.actor.optim.lr +0.0001 +1e-06", text)
    assert re.search(r"critic/score/mean +0.800 +0.100", text)
    assert run(["compare", "good", "nothing"]) == 1
    assert "no run nothing" in capsys.readouterr().err


def test_samples_are_read_by_step_and_filter(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", "good", "--step", "7", "--only", "wrong"]) == 0
    text = capsys.readouterr().out
    assert text.count("wrong · score 0") == 3
    assert "right answer 1" in text
    assert run(["samples", "good", "--step", "8"]) == 1
    assert "--step 7" in capsys.readouterr().err


def test_a_sample_whose_scoring_crashed_says_why_and_others_what_their_reward_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "Traceback (most recent call last):\n  File x\nValueError: cannot read it\n"
    crashed = {"uid": "0", "prompt": "1+1=", "response": "?", "score": 0.0, "outcome": "error", "error": error}
    plain = {
        "uid": "0",
        "prompt": "1+1=",
        "response": "2",
        "score": 1.0,
        "outcome": "correct",
        "brevity": 0.25,
        "error": " ",
    }
    RunDirectory(root / "p" / "good").write_samples(9, [crashed, plain])
    assert run(["samples", "good", "--step", "9"]) == 0
    text = capsys.readouterr().out
    assert "    scoring: ValueError: cannot read it\n" in text
    assert "correct · score 1 · brevity 0.25\n    2\n" in text


def test_nothing_in_a_run_can_steer_the_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model, a reward or a stranger's run may have written what a terminal obeys: a title, a cleared screen."""
    bad = "\x1b]0;owned\x07\x9b2J\r\x08<"
    folder = root / "p" / f"odd{bad}"
    write_run(folder, steps=20, state="failed", error=bad, alarms={bad: bad}, changed={bad: bad}, experiment=bad)
    write_status(
        folder,
        state="failed",
        error=bad,
        alarms={bad: bad},
        validations={bad: {"first_step": 0, "first": 0.1, "last_step": 20, "last": 0.2}},
    )
    (folder / "config.yaml").write_text(json.dumps({"data": {bad: bad}}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 21, "time": time.time(), f"val/{bad}/acc/mean@1": 0.5}) + "\n")
    told = {"kind": "alarm", "time": 1.0, "step": 1, "name": bad, "text": bad, "look": bad}
    (folder / "events.jsonl").write_text(json.dumps(told) + "\n")
    row = {"uid": bad, "prompt": bad, "response": bad, "score": 0.0, "ground_truth": bad, "outcome": bad, "pred": bad}
    for step in (0, 20):
        RunDirectory(folder).write_samples(step, [row], "val")
    monkeypatch.setattr("sys.argv", ["quadriga"])
    name = str(folder)
    for words in (["runs"], ["runs", "--json"], ["samples", name], ["samples", name, "--json"], ["watch", name]):
        run(words)
    run(["compare", name, "good", "--metric", "val/"])
    run(["compare", name, "good", "--json"])
    report(RunDirectory(folder))
    seen = capsys.readouterr()
    assert "odd" in seen.out
    assert r"\x1b]0;owned" in seen.out
    controls = {c for c in seen.out + seen.err if not c.isprintable()} - {"\n"}
    assert not controls, "".join(line for line in seen.out.splitlines(True) if set(line) & controls)[:500]


def test_a_run_is_watched_from_another_process_until_it_ends(root: Path) -> None:
    tracking = record(root / "p" / "live", 2, 0.5)
    command = [sys.executable, "-m", "quadriga", "watch", "live"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        time.sleep(1.0)
        tracking.log(3, {"critic/score/mean": 0.75})
        time.sleep(1.0)
        end(tracking, "finished")
        text, _ = watcher.communicate(timeout=30)
    finally:
        watcher.kill()
    assert watcher.returncode == 0
    assert "step 1/10" in text
    assert "step 3/10 · reward 0.750" in text
    assert text.endswith("p/live finished at step 3\n")


def seen_by_watch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the panel of `quadriga watch` shows of a run as it stands."""
    from rich.console import Console

    from quadriga.tracking.console import LiveView

    run = Run(folder, folder.name, "id")
    run.refresh()
    view = LiveView(Console(file=io.StringIO()), live=True)
    view.update(Follower(run).news(run.state(time.time())))
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(view.render())
    return console.export_text()


def test_a_stalled_run_is_seen_to_be_stalled_and_for_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    phase = {"phases": ["step", "gen"], "phase_since": now - 1200, "phase_usual_s": 0.5}
    folder = write_run(tmp_path / "hangs", steps=20, state="running", total=40, **phase)
    text = seen_by_watch(folder, monkeypatch)
    assert "stalled: gen 20 min" in text
    assert "0:40 elapsed" in text, "it began 20 steps of 2 s ago"
    assert "arithmetic 40.0% →" in text, "the first validation may be far back"
    write_status(folder, state="running", step=20, total_steps=40, **{**phase, "phase_since": now - 30})
    assert "gen 30 s" in seen_by_watch(folder, monkeypatch)


def test_of_a_long_run_only_the_newest_steps_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", steps=20_000, state="running", total=30_000)
    run = Run(folder, "long", "id")
    run.refresh()
    follower = Follower(run)
    steps = [event["step"] for event in follower.news("running") if event["kind"] == "step"]
    assert steps == list(range(19_001, 20_001))
    assert follower.news("running") == []


def test_a_watched_run_that_is_resumed_shows_its_new_steps_and_no_old_ones_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10, state="running", total=20)
    run = Run(folder, "run", "id")
    run.refresh()
    follower = Follower(run)
    follower.news("running")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = json.dumps(metrics_line(9, 20, 0.5, time.time() + 1)) + "\n"
    (folder / "cut").write_text("".join(lines[:8]) + again * 2 + "x" * len("".join(lines)))
    (folder / "cut").replace(folder / "metrics.jsonl")
    write_status(folder, state="running", step=8, start_step=8, total_steps=20, started=time.time())
    run.refresh()
    news = follower.news("running")
    assert news[0]["kind"] == "start"
    assert [event["step"] for event in news if event["kind"] == "step"] == [9, 9]


def test_a_watcher_outlives_a_restart_of_the_workers(root: Path) -> None:
    tracking = record(root / "p" / "live", 2, 0.5)
    command = [sys.executable, "-m", "quadriga", "watch", "live"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        assert watcher.stdout is not None
        assert "step 1/10" in watcher.stdout.readline() + watcher.stdout.readline()
        tracking.events.append("restart", {"number": 1, "at_most": 3, "text": "workers died\nrestart 1 of at most 3"})
        tracking.events.append("phase", {"step": 3, "open": ["restart"]})
        tracking.close()
        time.sleep(1.0)
        assert watcher.poll() is None
        again = Tracking(make_config(root / "p" / "live"), RunDirectory(root / "p" / "live"), resumed_step=1)
        again.events.append("start", {"total_steps": 10, "start_step": 1, "project": "p", "experiment": "live"})
        again.log(2, {"critic/score/mean": 0.75})
        end(again, "finished")
        text, _ = watcher.communicate(timeout=30)
    finally:
        watcher.kill()
    assert watcher.returncode == 0, text
    assert "restart 1 of at most 3" in text
    assert "step 2/10 · reward 0.750" in text


def test_a_live_run_is_told_and_answers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = record(root / "p" / "live", 3, 0.5, steering=True)
    config = make_config(root / "p" / "live", steering=True)
    steering = Steering(root / "p" / "live", config, lambda told: tracking.events.append("steered", told), print)
    trainer: Any = SimpleNamespace(step=3, config=config, set_key=lambda key, value: "", stop_requested=False)
    over = threading.Event()

    def step_by_step() -> None:
        while not over.wait(0.2):
            trainer.step += 1
            steering.obey(trainer)

    thread = threading.Thread(target=step_by_step)
    thread.start()
    try:
        assert run(["tell", "live", "set", "trainer.save_freq=5"]) == 0
        assert "-1 → 5" in capsys.readouterr().out
        assert trainer.config.trainer.save_freq == 5
        assert run(["tell", "live", "set", "actor.optim.lr=fast"]) == 1
        assert run(["tell", "live", "set", "actor.kl_loss_coef=0.5", "--root", "elsewhere", "--root", "outputs"]) == 1
        assert "not done: it has no effect" in capsys.readouterr().out
    finally:
        over.set()
        thread.join()
        end(tracking, "finished")
    assert run(["tell", "live", "stop"]) == 1
    assert "is not running" in capsys.readouterr().err
    events = (root / "p" / "live" / "events.jsonl").read_text()
    assert "set trainer.save_freq=5" in events


def test_a_run_without_the_key_cannot_be_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = record(root / "p" / "deaf", 1, 0.5)
    assert run(["tell", "deaf", "stop"]) == 1
    assert "trainer.steering=True" in capsys.readouterr().err
    end(tracking, "finished")


def test_dash_starts_within_seconds_serves_the_page_and_ends_with_ctrl_c(root: Path) -> None:
    command = [sys.executable, "-m", "quadriga", "dash", "--no-browser", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(address[0] + "api/runs", timeout=20) as answer:
            rows = json.loads(answer.read())["rows"]
        assert sorted(row["name"] for row in rows) == ["p/bad", "p/good"]
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=20)
    finally:
        server.kill()
    assert server.returncode == 0
    assert errors == ""


def test_dash_beyond_this_machine_has_a_token_in_its_address(root: Path) -> None:
    command = [sys.executable, "-m", "quadriga", "dash", "--no-browser", "--host", "0.0.0.0", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        port = re.search(r":(\d+)/\?token=\S{20,}", line)
        assert port is not None, line
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/api/runs", timeout=20)
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "--port 99999 is no port"),
        (["--port", "-1"], "--port -1 is no port"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8020"),
    ],
)
def test_dash_says_what_is_wrong_with_its_address(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run(["dash", "--no-browser", *words]) == 1
    assert said in capsys.readouterr().err


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::", 0))
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_dash_puts_an_address_of_colons_in_brackets_and_its_token_opens_the_page(root: Path) -> None:
    command = [sys.executable, "-m", "quadriga", "dash", "--no-browser", "--host", "::", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        assert server.stdout is not None
        port, token = re.search(r":(\d+)/\?token=(\S+)", server.stdout.readline()).groups()  # type: ignore[union-attr]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"http://127.0.0.1:{port}/?token={token}", timeout=20) as answer:
            assert "Quadriga" in answer.read().decode()
            assert "token" not in answer.url, "it does not stay in the address"
        with opener.open(f"http://127.0.0.1:{port}/api/runs", timeout=20) as answer:
            assert len(json.loads(answer.read())["rows"]) == 2
        other = urllib.request.Request(f"http://127.0.0.1:{port}/api/runs", headers={"cookie": "quadriga_token=guess"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(other, timeout=20)
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    command[-3] = "::ffff:127.0.0.1"
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root.parent)
    try:
        assert shown.stdout is not None
        assert re.search(r"http://\[::ffff:127.0.0.1\]:\d+/\?token=", shown.stdout.readline())
    finally:
        os.kill(shown.pid, signal.SIGKILL)
        shown.wait()


def test_of_many_runs_only_those_that_are_listed_are_read(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(8):
        write_run(root / f"more{k}", steps=2)
    read: list[str] = []
    spark = Run.spark_line
    monkeypatch.setattr(Run, "spark_line", lambda seen: read.append(seen.name) or spark(seen))  # type: ignore[func-returns-value]
    assert run(["runs", "--limit", "3"]) == 0
    assert len(read) == 3
    assert "7 more; --limit shows them" in capsys.readouterr().out


def test_runs_of_the_same_name_in_several_folders_are_told_apart(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(root.parent / "other" / "p" / "good")
    assert run(["runs", "--root", str(root), "--root", str(root.parent / "other"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(Path(row["folder"]).parts[-3] for row in rows if row["name"] == "p/good") == ["other", "outputs"]
    assert run(["runs", "--root", str(root), "--root", str(root.parent / "other")]) == 0
    assert "other/p/good" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_dash_exports_one_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dash", "--export", "page.html"]) == 0
    assert "2 runs" in capsys.readouterr().out
    text = (root.parent / "page.html").read_text()
    assert 'id="exported"' in text
    assert "static/" not in text
    assert "The MIT License" in text, "the licence of the charts goes with them"
    assert run(["dash", "nowhere", "--export", "page.html"]) == 1
    assert "there are no runs" in capsys.readouterr().err
