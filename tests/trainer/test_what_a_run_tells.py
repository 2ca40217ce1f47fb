"""What a real run leaves for viewers, and how it obeys who tells it something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_policy import write_task

from quadriga.dashboard.catalog import Catalog
from quadriga.dashboard.samples import Query, sample_page
from quadriga.dashboard.timeline import run_events
from quadriga.tracking.steering import parse_command, tell
from quadriga.trainer.main_ppo import run_ppo


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """Three steps of a run that is told, during the first, to halve its learning rate, to validate and to save."""
    folder = tmp_path_factory.mktemp("task")
    config = write_task(folder)
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 4
    config["trainer"] |= {"steering": True, "total_training_steps": 3, "logger": []}
    run = folder / "run"
    run.mkdir()
    for words in (["set", "actor.optim.lr=5e-3"], ["validate"], ["save"]):
        tell(run, parse_command(words))
    run_ppo(config)
    return config, run


def test_a_run_obeys_at_the_end_of_a_step_and_records_it(steered: tuple[dict, Path]) -> None:
    _, run = steered
    lines = lines_of(run)
    assert [line["actor/lr"] for line in lines] == pytest.approx([1e-2, 5e-3, 5e-3])
    assert [any(name.startswith("val/") for name in line) for line in lines] == [True, False, True]
    assert (run / "checkpoints" / "global_step_1").is_dir()
    (seen,) = Catalog([run]).look()
    told = [event["text"] for event in run_events(seen) if event["kind"] == "steered"]
    assert told[0] == "set actor_rollout_ref.actor.optim.lr=0.005: 0.01 → 0.005"
    assert len(told) == 3


def test_a_resumed_run_keeps_what_it_was_told(steered: tuple[dict, Path]) -> None:
    config, run = steered
    run_ppo({**config, "trainer": {**config["trainer"], "total_training_steps": 5}})
    assert [line["actor/lr"] for line in lines_of(run)] == pytest.approx([1e-2, 5e-3, 5e-3, 5e-3, 5e-3])
    (seen,) = Catalog([run]).look()
    assert any(event["text"] == "resumed after step 3" for event in run_events(seen))


def test_the_samples_of_a_step_have_their_tokens(steered: tuple[dict, Path]) -> None:
    _, run = steered
    (seen,) = Catalog([run]).look()
    rows = sample_page(seen, Query("train", 2, limit=200))["rows"]
    assert len(rows) == 64
    for row in rows:
        tokens = row["tokens"]
        assert len(tokens["texts"]) == row["length"] == sum(tokens["mask"])
        gaps = [abs(a - b) for a, b in zip(tokens["rollout_log_probs"], tokens["trainer_log_probs"])]
        assert max(gaps) < 1e-2
    for group in {row["uid"] for row in rows}:
        assert sum(row["advantage"] for row in rows if row["uid"] == group) == pytest.approx(0.0, abs=1e-3)
    (line,) = [line for line in lines_of(run) if line["step"] == 2]
    assert {"reward/equal_groups", "response/repetitive"} <= set(line)
    assert (run / "summary.html").exists()
