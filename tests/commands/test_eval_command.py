"""`quadriga eval`: figures, samples, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quadriga.commands.evaluate import main
from quadriga.dashboard.catalog import Catalog, Run
from quadriga.dashboard.samples import Query, sample_page
from quadriga.errors import CheckpointError, ConfigError, DataError, RewardError

MODEL = ["--model", "builtin:arithmetic", "--device", "cpu"]


def write(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def sums(tmp_path: Path, count: int = 6, source: str = "arithmetic") -> str:
    rows = [
        {"data_source": source, "prompt": f"{a}+{a}=", "reward_model": {"ground_truth": str(2 * a)}}
        for a in range(1, count + 1)
    ]
    return write(tmp_path / "sums.jsonl", rows)


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    return {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)}


def test_accuracy_is_that_of_the_samples_it_writes(tmp_path, capsys):
    output = tmp_path / "samples.jsonl"
    arguments = [sums(tmp_path), *MODEL, "--max-new-tokens", "8", "--n", "4", "--temperature", "1"]
    assert main([*arguments, "--output", str(output), "--json"]) == 0
    told = figures(capsys)
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted((s["row"], s["sample"]) for s in samples) == [(r, k) for r in range(6) for k in range(4)]
    assert {s["ground_truth"] for s in samples} == {str(2 * a) for a in range(1, 7)}
    right = [[s["acc"] for s in samples if s["row"] == row] for row in range(6)]
    assert told["acc/mean@4"]["value"] == pytest.approx(sum(map(sum, right)) / 24)
    assert told["acc/best@4"]["value"] == pytest.approx(sum(map(max, right)) / 6)
    assert 0 <= told["acc/maj@4"]["value"] <= 1
    for figure in told.values():
        assert figure["prompts"] == 6
        assert figure["low"] <= figure["value"] + 1e-12
        assert figure["value"] <= figure["high"] + 1e-12


def test_the_built_in_test_set_gives_the_quickstarts_starting_point(capsys):
    assert main(["builtin:arithmetic/test", *MODEL, "--max-new-tokens", "12", "--json"]) == 0
    told = figures(capsys)
    assert 0.3 < told["acc/mean@1"]["low"] < told["acc/mean@1"]["high"] < 0.55


def test_a_table_is_printed_for_people(tmp_path, capsys):
    assert main([sums(tmp_path), *MODEL, "--max-new-tokens", "8"]) == 0
    text = capsys.readouterr().out
    for part in ("acc/mean@1", "95 % interval", "arithmetic", "6 prompts, 1 each"):
        assert part in text


def test_the_scorer_can_be_chosen_by_name_or_be_ones_own(tmp_path, capsys):
    data = sums(tmp_path, source="unheard/of")
    assert main([data, *MODEL, "--max-new-tokens", "8", "--scorer", "arithmetic", "--json"]) == 0
    by_name = figures(capsys)
    own = tmp_path / "own.py"
    own.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    )
    assert main([data, *MODEL, "--max-new-tokens", "8", "--scorer", f"{own}:score", "--json"]) == 0
    by_own = figures(capsys)
    assert by_name["acc/mean@1"]["prompts"] == 6
    assert "acc/mean@1" not in by_own
    assert by_own["score/mean@1"]["value"] > 1
    own.write_text("def score(*row):\n    return {'score': 1, 'acc': 3}\n")
    assert main([data, *MODEL, "--max-new-tokens", "2", "--scorer", f"{own}:score", "--json"]) == 0
    assert figures(capsys)["acc/mean@1"]["value"] == 3


def test_rows_without_ground_truth_are_named_before_a_model_is_loaded(tmp_path):
    rows = [{"data_source": "gsm8k", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}}]
    rows += [{"data_source": "gsm8k", "prompt": "2+2="}]
    with pytest.raises(DataError, match=r"1 of 2 rows have no reward_model.ground_truth.*row 1") as caught:
        main([write(tmp_path / "rows.jsonl", rows), *MODEL])
    assert "--scorer" in caught.value.fix


def test_what_cannot_be_scored_is_named(tmp_path):
    with pytest.raises(RewardError, match="no scorer for data source 'unheard/of'"):
        main([sums(tmp_path, source="unheard/of"), *MODEL])
    with pytest.raises(ConfigError, match="--scorer gsm9k: there is no such scorer"):
        main([sums(tmp_path), *MODEL, "--scorer", "gsm9k"])
    with pytest.raises(ConfigError, match="--n 0"):
        main([sums(tmp_path), *MODEL, "--n", "0"])
    failing = tmp_path / "failing.py"
    failing.write_text("def score(*args):\n    raise RuntimeError('no')\n")
    with pytest.raises(RewardError, match="could not be scored"):
        main([sums(tmp_path), *MODEL, "--max-new-tokens", "4", "--scorer", f"{failing}:score"])


def test_an_incomplete_checkpoint_is_no_model(tmp_path):
    (tmp_path / "run" / "checkpoints" / "global_step_3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="global_step_3"):
        main([sums(tmp_path), "--model", str(tmp_path / "run")])


def test_an_evaluation_is_a_run_that_the_dashboard_shows(tmp_path, capsys):
    folder = tmp_path / "outputs" / "evals" / "sums"
    command = [sums(tmp_path), *MODEL, "--max-new-tokens", "8", "--run-dir", str(folder), "--json"]
    assert main(command) == 0
    accuracy = figures(capsys)["acc/mean@1"]
    (run,) = Catalog([tmp_path / "outputs"]).look()
    row = run.row(time.time())
    assert (row["kind"], row["state"]) == ("eval", "finished")
    assert (row["step"], row["total"]) == (6, 6)
    assert row["validations"]["arithmetic"]["last"] == accuracy["value"]
    assert row["intervals"]["arithmetic"] == [accuracy["low"], accuracy["high"]]
    shown = sample_page(run, Query("val", 0))["rows"]
    assert len(shown) == 6
    assert sum(one["outcome"] == "correct" for one in shown) == pytest.approx(6 * accuracy["value"])
    assert main(command) == 0, "once more: the earlier one is kept beside"
    assert sorted(run.name for run in Catalog([tmp_path / "outputs"]).look()) == ["evals/sums", "evals/sums/earlier/1"]


@pytest.fixture
def waiting(tmp_path):
    """An evaluation in a process of its own, whose scorer waits at the third sum for a file."""
    scorer = tmp_path / "slow.py"
    scorer.write_text(
        "import os, time\n"
        "def score(data_source, solution, truth, extra_info=None):\n"
        "    while truth == '6' and not os.path.exists(os.path.join(os.path.dirname(__file__), 'go')):\n"
        "        time.sleep(0.05)\n"
        "    return {'score': 1.0, 'acc': 1.0}\n"
    )
    folder = tmp_path / "outputs" / "slow"
    command = [sys.executable, "-m", "quadriga", "eval", sums(tmp_path), *MODEL, "--max-new-tokens", "4"]
    command += ["--scorer", f"{scorer}:score", "--timeout-s", "600", "--run-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = Run(folder, "slow", "id")
    deadline = time.monotonic() + 120
    while not (run.refresh() and run.step == 2):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process, run
    process.kill()
    process.wait()


def test_an_evaluation_is_seen_while_it_goes_on_and_to_its_end(waiting, tmp_path):
    process, run = waiting
    row = run.row(time.time())
    assert (row["state"], row["kind"], row["step"], row["total"]) == ("running", "eval", 2, 6)
    assert [sample["ground_truth"] for sample in sample_page(run, Query("val", 0))["rows"]] == ["2", "4"]
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    run.refresh()
    assert (run.state(time.time()), run.step) == ("finished", 6)


def test_an_evaluation_that_is_killed_is_interrupted(waiting):
    process, run = waiting
    process.kill()
    process.wait()
    run.refresh()
    assert run.state(time.time()) == "interrupted"
    assert len(sample_page(run, Query("val", 0))["rows"]) == 2, "what was scored is kept"


def test_an_evaluation_that_fails_says_why(tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text("def score(*args):\n    raise RuntimeError('no')\n")
    folder = tmp_path / "run"
    with pytest.raises(RewardError, match="could not be scored"):
        main(
            [sums(tmp_path), *MODEL, "--max-new-tokens", "4", "--scorer", f"{failing}:score", "--run-dir", str(folder)]
        )
    (run,) = Catalog([folder]).look()
    row = run.row(time.time())
    assert row["state"] == "failed"
    assert "could not be scored" in row["error"]


def test_an_evaluation_takes_no_other_runs_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"kind": "train"}')
    with pytest.raises(ConfigError, match="is the folder of a train run"):
        main([sums(tmp_path), *MODEL, "--run-dir", str(tmp_path / "run")])
