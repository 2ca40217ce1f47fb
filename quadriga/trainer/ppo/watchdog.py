"""A run that hangs says so, and is ended: each phase has deadlines that follow from how long it usually takes."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from quadriga.config.schema import WatchdogConfig
from quadriga.tracking.figures import in_words
from quadriga.tracking.phases import Phase, Phases

KNOWN_AFTER = 3
"""A phase must have ended so often before its hard deadline counts: the first times compile, load and warm up."""

SHOWN_SAMPLES = 8
LAST_GRACE_S = 20.0
"""When its workers are gone, the driver gets so long to notice; if it hangs itself, its process is ended."""
ANSWER_S = 60.0
"""Workers, and what the driver knows of them, are asked for so long: it may hang with a lock that the answer needs."""


class Watchdog:
    """Looks at the running phases about once a second, in a thread of its own. Use it as a context manager.

    Past the soft deadline of a phase it warns: which phase, who is busy, which samples are missing; and it writes the Python
    stacks of the driver and of all workers into a file. Past the hard one it does so again and stops the workers, which
    ends the phase with a `WorkersDied`.

    Args:
        config: the deadlines.
        crew: offers `busy`, `stacks` and `abandon`.
        pending_samples: what the phase `gen` or `reward` still waits for: samples, or those that have no score.
        folder: for the stacks.
        warn: shows a text to the user.
        end_process: what to do if the driver itself does not come back within `last_grace_s`.
        answer_s: how long it waits for an answer of `crew` and `pending_samples`.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        phases: Phases,
        crew: Any,
        pending_samples: Callable[[str], list[str]],
        folder: Path,
        warn: Callable[[str], None],
        end_process: Callable[[int], Any] = os._exit,
        last_grace_s: float = LAST_GRACE_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._config, self._phases, self._crew, self._pending_samples = config, phases, crew, pending_samples
        self._folder, self._warn, self._end_process, self._last_grace_s = folder, warn, end_process, last_grace_s
        self._answer_s = answer_s
        # The phases themselves: an `id` comes again when its object is gone.
        self._already_told: set[tuple[Phase, str]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def deadlines(self, path: str) -> tuple[float | None, float | None]:
        """Soft and hard deadline in seconds of the phase at `path`; None: there is none (yet)."""
        config, history = self._config, self._phases.history(path)
        soft = hard = None
        if config.soft_s is not None:
            soft = max(config.soft_s, config.soft_factor * median(history or [config.soft_s]))
        if config.hard_s is not None and len(history) >= KNOWN_AFTER:
            hard = max(config.hard_s, config.hard_factor * median(history))
        return soft, hard

    def _watch(self) -> None:
        shortest = min(s for s in (self._config.soft_s, self._config.hard_s, 4.0) if s is not None)
        while not self._over.wait(shortest / 4):
            for phase in reversed(self._phases.open_phases()):  # the innermost that is late is the one to tell of
                soft, hard = self.deadlines(phase.path)
                if hard is not None and phase.seconds > hard:
                    self._tell(phase, "hard")
                    break
                if soft is not None and phase.seconds > soft:
                    self._tell(phase, "soft")
                    break

    def _tell(self, phase: Phase, deadline: str) -> None:
        if (phase, deadline) in self._already_told:
            return
        self._already_told.add((phase, deadline))
        report = self.report(phase)
        if deadline == "soft":
            self._warn(report)
            return
        report += "\nthe workers that it waits for are stopped: trainer.watchdog.hard_s has passed"
        self._warn(report)
        try:
            _within(self._answer_s, lambda: self._crew.abandon(report, phase.name))
        except Exception as problem:  # this thread must live: it is the only one that still looks
            self._warn(f"the workers could not be stopped: {type(problem).__name__}: {problem}")
        if not self._over.wait(self._last_grace_s) and phase in self._phases.open_phases():
            self._warn(
                "the driver itself hangs, so its process ends; the same command goes on after the last checkpoint"
            )
            self._over.wait(2.0)  # the warning reaches the terminal
            self._end_process(70)

    def report(self, phase: Phase) -> str:
        """What is known about a phase that takes too long. The stacks are in a file, which it names."""
        history = self._phases.history(phase.path)
        usual = f", usually {in_words(median(history))}" if history else ""
        lines = [f"step {phase.step}: {phase.path} has been running for {in_words(phase.seconds)}{usual}"]
        awaited = {"gen": "the samples", "reward": "the scores of the samples"}.get(phase.name)
        missing = [] if awaited is None else self._told(lambda: self._pending_samples(phase.name), "samples")
        busy = self._told(self._crew.busy, "busy workers")
        lines += [f"  {one}" for one in busy] or ["  no worker is busy: it is the driver that works or waits"]
        if missing:
            more = f", … {len(missing) - SHOWN_SAMPLES} more" if len(missing) > SHOWN_SAMPLES else ""
            lines.append(f"  waits for {awaited} {', '.join(missing[:SHOWN_SAMPLES])}{more}")
        stacks = [
            f"driver, pid {os.getpid()}\n{_own_stacks()}",
            *self._told(self._crew.stacks, "stacks of the workers"),
        ]
        file = self._folder / f"step_{phase.step:08d}_{phase.name}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as out:
                out.write("\n".join(lines) + "\n\n" + "\n\n".join(stacks) + "\n\n")
            lines.append(f"  stacks of all processes: {file}")
        except OSError as problem:  # a full disk may be why the run hangs
            lines.append(f"  the stacks cannot be written to {file}: {problem.strerror or problem}")
        return "\n".join(lines)

    def _told(self, ask: Callable[[], list[str]], what: str) -> list[str]:
        """What is answered. Workers that are being made or are gone, and locks that the hanging driver holds, must not stop the
        thread that watches over them."""
        try:
            return _within(self._answer_s, ask)
        except Exception as problem:
            return [f"{what}: not known ({type(problem).__name__}: {problem})"]


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; TimeoutError if it does neither in time."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as problem:
            answer.set_exception(problem)

    threading.Thread(target=run, name="watchdog asks", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer for {seconds:g} s") from None


def _own_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
