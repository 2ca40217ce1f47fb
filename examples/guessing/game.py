"""Guess a digit: the answer is `+` if it is larger, `-` if it is smaller."""

from __future__ import annotations


class Guess:
    """Ten guesses at most. A game is worth 1 less what the guesses cost."""

    def __init__(self, most_turns: int = 10) -> None:
        self.most_turns = most_turns

    def reset(self, row):
        self.secret, self.turns = row["extra_info"]["secret"], 0
        return "="

    def step(self, text):
        self.turns += 1
        found = text == str(self.secret)
        hint = "#" if not text.isdigit() else "+" if int(text) < self.secret else "-"
        reward = (1.0 if found else 0.0) - 1 / self.most_turns
        return hint, reward, found or self.turns == self.most_turns
