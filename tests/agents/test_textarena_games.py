"""Games of TextArena through the interface of environments."""

from __future__ import annotations

from typing import Any

import pytest

from quadriga.agents.textarena_games import TextArenaGame
from quadriga.errors import DataError

textarena = pytest.importorskip("textarena", reason="needs the extra quadriga[textarena]")


def row(game: str, seed: int = 3) -> dict[str, Any]:
    return {"extra_info": {"game": game, "seed": seed}}


def play_by_halves(seed: int) -> tuple[list[str], float]:
    game, low, high, said, reward, done = TextArenaGame(), 1, 20, [], 0.0, False
    assert "between 1 and 20" in game.reset(row("GuessTheNumber-v0", seed))[0]["content"]
    while not done:
        guess = (low + high) // 2
        observation, reward, done = game.step(f"I guess [{guess}].")
        said.append(observation)
        assert "I guess" not in observation  # its own move is in the conversation already
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
    return said, reward


def test_a_game_is_played_to_its_end_and_won():
    said, reward = play_by_halves(3)
    assert reward == 1.0
    assert len(said) <= 5
    assert play_by_halves(3) == (said, reward)


def test_wrong_moves_are_told_and_lose():
    game = TextArenaGame("TowerOfHanoi-v0")
    game.reset({"extra_info": {"index": 0}})
    observation, reward, done = game.step("nothing")
    assert (reward, done) == (0.0, False)
    assert "invalid move" in observation
    observation, reward, done = game.step("nothing")
    assert done
    assert reward <= 0.0
    assert "Invalid Move" in observation


def test_a_game_has_so_many_moves():
    game = TextArenaGame("GuessTheNumber-v0", moves=1)
    game.reset({})
    assert game.step("[1]")[2] is True


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("TicTacToe-v0", "not for one player"),
        ("NoSuchGame-v0", "cannot make 'NoSuchGame-v0'"),
        (None, "names no game"),
    ],
)
def test_a_game_that_cannot_be_played_is_named(name, what):
    with pytest.raises(DataError, match=what):
        TextArenaGame().reset({"extra_info": {"game": name}})
