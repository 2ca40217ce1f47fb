from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.config.schema import Config
from quadriga.errors import ConfigError
from quadriga.tracking.steering import Command, Steering, parse_command, read_commands, tell


class Group:
    """Stands where a worker group is, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def set_key(self, key: str, value: Any) -> None:
        self.told.append((key, value))


def make_trainer(step: int) -> Any:
    crew = SimpleNamespace(actor=Group(), critic=None)
    return SimpleNamespace(step=step, config=Config(), crew=crew, stop_requested=False)


def make_steering(run: Path, enabled: bool = True) -> tuple[Steering, list[dict[str, Any]]]:
    shown: list[dict[str, Any]] = []
    return Steering(run, enabled, shown.append), shown


LR = "actor_rollout_ref.actor.optim.lr"


def test_commands_are_obeyed_once_at_the_end_of_a_step_and_recorded(tmp_path: Path) -> None:
    steering, shown = make_steering(tmp_path)
    trainer = make_trainer(7)
    tell(tmp_path, parse_command(["set", "actor.optim.lr=5e-4"]))
    tell(tmp_path, parse_command(["save"]))
    steering.obey(trainer)
    assert trainer.config.actor_rollout_ref.actor.optim.lr == 5e-4
    assert trainer.crew.actor.told == [(LR, 5e-4)]
    assert steering.takes("save")
    assert not steering.takes("save")
    assert not steering.takes("validate")
    steering.obey(trainer)
    assert len(trainer.crew.actor.told) == 1
    assert [(one["step"], one["command"]) for one in shown] == [(7, f"set {LR}=0.0005"), (7, "save")]
    assert [c.step for c in read_commands(tmp_path / "steering" / "obeyed.jsonl")] == [7, 7]


def test_stop_ends_the_run_after_the_step(tmp_path: Path) -> None:
    steering, _ = make_steering(tmp_path)
    trainer = make_trainer(3)
    tell(tmp_path, Command("stop"))
    steering.obey(trainer)
    assert trainer.stop_requested


def test_a_resumed_run_sets_the_same_again_at_the_same_steps(tmp_path: Path) -> None:
    steering, _ = make_steering(tmp_path)
    for step, text in ((5, "actor.optim.lr=5e-4"), (9, "actor.optim.lr=1e-4")):
        tell(tmp_path, parse_command(["set", text]))
        steering.obey(make_trainer(step))
    tell(tmp_path, Command("stop"))
    steering.obey(make_trainer(9))

    again, shown = make_steering(tmp_path)
    trainer = make_trainer(6)
    again.go_on_after(6, trainer)
    assert trainer.crew.actor.told == [(LR, 5e-4)]
    for trainer.step in (7, 8, 9, 10):
        again.obey(trainer)
        assert trainer.config.actor_rollout_ref.actor.optim.lr == (5e-4 if trainer.step < 9 else 1e-4)
    assert not trainer.stop_requested, "the stop has had its effect: that is why the run was resumed"
    assert shown == [], "what comes again is not told again"


def test_without_the_key_a_run_hears_nothing(tmp_path: Path) -> None:
    steering, shown = make_steering(tmp_path, enabled=False)
    tell(tmp_path, Command("stop"))
    trainer = make_trainer(1)
    steering.obey(trainer)
    assert not trainer.stop_requested
    assert shown == []


def test_a_key_of_a_role_that_the_run_lacks_is_answered_not_obeyed(tmp_path: Path) -> None:
    steering, shown = make_steering(tmp_path)
    tell(tmp_path, parse_command(["set", "critic.optim.lr=1e-6"]))
    steering.obey(make_trainer(1))
    assert shown[0]["result"] == "not done: this run has no critic"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sing"], "cannot be told 'sing'"),
        (["save", "now"], "takes nothing after it"),
        (["set"], "takes one key=value"),
        (["set", "optim.lr=1"], "ambiguous"),
        (["set", "data.train_batch_size=3"], "no key that a live run can change"),
        (["set", "actor.optim.lr=fast"], "lr=fast"),
        (["set", "actor.optim.lr=-1"], "lr=-1"),
        (["set", "trainer.test_freq=2.5"], "test_freq=2.5"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_told(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_command(words)


def test_foreign_and_half_written_lines_in_the_inbox_are_passed_over(tmp_path: Path) -> None:
    steering, shown = make_steering(tmp_path)
    tell(tmp_path, Command("validate"))
    lines = [
        "nonsense",
        "[]",
        json.dumps({"word": "rm -rf", "id": "1"}),
        json.dumps({"word": "set", "key": "trainer.default_local_dir", "value": "/etc", "id": "2"}),
        json.dumps({"word": "set", "key": LR, "value": "high", "id": "3"}),
        json.dumps({"word": "save", "id": "4", "unknown": 1}),
    ]
    with (tmp_path / "steering" / "inbox.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n" + '{"word": "st')
    trainer = make_trainer(1)
    steering.obey(trainer)
    assert [one["command"] for one in shown] == ["validate"]
    with (tmp_path / "steering" / "inbox.jsonl").open("a") as file:
        file.write('op", "id": "5"}\n')
    steering.obey(trainer)
    assert trainer.stop_requested
