"""What a real run leaves for viewers, and how it obeys who tells it something."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tiny_policy import write_task

from quadriga.dashboard.catalog import Catalog
from quadriga.dashboard.events import Events
from quadriga.dashboard.samples import Query, sample_page
from quadriga.tracking.steering import parse_command, tell
from quadriga.trainer.main_ppo import TaskRunner, run_ppo


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Kept(TaskRunner):
    """Can be looked at when the run is over."""

    last: Kept

    def __init__(self) -> None:
        super().__init__()
        Kept.last = self


def tell_in_an_hour(run: Path, *commands: list[str]) -> None:
    """What the run will find in its first step: to its clock, it was told that after it had begun."""
    later = time.time() + 3600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        for words in commands:
            tell(run, parse_command(words))


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
    tell_in_an_hour(run, ["set", "actor.optim.lr=5e-3"], ["validate"], ["save"], ["set", "actor.entropy_coeff=0.01"])
    run_ppo(config, Kept)
    return config, run


def test_a_run_obeys_at_the_end_of_a_step_and_records_it(steered: tuple[dict, Path]) -> None:
    _, run = steered
    lines = lines_of(run)
    assert [line["actor/lr"] for line in lines] == pytest.approx([1e-2, 5e-3, 5e-3])
    assert [any(name.startswith("val/") for name in line) for line in lines] == [True, False, True]
    assert (run / "checkpoints" / "global_step_1").is_dir()
    (seen,) = Catalog([run]).look()
    told = [event["text"] for event in Events().of(seen) if event["kind"] == "steered"]
    assert told[0] == "set actor_rollout_ref.actor.optim.lr=0.005: 0.01 → 0.005"
    assert len(told) == 4
    assert Kept.last.trainer is not None
    assert Kept.last.trainer.entropy_controller.value == 0.01, "the weight that every update is given"


def test_a_resumed_run_keeps_what_it_was_told(steered: tuple[dict, Path]) -> None:
    config, run = steered
    run_ppo({**config, "trainer": {**config["trainer"], "total_training_steps": 5}})
    assert [line["actor/lr"] for line in lines_of(run)] == pytest.approx([1e-2, 5e-3, 5e-3, 5e-3, 5e-3])
    (seen,) = Catalog([run]).look()
    assert any(event["text"] == "resumed after step 3" for event in Events().of(seen))


def test_a_resumed_run_takes_the_value_that_its_own_command_changes(steered: tuple[dict, Path]) -> None:
    config, run = steered
    actor = config["actor_rollout_ref"]["actor"]
    given = {**config["actor_rollout_ref"], "actor": {**actor, "optim": {**actor["optim"], "lr": 2e-3}}}
    done = len(lines_of(run))
    run_ppo(
        {**config, "actor_rollout_ref": given, "trainer": {**config["trainer"], "total_training_steps": done + 1}}, Kept
    )
    assert lines_of(run)[-1]["actor/lr"] == pytest.approx(2e-3)
    assert Kept.last.trainer.entropy_controller.value == 0.01, "nothing else was given"
    events = (run / "events.jsonl").read_text()
    assert "optim.lr=0.002 as given now; 0.005, told after step 1, no longer holds" in events


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
