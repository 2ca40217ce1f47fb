"""Run directories that no run has written: foreign, damaged, hostile, huge. The page stays up and says what it can."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import metrics_line, sample, token_sample, write_run, write_samples
from served import Served

from quadriga.dashboard.export import export_page
from quadriga.dashboard.samples import KINDS
from quadriga.dashboard.server import API

HALF = "\ud83d half of an emoji"
ODD: list[Any] = [
    None, True, 0, -1, 1e308, float("nan"), float("inf"), 10**400, "", "text", HALF, "\x00", "<b>", [], [1, "a", None], {},
    {"a": {"b": []}}, {"": HALF}, [[[]]], [{"role": 1, "content": None}], [{}], "9" * 5000,
]  # fmt: skip


def spoiled(value: Any, draw: random.Random) -> Any:
    """The same JSON with some of its values replaced by odd ones."""
    if draw.random() < 0.2:
        return draw.choice(ODD)
    if isinstance(value, dict):
        return {key: spoiled(one, draw) for key, one in value.items()}
    if isinstance(value, list):
        return [spoiled(one, draw) for one in value]
    return value


def write_spoiled_run(folder: Path, draw: random.Random) -> None:
    """Every file that a viewer reads, in its usual shape but for some values."""
    write_run(folder, steps=4, state=draw.choice(["running", "finished", "failed"]), alarms={"clip_share": "so much"})
    status = spoiled(json.loads((folder / "status.json").read_text()), draw)
    (folder / "status.json").write_text(json.dumps(status))
    lines = [spoiled(metrics_line(step, 4, 0.5, 1e9 + step), draw) for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {**token_sample(["a", "b"], [-1.0, -2.0], [-1.0, -2.1], [1, 0]), "extra": {"k": 1}, "error": "e"},
        {
            **sample(1, True),
            "messages": [{"role": "user", "content": "q", "tool_calls": [{"function": {"name": "f"}}]}],
        },
        {"prompt": "p", "chosen": "c", "rejected": "r", "chosen_reward": 1.0, "rejected_reward": 0.0, "row": 3},
    ]
    for kind in KINDS:
        path = write_samples(folder, 1, [], kind)
        path.write_text("".join(json.dumps(spoiled(row, draw)) + "\n" for row in rows))
    events = [
        {"kind": "start", "time": 1.0, "step": 0, "start_step": 2, "total_steps": 4},
        {"kind": "alarm", "time": 2.0, "step": 1, "name": "clip_share", "text": "seen", "look": "there"},
        {"kind": "steered", "time": 3.0, "step": 1, "command": "save", "result": "saved"},
        {"kind": "end", "time": 4.0, "step": 4, "status": "failed", "error": "e"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(spoiled(event, draw)) + "\n" for event in events))
    spans = [{"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "driver"}}]
    spans += [{"ph": "X", "name": "gen", "tid": 1, "ts": 5.0, "dur": 2.0, "args": {"step": 1}}]
    (folder / "timeline.json").write_text("[\n" + ",\n".join(json.dumps(spoiled(s, draw)) for s in spans) + "\n]\n")
    values = {"data": {"max_response_length": 12, "train_batch_size": 8}, "trainer": {"project_name": "p"}}
    (folder / "config.yaml").write_text(json.dumps(spoiled(values, draw)))
    (folder / "stalls").mkdir()
    (folder / "stalls" / "step_00000001_gen.txt").write_bytes(b"\xff stacks")
    (folder / "logs").mkdir()
    (folder / "logs" / "actor_0.log").write_bytes(b"\xff\x1b[31mred\x00\n" * 9)


@pytest.fixture(scope="module")
def spoiled_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("spoiled")
    draw = random.Random(5)
    for k in range(40):
        write_spoiled_run(root / f"run{k}", draw)
    os.rename(root / "run0", os.fsencode(root) + b"/no utf-8 \xff")
    return root


def test_whatever_a_value_is_replaced_by_every_question_is_answered(
    spoiled_runs: Path, serve: Callable[..., Served]
) -> None:
    served = serve(spoiled_runs)
    rows = served.json("runs?limit=500")["rows"]
    assert len(rows) == 40
    for sort in ("name", "state", "step", "eta", "main", "validation", "updated", "metric%20actor/entropy"):
        assert len(served.json(f"runs?limit=500&sort={sort}&text=run")["rows"]) == 39
    for run in (row["id"] for row in rows):
        names = [m["name"] for m in served.json(f"metrics?run={run}")] or ["actor/entropy"]
        queries = [f"series?run={run}&x={x}&" + "&".join(f"metric={n}" for n in names) for x in ("tokens", "time")]
        queries += [f"samples?run={run}&kind={kind}&step=1&flag={flag}" for kind in KINDS for flag in ("", "cut%20off")]
        queries += [f"history?run={run}&kind=val&step=1&offset=0", f"timeline?run={run}&first=0&last=9"]
        queries += [f"{name}?run={run}" for name in ("sample_steps", "timeline_steps", "events", "log_files")]
        queries += [
            f"log?run={run}&file=actor_0.log",
            f"log?run={run}&file=actor_0.log&after=3",
            f"log?run={run}&file=..",
        ]
        queries += [f"samples?run={run}&kind=val&step=1&beside={','.join(row['id'] for row in rows[:3])}"]
        queries += [f"history?run={run}&kind=val&step=1&offset=0&first=1"]
        queries += [f"stall?run={run}&file=step_00000001_gen.txt", f"config?ids={run}"]
        assert {query.partition("?")[0] for query in queries} | {"runs", "metrics"} == set(API)
        for query in queries:
            code, body, _ = served.get(f"api/{query}")
            assert code in (200, 404), (query, body)
            json.loads(body)


def test_spoiled_runs_can_be_exported_and_printed(spoiled_runs: Path, tmp_path: Path) -> None:
    export_page([spoiled_runs], tmp_path / "page.html")
    for words in (
        ["runs"],
        ["compare", "run1", "run2", "run3"],
        ["samples", "run1", "--kind", "train", "--limit", "9"],
    ):
        command = [sys.executable, "-m", "quadriga", *words, "--root", str(spoiled_runs)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_half_an_emoji_that_a_model_wrote_does_not_cost_the_other_samples(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    folder = write_run(tmp_path / "run")
    write_samples(folder, 1, [sample(0, False, response=HALF), sample(1, True)])
    served = serve(tmp_path)
    rows = served.json(f"samples?run={served.row('run')['id']}&step=1")["rows"]
    assert [row["response"] for row in rows] == ["? half of an emoji", sample(1, True)["response"]]


@pytest.mark.parametrize("place", [0, 1 << 20])
def test_two_gigabytes_of_samples_without_a_line_end_are_not_loaded(tmp_path: Path, place: int) -> None:
    folder = write_run(tmp_path / "run")
    path = write_samples(folder, 1, [sample(0, True)])
    os.truncate(path, 2 << 30)  # takes no space on disk
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({600 << 20}, {600 << 20}))\n"
        "from pathlib import Path\n"
        "from quadriga.dashboard.catalog import Catalog\n"
        "from quadriga.dashboard.samples import Query, sample_page\n"
        f"page = sample_page(Catalog([Path({str(folder)!r})]).look()[0], Query('train', 1, {place}, text='1+'))\n"
        "print(len(page['rows']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"]
