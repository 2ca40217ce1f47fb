"""The weight of the entropy bonus, as it moves from step to step."""

from __future__ import annotations

import math
from typing import Any

from quadriga.errors import CheckpointError, ConfigError, DataError


class EntropyController:
    """`actor.entropy_coeff` as it is, or adapted (Skywork-OR1, He et al. 2025, arXiv 2505.22312).

    Adaptive: after each step the weight moves up by `step_size` while the policy's entropy H is at most `target`, else down,
    within [0, `max_coeff`]; it counts only while H was at most `target` in the step before. Its state is checkpointed.
    """

    def __init__(
        self,
        coeff: float,
        adaptive: bool = False,
        target: float = 0.2,
        step_size: float = 0.005,
        max_coeff: float = 1.0,
    ) -> None:
        if adaptive and not 0 <= coeff <= max_coeff:
            raise ConfigError(
                f"actor_rollout_ref.actor.entropy_coeff={coeff} is outside [0, {max_coeff}], in which it may move.",
                "start it at 0, or raise actor.adaptive_entropy.max_coeff",
            )
        self.coeff, self.adaptive = coeff, adaptive
        self.target, self.step_size, self.max_coeff = target, step_size, max_coeff
        self.low = False
        """Whether the last step's entropy was at most the target."""

    @property
    def value(self) -> float:
        """The weight in the next step's loss."""
        return self.coeff if self.low or not self.adaptive else 0.0

    def update(self, entropy: float) -> None:
        """Take note of a step's entropy, the mean over all of its tokens."""
        if not self.adaptive:
            return
        if not math.isfinite(entropy):
            raise DataError(f"The policy's entropy is {entropy}.", "look for non-finite log-probs in this step")
        self.low = entropy <= self.target
        moved = self.coeff + (self.step_size if self.low else -self.step_size)
        self.coeff = min(max(moved, 0.0), self.max_coeff)

    def state_dict(self) -> dict[str, Any]:
        return {"adaptive": self.adaptive, "coeff": self.coeff, "low": self.low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where an adaptive one was; a fixed weight is the configuration's."""
        if bool(state.get("adaptive")) != self.adaptive:
            raise CheckpointError(
                f"The checkpoint's entropy bonus is {'adaptive' if state.get('adaptive') else 'fixed'}, the configured one "
                f"is {'adaptive' if self.adaptive else 'fixed'}.",
                "set actor_rollout_ref.actor.adaptive_entropy.enable as in the run that wrote the checkpoint",
            )
        if self.adaptive:
            self.coeff, self.low = float(state["coeff"]), bool(state["low"])
