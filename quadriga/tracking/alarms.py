"""Cheap detectors of the ways in which training goes wrong: each looks at the newest lines of metrics.jsonl.

An alarm is a function of those lines alone, so that a resumed run raises the same alarms at the same steps. While it holds,
the step's metrics have `alarm/<name>`; when it begins to hold, an event tells what was seen and where to look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from quadriga.tracking.metric_names import format_value

WINDOW = 60
"""Steps that the detectors look back."""
RECENT = 5
"""Steps whose mean counts as what is now: one odd batch raises no alarm."""
VALIDATIONS = 8
"""Of these, the newest so many are looked at."""
_FEWEST_BEFORE = 10
_RISES = 3


@dataclass(frozen=True)
class Alarm:
    """What a detector saw.

    Attributes:
        name: of the detector.
        text: what was seen, in numbers.
        look: where to look, and what usually helps.
    """

    name: str
    text: str
    look: str


class Course:
    """The newest values of the metrics, as the detectors ask for them."""

    def __init__(self, lines: Iterable[Mapping[str, float | None]], held_out: Sequence[float] = ()) -> None:
        self._lines = list(lines)
        self.held_out = held_out
        """The loss of the newest validations, which may be further apart than the steps that are looked at."""

    def newest(self, name: str) -> float | None:
        return self._lines[-1].get(name) if self._lines else None

    def now(self, name: str, steps: int = RECENT) -> float | None:
        """Mean over the newest steps; None unless all of them have the metric."""
        values = [line.get(name) for line in self._lines[-steps:]]
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == steps else None

    def before(self, name: str) -> float | None:
        """Median of the steps before the newest ones; None while there are too few."""
        known = [v for line in self._lines[:-RECENT] if (v := line.get(name)) is not None]
        return median(known) if len(known) >= _FEWEST_BEFORE else None

    def both(self, name: str) -> tuple[float, float] | None:
        """`before` and `now`, if both are known."""
        before, now = self.before(name), self.now(name)
        return None if before is None or now is None else (before, now)

    def lost(self) -> list[str]:
        """Metrics whose newest value was not a finite number."""
        return [name for name, value in self._lines[-1].items() if value is None] if self._lines else []


Detector = Callable[[Course], tuple[str, str] | None]
DETECTORS: dict[str, Detector] = {}
"""Name → detector, which returns what it saw and where to look, or None."""


def detector(function: Detector) -> Detector:
    DETECTORS[function.__name__] = function
    return function


@detector
def length_collapse(course: Course) -> tuple[str, str] | None:
    lengths = course.both("response_length/mean")
    if lengths and lengths[0] >= 8 and lengths[1] < 0.4 * lengths[0]:
        return (
            f"responses have shrunk from {lengths[0]:.0f} to {lengths[1]:.0f} tokens",
            "Look at samples: does the reward pay for short answers, or is the KL or entropy term too weak?",
        )
    return None


@detector
def length_explosion(course: Course) -> tuple[str, str] | None:
    lengths, cut = course.both("response_length/mean"), course.both("response_length/clip_ratio")
    if lengths and lengths[0] >= 8 and lengths[1] > 3 * lengths[0]:
        seen = f"responses have grown from {lengths[0]:.0f} to {lengths[1]:.0f} tokens"
    elif cut and cut[1] > 0.3 and cut[1] > cut[0] + 0.2:
        seen = f"{cut[1]:.0%} of the responses are cut off at the length limit, {cut[0]:.0%} before"
    else:
        return None
    return seen, "Look at samples: does the text end in a loop? Raise data.max_response_length only if it does not."


@detector
def repetition(course: Course) -> tuple[str, str] | None:
    now = course.now("response/repetitive")
    if now is not None and now > 0.2:
        return (
            f"{now:.0%} of the responses end in a loop",
            "Look at samples, filter 'cut off': lower the learning rate or the temperature, or penalise repetition.",
        )
    return None


@detector
def entropy_cliff(course: Course) -> tuple[str, str] | None:
    entropies = course.both("actor/entropy")
    solved = (course.now("reward/correct") or 0.0) > 0.9
    if entropies and entropies[0] > 0.05 and entropies[1] < 0.15 * entropies[0] and not solved:
        return (
            f"entropy has fallen from {entropies[0]:.3f} to {entropies[1]:.3f} nats per token",
            "Look at actor/entropy: raise clip_ratio_high or entropy_coeff, or lower the learning rate.",
        )
    return None


@detector
def reward_follows_length(course: Course) -> tuple[str, str] | None:
    now, lengths = course.now("reward/length_correlation"), course.both("response_length/mean")
    if now is not None and lengths and now > 0.6 and lengths[1] > 1.3 * lengths[0]:
        return (
            f"score and length of a response correlate by {now:.2f}, and responses have grown by {lengths[1] / lengths[0] - 1:.0%}",
            "Look at the longest samples: is the reward paid for length?",
        )
    return None


@detector
def equal_groups(course: Course) -> tuple[str, str] | None:
    now, correct = course.now("reward/equal_groups"), course.now("reward/correct")
    if now is not None and now > 0.9 and not (correct is not None and correct > 0.9):
        return (
            f"in {now:.0%} of the groups all responses score the same: there is next to nothing to learn from",
            "Use prompts that the policy solves sometimes, a finer reward, more samples, or algorithm.filter_groups.",
        )
    return None


@detector
def gap_drift(course: Course) -> tuple[str, str] | None:
    name = "rollout/logprob_diff_mean"
    now, before = course.now(name), course.before(name)
    if now is not None and (now > 0.1 or (before is not None and now > 0.01 and now > 10 * before)):
        return (
            f"rollout and trainer disagree by {format_value(name, now)} nats per token"
            + (f", {format_value(name, before)} before" if before is not None else ""),
            "Look at samples coloured by gap: correct it with algorithm.rollout_correction, or use the same dtype on both sides.",
        )
    return None


@detector
def kl_run_away(course: Course) -> tuple[str, str] | None:
    moved, behind = course.now("actor/ppo_kl"), course.now("rollout_corr/kl")
    fix = "Lower the learning rate, take fewer ppo_epochs, or raise kl_loss_coef (kl_ctrl.kl_coef where the KL is in the reward)."
    if moved is not None and abs(moved) > 0.2:
        return f"one step moves the policy by {moved:.3f} nats per token", fix
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        away = course.both(name)
        if away and away[1] > 0.5 and away[1] > 5 * away[0]:
            return f"KL to the reference has grown from {away[0]:.3f} to {away[1]:.3f} nats per token ({name})", fix
    if behind is not None and abs(behind) > 0.2:
        return f"the policy is {behind:.3f} nats per token away from what generated the rows (rollout_corr/kl)", fix
    return None


@detector
def clip_share(course: Course) -> tuple[str, str] | None:
    now = course.now("actor/pg_clipfrac")
    if now is not None and now > 0.3:
        return (
            f"{now:.0%} of the tokens are clipped",
            "Most of what a step could learn is thrown away: lower the learning rate, or take fewer mini-batches and epochs.",
        )
    return None


@detector
def not_finite(course: Course) -> tuple[str, str] | None:
    for name in ("actor/skipped", "critic/skipped", "train/skipped"):
        if course.newest(name):
            return (
                f"updates were left out because their gradient was not finite ({name} {course.newest(name):.0%})",
                "Look at dumps/ in the run directory: the rows that caused it. Lower the learning rate.",
            )
    if lost := course.lost():
        return f"not a finite number: {', '.join(lost[:4])}", "Look at the steps before in the curves."
    return None


@detector
def scoring_fails(course: Course) -> tuple[str, str] | None:
    errors, timeouts = course.now("reward/errors") or 0.0, course.now("reward/timeouts") or 0.0
    if errors + timeouts > 0.1:
        return (
            f"scoring crashed on {errors:.0%} of the rows and ran out of time on {timeouts:.0%}",
            "Look at samples, filters 'crashed' and 'timed out': the error is with the sample.",
        )
    return None


@detector
def loss_jumps(course: Course) -> tuple[str, str] | None:
    losses = course.both("train/loss")
    if losses and losses[1] > 2 * losses[0] and losses[1] > losses[0] + 0.3:
        return (
            f"the training loss has jumped from {losses[0]:.3f} to {losses[1]:.3f}",
            "Look at train/grad_norm and at the rows of these steps: lower the learning rate, or warm up for longer.",
        )
    return None


@detector
def held_out_rises(course: Course) -> tuple[str, str] | None:
    values = course.held_out
    last = values[-_RISES - 1 :]
    if len(last) > _RISES and all(a < b for a, b in pairwise(last)) and last[-1] > 1.02 * min(values):
        return (
            f"the held-out loss has risen {_RISES} validations in a row, from {last[0]:.3f} to {last[-1]:.3f}",
            "The model learns its training rows by heart: stop here, take fewer epochs, or use more data.",
        )
    return None


@detector
def preferences_lost(course: Course) -> tuple[str, str] | None:
    right, margin = course.both("train/accuracy"), course.both("train/margin")
    if right and right[0] > 0.6 and right[1] < right[0] - 0.2:
        seen = f"the chosen answer is preferred in {right[1]:.0%} of the pairs, {right[0]:.0%} before"
    elif margin and margin[0] > 0 > margin[1]:
        seen = f"the margin between chosen and rejected has fallen from {margin[0]:.3f} to {margin[1]:.3f}"
    else:
        return None
    return (
        seen,
        "Look at the newest pairs: are some of them the wrong way round? Lower the learning rate, or raise dpo.beta.",
    )


class Alarms:
    """Applies the detectors to one step after the other.

    Args:
        lines: what metrics.jsonl holds already, in order.
    """

    def __init__(self, lines: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._lines: deque[Mapping[str, float | None]] = deque(maxlen=WINDOW)
        self._held_out: deque[float] = deque(maxlen=VALIDATIONS)
        for line in lines:
            if line["step"]:
                self._lines.append(line)
                self._note_validation(line)
        self.raised: list[Alarm] = []
        """Those that the newest step raised and the step before it had not."""

    def metrics_of(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """`alarm/<name>` of those that hold at this step; empty where all is well."""
        self.raised = []
        if step == 0:
            return {}
        before = self._lines[-1] if self._lines else {}
        self._note_validation(metrics)
        course = Course([*self._lines, metrics], tuple(self._held_out))
        holding: dict[str, float | None] = {}
        for name, detect in DETECTORS.items():
            if seen := detect(course):
                holding[f"alarm/{name}"] = 1.0
                if not before.get(f"alarm/{name}"):
                    self.raised.append(Alarm(name, *seen))
        self._lines.append({**metrics, **holding})
        return holding

    def _note_validation(self, line: Mapping[str, float | None]) -> None:
        if (loss := line.get("val/loss")) is not None:
            self._held_out.append(loss)
