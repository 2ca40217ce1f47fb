from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.tracking.alarms import DETECTORS, Alarms
from quadriga.trainer.ppo.step_metrics import LOOP_TOKENS, warning_signs

CALM = {
    "response_length/mean": 100.0,
    "response_length/clip_ratio": 0.02,
    "response/repetitive": 0.0,
    "actor/entropy": 0.5,
    "reward/correct": 0.4,
    "reward/length_correlation": 0.1,
    "reward/equal_groups": 0.3,
    "rollout/logprob_diff_mean": 1e-4,
    "actor/ppo_kl": 0.001,
    "actor/kl_loss": 0.05,
    "actor/pg_clipfrac": 0.02,
    "actor/skipped": 0.0,
    "reward/errors": 0.0,
    "reward/timeouts": 0.0,
    "train/loss": 0.6,
    "train/accuracy": 0.8,
    "train/margin": 0.5,
}
TROUBLE: dict[str, dict[str, float | None]] = {
    "length_collapse": {"response_length/mean": 20.0},
    "length_explosion": {"response_length/mean": 400.0},
    "repetition": {"response/repetitive": 0.5},
    "entropy_cliff": {"actor/entropy": 0.01},
    "reward_follows_length": {"reward/length_correlation": 0.8, "response_length/mean": 180.0},
    "equal_groups": {"reward/equal_groups": 0.98},
    "gap_drift": {"rollout/logprob_diff_mean": 0.05},
    "kl_run_away": {"actor/kl_loss": 2.0},
    "clip_share": {"actor/pg_clipfrac": 0.5},
    "not_finite": {"actor/grad_norm": None},
    "scoring_fails": {"reward/errors": 0.3},
    "loss_jumps": {"train/loss": 2.5},
    "preferences_lost": {"train/accuracy": 0.45},
}
OTHER_TROUBLE: list[tuple[str, dict[str, float | None], dict[str, float | None]]] = [
    ("kl_run_away", {"actor/reward_kl_penalty": 0.01}, {"actor/reward_kl_penalty": 0.9}),
    ("kl_run_away", {"rollout_corr/kl": 0.001}, {"rollout_corr/kl": 0.4}),
    ("kl_run_away", {}, {"actor/ppo_kl": -0.5}),
    ("preferences_lost", {}, {"train/margin": -0.2}),
]
"""Detector, what is calm besides, what is trouble."""


def steps(alarms: Alarms, start: int, count: int, **changes: Any) -> list[set[str]]:
    """The alarms that hold at each of some steps."""
    found = []
    for step in range(start, start + count):
        found.append({name.removeprefix("alarm/") for name in alarms.metrics_of(step, {**CALM, **changes})})
    return found


def test_every_detector_has_a_case_here_and_a_row_in_the_docs() -> None:
    assert {*TROUBLE, "held_out_rises"} == set(DETECTORS)
    page = (Path(__file__).resolve().parents[2] / "docs" / "dashboard.md").read_text(encoding="utf-8")
    assert [name for name in DETECTORS if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", TROUBLE)
def test_a_detector_fires_on_its_trouble_and_on_no_other_and_ends_with_it(name: str) -> None:
    alarms = Alarms()
    assert steps(alarms, 1, 30) == [set()] * 30
    held = steps(alarms, 31, 8, **TROUBLE[name])
    assert held[-1] == {name}
    assert steps(alarms, 39, 12)[-1] == set()


@pytest.mark.parametrize(("name", "calm", "trouble"), OTHER_TROUBLE)
def test_a_detector_sees_its_trouble_wherever_it_shows(
    name: str, calm: dict[str, Any], trouble: dict[str, Any]
) -> None:
    alarms = Alarms()
    assert steps(alarms, 1, 30, **calm) == [set()] * 30
    assert steps(alarms, 31, 8, **calm | trouble)[-1] == {name}


def test_a_held_out_loss_that_rises_is_seen_however_far_apart_the_validations_are() -> None:
    alarms, held = Alarms(), []
    for k, loss in enumerate((1.0, 0.7, 0.6, 0.605, 0.65, 0.7, 0.6)):
        held += steps(alarms, 1 + 100 * k, 99) + steps(alarms, 100 + 100 * k, 1, **{"val/loss": loss})
    rises = [step for step, found in enumerate(held, 1) if found == {"held_out_rises"}]
    assert rises == list(range(600, 700)), "from the third rise to the next fall"
    assert not any(steps(Alarms(), 1, 50, **{"val/loss": 0.5}))


def test_an_alarm_is_raised_once_with_what_was_seen_and_where_to_look() -> None:
    alarms = Alarms()
    steps(alarms, 1, 30)
    raised = []
    for step in range(31, 41):
        alarms.metrics_of(step, CALM | {"response_length/mean": 20.0})
        raised += [(step, alarm) for alarm in alarms.raised]
    ((step, alarm),) = raised
    assert step == 34, "one odd batch is no trouble; the mean of some steps is"
    assert "from 100 to" in alarm.text
    assert alarm.look


def test_one_odd_step_raises_nothing() -> None:
    alarms = Alarms()
    steps(alarms, 1, 30)
    assert steps(alarms, 31, 1, **{"response_length/mean": 20.0, "actor/pg_clipfrac": 0.9}) == [set()]


def test_a_solved_task_is_no_trouble() -> None:
    alarms = Alarms()
    solved = {"reward/correct": 0.99, "reward/equal_groups": 0.97, "actor/entropy": 0.01}
    steps(alarms, 1, 30)
    assert steps(alarms, 31, 20, **solved) == [set()] * 20


def test_a_resumed_run_raises_the_same_alarms_at_the_same_steps() -> None:
    course = [{"step": k, **CALM, "actor/entropy": 0.5 if k < 30 else 0.01} for k in range(1, 50)]
    whole = Alarms()
    expected = [whole.metrics_of(line["step"], line) for line in course]
    lines = [{**line, **told} for line, told in zip(course[:35], expected)]
    resumed = Alarms(lines)
    assert [resumed.metrics_of(line["step"], line) for line in course[35:]] == expected[35:]
    assert expected[-1] == {"alarm/entropy_cliff": 1.0}


def repetitive(*rows: list[int]) -> list[bool]:
    """Which of these responses is said to end in a loop."""
    width = max(map(len, rows))
    found = []
    for row in rows:
        responses, mask = torch.zeros(1, width, dtype=torch.long), torch.zeros(1, width, dtype=torch.long)
        responses[0, : len(row)], mask[0, : len(row)] = torch.tensor(row), 1
        batch = {"responses": responses, "response_mask": mask, "token_level_scores": torch.zeros(1, width)}
        found.append(warning_signs(batch, ["a"])["response/repetitive"] == 1.0)
    return found


def test_loops_of_words_sentences_and_paragraphs_are_seen_and_ordinary_text_is_not() -> None:
    draw = torch.Generator().manual_seed(1)

    def words(count: int, of: int = 5000) -> list[int]:
        return torch.randint(1, of, (count,), generator=draw).tolist()

    sentence, paragraph, lead = words(40), words(120), words(300)
    stumbling = sentence * 5
    stumbling[::90] = [0] * len(stumbling[::90])
    assert repetitive(words(1) * 80, lead + sentence * 5, lead + paragraph * 3, stumbling) == [True] * 4
    twice = lead + paragraph * 2
    ended = lead + sentence * 5 + words(30)
    table = [token for k in range(60) for token in (7, 8, 1000 + k, 8, 2000 + 3 * k, 7, 9)]
    numbers = [token for k in range(200) for token in (3000 + k, 11)]
    few_words = words(500, of=30)
    assert repetitive(twice, ended, table, numbers, few_words, words(600), sentence) == [False] * 7


def test_warning_signs_of_a_batch() -> None:
    torch.manual_seed(0)
    length = LOOP_TOKENS + 6
    responses = torch.randint(0, 1000, (4, length))
    responses[1] = torch.tensor([7, 8, 9] * length)[:length]
    mask = torch.ones(4, length, dtype=torch.long)
    mask[3, 10:] = 0  # too short to be called repetitive
    responses[3] = 5
    scores = torch.zeros(4, length)
    scores[:, 0] = torch.tensor([1.0, 1.0, 2.0, 0.0])
    signs = warning_signs(
        {"responses": responses, "response_mask": mask, "token_level_scores": scores}, ["a", "a", "b", "b"]
    )
    assert signs["response/repetitive"] == 0.25
    assert signs["reward/equal_groups"] == 0.5
    assert signs["reward/length_correlation"] > 0.7
