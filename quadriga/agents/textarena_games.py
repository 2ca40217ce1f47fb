"""Games of TextArena for one player, as an environment (`pip install quadriga[textarena]`).

The agent is `quadriga.agents.textarena_games:TextArenaGame`. Games that need a word list of NLTK or another model want a network;
a game for more players is refused.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

from quadriga.agents.policy import Message
from quadriga.errors import ConfigError, DataError


class TextArenaGame:
    """One game: `reset(row)` begins it, `step(text)` makes a move.

    The row's `extra_info` holds `game` (a name of TextArena's registry, such as `GuessTheNumber-v0`), and `seed` (else its `index`).

    Args:
        game: for rows that name none.
        moves: of the policy; the game then ends without its reward.
    """

    def __init__(self, game: str | None = None, moves: int = 100) -> None:
        self._game, self._moves_left = game, moves
        self._env: Any = None

    def reset(self, row: dict[str, Any]) -> list[Message]:
        extra = row.get("extra_info") or {}
        game = extra.get("game") or self._game
        if not game:
            raise DataError("the row names no game of TextArena", "give it extra_info.game, such as GuessTheNumber-v0")
        # The game's own wrappers repeat all that was said before; here the conversation holds it.
        self._env = _make(str(game).removesuffix("-raw") + "-raw")
        seed = extra.get("seed", extra.get("index"))
        try:
            self._env.reset(num_players=1, seed=None if seed is None else int(seed))
        except AssertionError as problem:
            raise DataError(
                f"the game {game!r} is not for one player: {problem}", "choose a game for one player"
            ) from problem
        return [{"role": "user", "content": self._observation()}]

    def step(self, text: str) -> tuple[str, float, bool]:
        """What the game says, the reward of the game at its end, and whether it has ended."""
        self._moves_left -= 1
        done, _ = self._env.step(text)
        if not done:
            return self._observation(), 0.0, self._moves_left <= 0
        rewards, info = self._env.close()
        reason = (info or {}).get(0, {}).get("reason", "")
        return str(reason), float((rewards or {}).get(0, 0.0)), True

    def _observation(self) -> str:
        """What is new, without the policy's own moves, which are in the conversation."""
        _, said = self._env.get_observation()
        return "\n".join(text for sender, text, *_ in said if sender != 0)


def _make(name: str) -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(
            "games of TextArena need the package `textarena`", "pip install 'quadriga[textarena]'"
        ) from error
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a failed download is told below
            return textarena.make(name)
    except (LookupError, OSError) as problem:
        raise DataError(
            f"the game {name.removesuffix('-raw')!r} needs data that is not here: {str(problem).strip().splitlines()[0]}",
            "fetch it on a machine with a network, or choose another game",
        ) from problem
    except ValueError as problem:
        raise DataError(
            f"TextArena cannot make {name.removesuffix('-raw')!r}: {problem}", "choose another game"
        ) from problem
