"""Curves, samples, timeline and configuration of run directories, read while they are written, damaged or huge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from run_folders import metrics_line, sample, write_run, write_samples

from quadriga.dashboard import samples as reading
from quadriga.dashboard.catalog import Catalog, Run
from quadriga.dashboard.configuration import config_table
from quadriga.dashboard.events import Events, stall_reports, stall_text
from quadriga.dashboard.files import Unreadable, open_inside
from quadriga.dashboard.logs import log_files, log_page
from quadriga.dashboard.metrics import Metrics
from quadriga.dashboard.samples import Query, same_questions, sample_history, sample_page, sample_steps
from quadriga.dashboard.timeline import Timelines
from quadriga.tracking import Timeline


def the_run(folder: Path) -> Run:
    return Catalog([folder]).look()[0]


def test_curves_are_read_on_from_where_they_were_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    metrics, run = Metrics(), the_run(folder)
    assert metrics.series(run, ["critic/score/mean"])["critic/score/mean"]["x"] == [1, 2, 3, 4, 5]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(6, 10, 0.5, time.time())) + "\n" + '{"step": 7, "half')
    assert metrics.series(run, ["critic/score/mean"])["critic/score/mean"]["x"] == [1, 2, 3, 4, 5, 6]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(' written": 1.5}\n')
    assert metrics.series(run, ["half written"])["half written"] == {"x": [7], "y": [1.5]}


def test_a_file_that_was_cut_by_a_resume_is_read_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    metrics, run = Metrics(), the_run(folder)
    metrics.names(run)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    new = folder / "new"
    new.write_text("".join(lines[:4]))
    new.replace(folder / "metrics.jsonl")
    assert metrics.series(run, ["actor/entropy"])["actor/entropy"]["x"] == [1, 2, 3, 4]


def test_x_may_be_steps_tokens_or_time(tmp_path: Path) -> None:
    run = the_run(write_run(tmp_path / "run", steps=4))
    metrics = Metrics()
    assert metrics.series(run, ["actor/entropy"], "tokens")["actor/entropy"]["x"] == [1000, 2000, 3000, 4000]
    assert metrics.series(run, ["actor/entropy"], "time")["actor/entropy"]["x"] == pytest.approx([0, 2, 4, 6])


def test_many_points_become_means_with_bounds_and_a_zoom_has_them_all(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            rare = f', "rare": {step}' if step % 50 == 7 else ""
            half = f', "half": {step % 4}' if step % 2 else ""
            file.write(f'{{"step": {step}, "time": {step}, "dense": {step % 10}{rare}{half}}}\n')
    whole = Metrics().series(the_run(folder), ["dense", "rare", "half"], points=1000)
    dense = whole["dense"]
    assert dense["x"] == [20.0 * k + 19 for k in range(1000)]
    assert dense["n"] == [20.0] * 1000
    assert (dense["lo"][0], dense["y"][0], dense["hi"][0]) == (0.0, 4.5, 9.0)
    assert whole["rare"]["x"] == [50.0 * k + 7 for k in range(400)], "few are given as they are"
    assert whole["half"]["x"] == dense["x"], "one grid for all, so that they can be added up"
    assert whole["half"]["n"] == [10.0] * 1000
    assert whole["half"]["y"] == [2.0] * 1000
    run = the_run(write_run(tmp_path / "run", steps=3000))
    zoomed = Metrics().series(run, ["actor/entropy"], low=100, high=150, points=100)["actor/entropy"]
    assert zoomed["x"] == [float(k) for k in range(100, 151)]
    assert "lo" not in zoomed


def test_foreign_metrics_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [
        '{"step": 1, "a": 1}',
        "[1, 2]",
        "not json",
        '{"step": 2, "a": NaN, "b": Infinity, "c": "text", "d": [1], "e": true, "f": 1e400}',
        '{"no step": 1}',
        '{"step": 1, "a": 5}',
        "[" * 5000,
        '{"step": 3, "a": 3}',
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    metrics = Metrics()
    run = the_run(folder)
    assert metrics.series(run, list("abcdef")) == {"a": {"x": [1, 3], "y": [1, 3]}}


def test_memory_stays_bounded_over_many_runs(tmp_path: Path) -> None:
    for k in range(6):
        write_run(tmp_path / f"run{k}", steps=500)
    metrics = Metrics(most_bytes=200_000)
    for run in Catalog([tmp_path]).look():
        metrics.names(run)
    assert sum(held.table.bytes for held in metrics._tables.values()) <= 200_000


def test_memory_stays_bounded_with_one_endless_run_whose_newest_value_is_exact(tmp_path: Path) -> None:
    names = [f"metric{k}" for k in range(50)]
    folder = write_run(tmp_path / "run", steps=1)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            rare = {"rare": step} if step % 10 == 0 else {}
            file.write(json.dumps({"step": step, "time": step, **dict.fromkeys(names, step / 3), **rare}) + "\n")
    metrics, run = Metrics(most_bytes=1 << 20), the_run(folder)
    series = metrics.series(run, ["metric7", "rare"], points=100_000)
    assert metrics._tables[run.id].bytes <= 1 << 20
    assert 2_000 < len(series["metric7"]["x"]) < 10_000
    assert series["metric7"]["y"] == pytest.approx([x / 3 for x in series["metric7"]["x"]], rel=1e-6)
    assert series["rare"]["y"] == series["rare"]["x"]
    assert {m["name"]: m["last"] for m in metrics.names(run)}["metric7"] == 20_000 / 3
    assert metrics.series(run, ["metric7"], "time")["metric7"]["x"][-1] > 19_000


def test_a_long_file_that_is_being_read_holds_up_no_other_run(tmp_path: Path) -> None:
    for name in ("long", "short"):
        write_run(tmp_path / name, steps=5)
    runs = {run.name: run for run in Catalog([tmp_path]).look()}
    metrics = Metrics()
    with metrics.table(runs["long"]), ThreadPoolExecutor(1) as pool:
        names = pool.submit(metrics.names, runs["short"]).result(timeout=30)
    assert len(names) == 7


def test_names_can_be_asked_for_while_a_run_invents_new_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    metrics, run = Metrics(), the_run(folder)

    def ask(_: int) -> int:
        return len(metrics.names(run))

    with ThreadPoolExecutor(4) as pool, (folder / "metrics.jsonl").open("a", buffering=1) as file:
        for step in range(4, 60):
            invented = {f"new{step}_{k}": 1.0 for k in range(50)}
            file.write(json.dumps({"step": step, "time": float(step), **invented}) + "\n")
            assert all(pool.map(ask, range(8)))


def test_a_curve_keeps_the_digits_that_were_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    values = [0.1, 1e-7, 123456.7, 1e39, -2.5]
    with (folder / "metrics.jsonl").open("w") as file:
        for step, value in enumerate(values, 1):
            file.write(
                json.dumps({"step": step, "time": step, "a": value, **({"b": value} if step != 3 else {})}) + "\n"
            )
    series = Metrics().series(the_run(folder), ["a", "b"])
    assert series["a"]["y"] == [0.1, 1e-7, 123456.7, 3.4e38, -2.5]
    assert series["b"] == {"x": [1, 2, 4, 5], "y": [0.1, 1e-7, 3.4e38, -2.5]}


def test_metric_names_come_with_meaning_unit_and_section(tmp_path: Path) -> None:
    names = {m["name"]: m for m in Metrics().names(the_run(write_run(tmp_path / "run")))}
    assert names["reward/correct"]["unit"] == "share"
    assert names["reward/correct"]["section"] == "Scores and rewards"
    assert names["val/arithmetic/acc/mean@1"]["section"] == "Validation"


def test_samples_come_in_pages_that_follow_each_other(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_samples(folder, 3, [sample(k, k % 3 == 0) for k in range(25)])
    run = the_run(folder)
    assert sample_steps(run) == {"train": [3], "val": []}
    seen, offset = [], 0
    while offset is not None:
        page = sample_page(run, Query("train", 3, offset, limit=10))
        seen += [row["response"] for row in page["rows"]]
        offset = page["next"]
    assert seen == [sample(k, k % 3 == 0)["response"] for k in range(25)]


def test_samples_are_found_by_text_and_by_what_became_of_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = [sample(k, k % 3 == 0) for k in range(12)]
    rows += [
        sample(12, False, outcome="unparsed"),
        sample(13, False, outcome="timeout"),
        sample(14, True, response_tokens=12),
    ]
    write_samples(folder, 1, rows)
    run = the_run(folder)

    def found(**query: str) -> list[str]:
        return [row["response"] for row in sample_page(run, Query("train", 1, **query), 12)["rows"]]  # type: ignore[arg-type]

    assert len(found(flag="wrong")) == 8
    assert found(flag="unparsed") == ["#### 13"]
    assert found(flag="timed out") == ["#### 14"]
    assert found(flag="cut off") == ["#### 14"]
    assert found(text="2+1=", flag="right") == ["#### 9"]


def test_one_question_is_followed_over_the_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for step, right in ((0, False), (10, False), (20, True)):
        write_samples(folder, step, [sample(k, right) for k in range(8)], "val")
    run = the_run(folder)
    offset = sample_page(run, Query("val", 10))["rows"][5]["offset"]
    history = sample_history(run, "val", 10, offset)["rows"]
    assert [(row["step"], row["outcome"]) for row in history] == [(0, "wrong"), (10, "wrong"), (20, "correct")]
    assert {row["prompt"] for row in history} == {"1+1="}


def test_a_long_search_over_the_steps_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run")
    for step in range(5):
        write_samples(folder, step, [sample(k, True) for k in range(4)], "val")
    monkeypatch.setattr(reading, "PAGE_SECONDS", 0.0)
    run, seen, first = the_run(folder), [], 0
    while first is not None:
        page = sample_history(run, "val", 3, 0, first_step=first)
        seen += [row["step"] for row in page["rows"]]
        first = page["next"]
    assert seen == [0, 1, 2, 3, 4]


def test_the_answers_of_another_run_are_found_by_their_questions(tmp_path: Path) -> None:
    write_samples(write_run(tmp_path / "a"), 20, [sample(k, True) for k in range(8)], "val")
    other = write_run(tmp_path / "b")
    for step in (10, 30, 18):
        write_samples(other, step, [sample(k, False, step_of=step) for k in reversed(range(3, 12))], "val")
    a, b = sorted(Catalog([tmp_path]).look(), key=lambda run: run.name)
    rows = sample_page(a, Query("val", 20))["rows"]
    found = same_questions(b, "val", 20, rows)
    assert found["step"] == 18, "the nearest"
    assert [row and row["response"] for row in found["rows"]] == [None] * 3 + [f"#### {k + 1}" for k in range(3, 8)]
    assert same_questions(b, "train", 20, rows) == {"step": None, "rows": [None] * 8}


def test_logs_are_read_from_their_end_backwards_and_on_as_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    run = the_run(folder)
    assert log_files(run) == []
    (folder / "logs").mkdir()
    for name in ("actor_10.log", "actor_2.log", "empty.log"):
        (folder / "logs" / name).write_text("" if name == "empty.log" else "".join(f"line {k}\n" for k in range(1000)))
    (tmp_path / "secret").write_text("secret")
    (folder / "logs" / "link.log").symlink_to(tmp_path / "secret")
    assert [file["file"] for file in log_files(run)] == ["actor_2.log", "actor_10.log"]
    for name in ("link.log", "../status.json", "none.log"):
        with pytest.raises(Unreadable):
            log_page(run, name)
    monkeypatch.setattr("quadriga.dashboard.logs.PAGE_BYTES", 1000)
    pages = [log_page(run, "actor_2.log")]
    while pages[0]["start"]:
        pages.insert(0, log_page(run, "actor_2.log", before=pages[0]["start"]))
    assert all(page["text"].startswith("line") for page in pages)
    assert "".join(page["text"] for page in pages) == (folder / "logs" / "actor_2.log").read_text()
    end = pages[-1]["end"]
    with (folder / "logs" / "actor_2.log").open("a") as file:
        file.write("\x1b[31mred\x1b[0m\nhalf")
    more = log_page(run, "actor_2.log", after=end)
    assert more["text"] == "red\n"
    assert log_page(run, "actor_2.log", after=more["end"])["text"] == "half"


def test_a_search_through_gigabytes_stops_in_time_and_says_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "samples" / "train_00000001.jsonl"
    path.parent.mkdir()
    with path.open("w") as file:
        for k in range(2000):
            file.write(json.dumps(sample(k, True, response="x" * 2000)) + "\n")
    with path.open("r+b") as file:  # 2 GB more, that take no space on disk and are never read
        file.seek(2 << 30)
        file.write(b"\n" + json.dumps(sample(9, True, response="needle")).encode() + b"\n")
    monkeypatch.setattr(reading, "PAGE_BYTES", 1 << 20)
    run = the_run(folder)
    page = sample_page(run, Query("train", 1, text="needle"))
    assert page["rows"] == []
    assert 1 << 20 <= page["next"] < 2 << 20
    began = time.monotonic()
    last = sample_page(run, Query("train", 1, offset=(2 << 30) + 1, text="needle"))
    assert [row["response"] for row in last["rows"]] == ["needle"]
    assert time.monotonic() - began < 5


def test_damaged_and_foreign_samples_are_counted_or_shown_as_they_are(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = write_samples(
        folder, 1, [{"prompt": [{"role": "user", "content": "hi"}], "response": {"a": 1}, "score": "high"}]
    )
    path.write_bytes(path.read_bytes() + b'{"prompt": \n[]\n{"prompt": "cut o')
    page = sample_page(the_run(folder), Query("train", 1))
    assert page["damaged"] == 2
    (row,) = page["rows"]
    assert (row["prompt"], row["response"], row["score"]) == ("[user] hi", '{"a": 1}', None)


def test_a_file_that_leads_out_of_the_run_or_is_no_file_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    (folder / "samples").mkdir()
    (folder / "samples" / "train_00000001.jsonl").symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(folder / "samples" / "train_00000002.jsonl")
    run = the_run(folder)
    for step, why in ((1, "leads out"), (2, "no plain file"), (3, "cannot be read")):
        with pytest.raises(Unreadable, match=why):
            sample_page(run, Query("train", step))
    with pytest.raises(Unreadable):
        open_inside(folder, "..", "secret.jsonl")
    with pytest.raises(Unreadable):
        sample_page(run, Query("../../secret", 1))


def test_the_timeline_of_a_step_is_found_also_while_the_file_grows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    timelines, run = Timelines(), the_run(folder)
    with pytest.raises(Unreadable):
        timelines.steps(run)
    writer = Timeline(folder / "timeline.json")
    for step in range(1, 6):
        writer.add("gen", 1000.0 + step, 0.5, "driver", step=step)
        writer.add("generate_sequences", 1000.1 + step, 0.3, "actor 0", step=step)
        writer.flush()
        assert timelines.steps(run) == {"steps": list(range(1, step + 1)), "full": False}
    found = timelines.events(run, 4, 4)
    assert found["lanes"] == ["driver", "actor 0"]
    assert [(e["name"], e["lane"], e["step"]) for e in found["events"]] == [("gen", 0, 4), ("generate_sequences", 1, 4)]
    assert found["events"][1]["start"] == pytest.approx(0.1, abs=1e-3)


def test_the_timeline_tells_how_busy_each_worker_was_and_in_which_phase(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    writer = Timeline(folder / "timeline.json")
    writer.add("step", 1000.0, 4.0, "driver", step=1)
    for start, seconds, name in ((0.0, 1.0, "generate"), (0.5, 0.5, "compute_log_prob"), (3.0, 1.0, "take_weights")):
        writer.add(name, 1000.0 + start, seconds, "actor 0", step=1)
    writer.flush()
    found = Timelines().events(the_run(folder), 1, 1)
    assert dict(zip(found["lanes"], found["busy"])) == pytest.approx({"driver": 1.0, "actor 0": 0.5}, abs=1e-3)
    assert [event["phase"] for event in found["events"]][1:] == ["gen", "old_log_prob", "update_weights"]


def test_a_timeline_whose_file_is_full_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    writer = Timeline(folder / "timeline.json")
    writer.add("gen", 1000.0, 1.0, step=1)
    for k in range(60):
        writer.add("x" * 1_000_000, 1000.0 + k, 1.0)
        writer.flush()
    assert Timelines().steps(the_run(folder)) == {"steps": [1], "full": True}


def test_stalls_and_events_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "stalls").mkdir()
    (folder / "stalls" / "step_00000012_gen.txt").write_text("step 12: step/gen has been running")
    (folder / "stalls" / "other.txt").write_text("no report")
    lines = [
        {"kind": "start", "time": 1.0, "step": 4, "start_step": 4},
        {"kind": "alarm", "time": 2.0, "step": 6, "name": "entropy_cliff", "text": "fell", "look": "there"},
        {"kind": "end", "time": 3.0, "step": 9, "status": "failed", "error": "boom"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "mess')
    run = the_run(folder)
    assert [(r["step"], r["phase"]) for r in stall_reports(run)] == [(12, "gen")]
    assert "step/gen" in stall_text(run, "step_00000012_gen.txt")
    with pytest.raises(Unreadable):
        stall_text(run, "../status.json")
    assert [event["text"] for event in Events().of(run)] == ["resumed after step 4", "fell", "failed: boom"]


def test_messages_do_not_push_out_alarms(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    events, run = Events(), the_run(folder)
    with (folder / "events.jsonl").open("a") as file:
        for k in range(5000):
            kind = {"kind": "alarm", "name": f"alarm{k}"} if k % 1000 == 0 else {"kind": "message", "level": "info"}
            file.write(json.dumps({"time": float(k), "step": k, "text": f"said {k}", **kind}) + "\n")
    found = events.of(run)
    assert [event["name"] for event in found if event["kind"] == "alarm"] == [
        "alarm0",
        *(f"alarm{k}000" for k in range(1, 5)),
    ]
    assert len(found) == 2005
    assert [event["step"] for event in found] == sorted(event["step"] for event in found)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "restart", "time": 1e4, "step": 5000, "text": "restart 1"}) + "\n")
    assert events.of(run)[-1]["text"] == "restart 1", "what is new is read on"


BOMBS = {
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 9)),
    "nesting": "[" * 900_000,
    "many": "- a\n" * 200_000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_configuration_that_would_take_all_memory_is_a_problem_of_its_own_run(tmp_path: Path, bomb: str) -> None:
    """In a process with little memory, so that what goes wrong goes wrong there."""
    (write_run(tmp_path / "bomb") / "config.yaml").write_text(bomb)
    (write_run(tmp_path / "good") / "config.yaml").write_text("data:\n  seed: 1\n")
    program = (
        "import resource, sys, json\n"
        "from pathlib import Path\n"
        "from quadriga.dashboard.catalog import Catalog\n"
        "from quadriga.dashboard.configuration import config_table\n"
        "runs = sorted(Catalog([Path(sys.argv[1])]).look(), key=lambda run: run.name)\n"
        "config_table(runs[1:])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "print(json.dumps(config_table(runs)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
    table = json.loads(done.stdout)
    assert "bomb: config.yaml" in table["problems"][0]
    assert {key["key"]: key["values"] for key in table["keys"]} == {"data.seed": [None, 1]}


def test_of_an_evaluation_every_flag_is_shown_as_set(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", kind="eval")
    (folder / "config.yaml").write_text("model: here\nn: 4\nscorer: null\n")
    keys = {key["key"]: key["set"] for key in config_table([the_run(folder)])["keys"]}
    assert keys == {"model": [True], "n": [True], "scorer": [False]}


def test_runs_of_two_kinds_differ_by_what_was_set_and_not_by_what_one_of_them_lacks(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from quadriga.config.load import load_config
    from quadriga.config.supervised_schema import SCHEMAS

    rl = load_config({"algorithm": {"lam": 0.5}})
    model, data = {"partial_pretrain": "builtin:arithmetic"}, {"train_files": "lessons.jsonl"}
    sft = load_config({"optim": {"lr": 0.125}, "model": model, "data": data}, SCHEMAS["sft"])
    for kind, config in (("train", rl), ("sft", sft)):
        folder = write_run(tmp_path / kind, kind=kind)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    differ = {key["key"] for key in config_table(Catalog([tmp_path]).look())["keys"] if key["differs"]}
    assert {"algorithm.lam", "optim.lr"} <= differ
    assert not {"algorithm.gamma", "optim.betas", "critic.optim.lr"} & differ
    assert len(differ) < 30


def test_the_configuration_says_what_was_set_and_what_differs(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from quadriga.config.load import as_plain_dict, load_config

    for name, lr in (("a", 1e-3), ("b", 1e-4)):
        folder = write_run(tmp_path / name)
        values = {"actor_rollout_ref": {"actor": {"optim": {"lr": lr}}}, "data": {"train_batch_size": 32}}
        config = as_plain_dict(load_config(OmegaConf.create(values)))
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    runs = sorted(Catalog([tmp_path]).look(), key=lambda run: run.name)
    keys = {key["key"]: key for key in config_table(runs)["keys"]}
    lr = keys["actor_rollout_ref.actor.optim.lr"]
    assert (lr["values"], lr["set"], lr["differs"]) == ([1e-3, 1e-4], [True, True], True)
    assert "learning rate" in lr["meaning"]
    batch, follower = keys["data.train_batch_size"], keys["actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert (batch["set"], batch["differs"]) == ([True, True], False)
    assert follower["set"] == [False, False], "it follows data.train_batch_size by itself"
    (tmp_path / "b" / "config.yaml").write_text("a: [unclosed")
    assert "no YAML" in config_table(runs)["problems"][0]
