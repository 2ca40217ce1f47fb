from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SFTConfig
from quadriga.errors import ConfigError
from quadriga.tracking.steering import Command, Steering, parse_command, tell

LR = "actor_rollout_ref.actor.optim.lr"


class Trainer:
    """Remembers what its workers were told; it has no critic."""

    def __init__(self, step: int, config: Any = None) -> None:
        self.step, self.config, self.stop_requested = step, config or steerable_config(), False
        self.told: list[tuple[str, Any]] = []

    def set_key(self, key: str, value: Any) -> str:
        if key.startswith("critic."):
            return "this run has no critic"
        self.told.append((key, value))
        return ""

    @property
    def lr(self) -> float:
        return self.config.actor_rollout_ref.actor.optim.lr


def steerable_config(lr: float = 1e-6, **actor: Any) -> Config:
    config = Config()
    config.trainer.steering = True
    config.actor_rollout_ref.actor.optim.lr = lr
    for name, value in actor.items():
        setattr(config.actor_rollout_ref.actor, name, value)
    return config


class Heard:
    """A run's steering, with what it showed and said."""

    def __init__(self, run: Path, config: Any = None, **options: Any) -> None:
        self.shown: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.steering = Steering(run, config or steerable_config(), self.shown.append, self.said.append, **options)

    def obeys(self, trainer: Trainer, *steps: int) -> None:
        for trainer.step in steps:
            self.steering.obey(trainer)


def steer(run: Path, told: dict[int, str], config: Any = None) -> None:
    """A run that is told to set `told[step]` in that step."""
    heard, trainer = Heard(run, config), Trainer(0, deepcopy(config))
    for step, text in told.items():
        tell(run, parse_command(["set", text]))
        heard.obeys(trainer, step)


def obeyed(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steering" / "obeyed.jsonl").read_text().splitlines()]


def test_commands_are_obeyed_once_at_the_end_of_a_step_and_recorded(tmp_path: Path) -> None:
    heard, trainer = Heard(tmp_path), Trainer(7)
    tell(tmp_path, parse_command(["set", "actor.optim.lr=5e-4"]))
    tell(tmp_path, parse_command(["save"]))
    heard.obeys(trainer, 7)
    assert trainer.lr == 5e-4
    assert trainer.told == [(LR, 5e-4)]
    assert heard.steering.takes("save")
    assert not heard.steering.takes("save")
    assert not heard.steering.takes("validate")
    heard.obeys(trainer, 8)
    assert len(trainer.told) == 1
    assert [(one["step"], one["command"]) for one in heard.shown] == [(7, f"set {LR}=0.0005"), (7, "save")]
    assert [(line["step"], line["started_with"]) for line in obeyed(tmp_path)] == [(7, 1e-6), (7, None)]


def test_stop_ends_the_run_after_the_step(tmp_path: Path) -> None:
    heard, trainer = Heard(tmp_path), Trainer(3)
    tell(tmp_path, Command("stop"))
    heard.obeys(trainer, 3)
    assert trainer.stop_requested


def test_a_resumed_run_sets_the_same_again_at_the_same_steps(tmp_path: Path) -> None:
    steer(tmp_path, {5: "actor.optim.lr=5e-4", 9: "actor.optim.lr=1e-4"})
    tell(tmp_path, Command("stop"))
    Heard(tmp_path).obeys(Trainer(9), 9)

    again, trainer = Heard(tmp_path), Trainer(6)
    again.steering.go_on_after(trainer)
    assert trainer.told == [(LR, 5e-4)]
    assert again.said == [f"{LR}=0.0005, as told after step 5"]
    for step in (7, 8, 9, 10):
        again.obeys(trainer, step)
        assert trainer.lr == (5e-4 if step < 9 else 1e-4)
    assert not trainer.stop_requested, "the stop has had its effect: that is why the run was resumed"
    assert again.shown == [], "what comes again is not told again"


def test_what_was_told_holds_though_the_resumed_run_may_be_told_nothing_more(tmp_path: Path) -> None:
    steer(tmp_path, {5: "actor.optim.lr=5e-4", 8: "actor.optim.lr=1e-4"})
    deaf = steerable_config()
    deaf.trainer.steering = False
    again, trainer = Heard(tmp_path, deaf), Trainer(6)
    again.steering.go_on_after(trainer)
    assert trainer.lr == 5e-4
    tell(tmp_path, Command("stop"))
    again.obeys(trainer, 7, 8)
    assert trainer.lr == 1e-4
    assert not trainer.stop_requested


def test_a_value_that_the_resuming_command_changes_wins_over_what_was_told(tmp_path: Path) -> None:
    steer(tmp_path, {5: "actor.optim.lr=5e-4", 9: "actor.optim.lr=1e-4"})
    given = steerable_config(lr=1e-5)
    again, trainer = Heard(tmp_path, given), Trainer(6, deepcopy(given))
    again.steering.go_on_after(trainer)
    again.obeys(trainer, 7, 8, 9, 10)
    assert trainer.lr == 1e-5
    assert again.said == [f"{LR}=1e-05 as given now; 0.0001, told after step 9, no longer holds"]
    assert [one["command"] for one in again.shown] == [f"resumed with {LR}=1e-05"]

    # Resumed once more with the same command: nothing is new, and what was told since holds.
    tell(tmp_path, parse_command(["set", "actor.optim.lr=2e-5"]))
    again.obeys(trainer, 11)
    third, trainer = Heard(tmp_path, given), Trainer(10, deepcopy(given))
    third.steering.go_on_after(trainer)
    assert third.shown == []
    assert trainer.lr == 1e-5
    third.obeys(trainer, 11)
    assert trainer.lr == 2e-5

    # Resumed at a step before it was given, with the first command: the run goes the way that it first went.
    first, trainer = Heard(tmp_path), Trainer(5)
    first.steering.go_on_after(trainer)
    assert trainer.lr == 5e-4


def test_new_workers_after_a_value_was_given_anew_go_on_with_that(tmp_path: Path) -> None:
    """The same process reads its own record again when workers have died."""
    steer(tmp_path, {5: "actor.optim.lr=5e-4", 9: "actor.optim.lr=1e-4"})
    given = steerable_config(lr=1e-5)
    Heard(tmp_path, given).steering.go_on_after(Trainer(6, deepcopy(given)))
    restarted, trainer = Heard(tmp_path, given), Trainer(7, deepcopy(given))
    restarted.steering.go_on_after(trainer)
    restarted.obeys(trainer, 8, 9, 10)
    assert trainer.lr == 1e-5
    assert restarted.shown == []


def test_what_a_dead_run_did_not_hear_does_not_stop_the_resumed_one(tmp_path: Path) -> None:
    tell(tmp_path, Command("stop"))
    heard, trainer = Heard(tmp_path, since=time.time() + 1), Trainer(3)
    heard.obeys(trainer, 3)
    assert not trainer.stop_requested
    assert heard.shown[0]["result"] == "not done: told before the run was started or resumed"
    again, trainer = Heard(tmp_path), Trainer(2)
    again.steering.go_on_after(trainer)
    again.obeys(trainer, 3)
    assert not trainer.stop_requested, "what was not done is not done again"


def test_without_the_key_a_run_hears_nothing(tmp_path: Path) -> None:
    heard, trainer = Heard(tmp_path, Config()), Trainer(1)
    tell(tmp_path, Command("stop"))
    heard.obeys(trainer, 1)
    assert not trainer.stop_requested
    assert heard.shown == []


def test_a_key_of_a_role_that_the_run_lacks_is_answered_not_obeyed(tmp_path: Path) -> None:
    config = steerable_config()
    config.algorithm.adv_estimator = "gae"
    heard = Heard(tmp_path, config)
    tell(tmp_path, parse_command(["set", "critic.optim.lr=1e-6"]))
    heard.obeys(Trainer(1, config), 1)
    assert heard.shown[0]["result"] == "not done: this run has no critic"


@pytest.mark.parametrize(
    ("text", "actor", "why"),
    [
        ("actor.kl_loss_coef=0.5", {"use_kl_loss": False}, "use_kl_loss=False"),
        ("actor.clip_ratio=0.3", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, "clip_ratio_high=0.28"),
        ("critic.optim.lr=1e-3", {}, "there is no critic in this run"),
    ],
)
def test_a_key_that_would_change_nothing_is_answered_not_set(
    tmp_path: Path, text: str, actor: dict[str, Any], why: str
) -> None:
    config = steerable_config(**actor)
    config.algorithm.adv_estimator = "grpo"
    before = deepcopy(config)
    heard, trainer = Heard(tmp_path, config), Trainer(1, config)
    tell(tmp_path, parse_command(["set", text]))
    heard.obeys(trainer, 1)
    assert heard.shown[0]["result"].startswith("not done: it has no effect")
    assert why in heard.shown[0]["result"]
    assert config == before
    assert trainer.told == []


def test_the_keys_of_a_supervised_run_are_its_own(tmp_path: Path) -> None:
    config = SFTConfig()
    config.trainer.steering = True
    heard, trainer = Heard(tmp_path, config), Trainer(1, config)
    tell(tmp_path, parse_command(["set", "optim.lr=0.25"], SFTConfig))
    heard.obeys(trainer, 1)
    assert config.optim.lr == 0.25
    assert trainer.told == [("optim.lr", 0.25)]
    with pytest.raises(ConfigError, match="no key that a live run can change"):
        parse_command(["set", "actor.clip_ratio=0.1"], SFTConfig)


def test_other_processes_do_what_the_one_that_reads_was_told(tmp_path: Path) -> None:
    box: list[list[Command]] = []

    def put(commands: list[Command]) -> list[Command]:
        box.append(commands)
        return commands

    heard, other = Heard(tmp_path, share=put), Heard.__new__(Heard)
    other.shown, other.said = [], []
    other.steering = Steering(
        None, steerable_config(), other.shown.append, other.said.append, share=lambda _: box.pop()
    )
    tell(tmp_path, parse_command(["set", "actor.optim.lr=5e-4"]))
    first, second = Trainer(1), Trainer(1)
    heard.obeys(first, 1)
    other.obeys(second, 1)
    assert first.lr == second.lr == 5e-4
    assert other.shown == []
    assert len(obeyed(tmp_path)) == 1


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
    heard = Heard(tmp_path)
    tell(tmp_path, Command("validate"))
    lines = [
        "nonsense",
        "[]",
        json.dumps({"word": "rm -rf", "id": "1"}),
        json.dumps({"word": "set", "key": "trainer.default_local_dir", "value": "/etc", "id": "2"}),
        json.dumps({"word": "set", "key": LR, "value": "high", "id": "3"}),
        json.dumps({"word": "save", "id": "4", "unknown": 1}),
        json.dumps({"word": "save", "id": ["5"]}),
        json.dumps({"word": "save", "id": "6", "time": "now"}),
        json.dumps({"word": "given", "key": LR, "value": 1.0, "id": "7"}),
        "[" * 100_000,
    ]
    with (tmp_path / "steering" / "inbox.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n" + '{"word": "st')
    trainer = Trainer(1)
    heard.obeys(trainer, 1)
    assert [one["command"] for one in heard.shown] == ["validate"]
    with (tmp_path / "steering" / "inbox.jsonl").open("a") as file:
        file.write('op", "id": "8"}\n')
    heard.obeys(trainer, 2)
    assert trainer.stop_requested
