"""The user's terminal while a run goes on elsewhere: ask the runner for news, show it, until it is done."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from quadriga.config.run_name import is_new
from quadriga.config.schema import Config
from quadriga.errors import WorkerError

POLL_S = 0.3
STOP_GRACE_S, SCHEDULER_GRACE_S = 10.0, 20.0
"""For the step at hand and its checkpoint, after a Ctrl-C and after a scheduler's SIGTERM, which SIGKILL follows in 30 s."""
PULSE_S, GONE_S = 2.0, 25.0
"""The head of the cluster is looked for so often. Some clusters restart theirs; Ray ends this process after 60 s without it."""


class ClusterGone(WorkerError):
    """Ray itself has died: nothing can be asked of it any more."""


class Pulse:
    """Whether the head of the cluster still listens.

    Args:
        address: host and port of Ray's GCS.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._name = (host.strip("[]"), int(port)), address
        self._heard = time.monotonic()
        self._next = 0.0

    def require(self) -> None:
        """ClusterGone if it has not answered for `GONE_S`. Costs nothing but every `PULSE_S`."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PULSE_S
        try:
            socket.create_connection(self._address, timeout=1.0).close()
            self._heard = now
        except OSError as error:
            if now - self._heard > GONE_S:
                raise ClusterGone(
                    f"the head of the Ray cluster (GCS, {self._name}) is gone: {error.strerror or error}", SAME_COMMAND
                ) from None


SAME_COMMAND = (
    "run the same command again: it goes on after the last checkpoint. Why Ray died may be in its logs and in `dmesg`"
)


def watch(runner: Any, running: Any, config: Config) -> bool:
    """Wait for `running`, the call of `runner.run`, and tell the run's news meanwhile; raises what it raised.

    Ctrl-C, or a signal that means the same, lets the step at hand end within some seconds and be kept; what was
    kept, and the command that goes on from there, is said. A user's own runner may lack `news` and `stop`.

    Returns:
        whether anything was done; False for a run that had ended before.
    """
    import ray

    from quadriga.tracking.console import LiveView

    cursor = 0
    done: list[Any] = []
    pulse = Pulse(ray.get_runtime_context().gcs_address)
    show = "console" in config.trainer.logger and hasattr(runner, "news")
    with signals_like_ctrl_c() as came, LiveView() if show else nullcontext() as view:
        try:
            while not done:
                done, _ = ray.wait([running], timeout=POLL_S)
                pulse.require()
                if view is None:
                    continue
                with suppress(ray.exceptions.RayError):  # busy or gone: what it has to say comes with the result
                    events, cursor = ray.get(runner.news.remote(cursor), timeout=10)
                    view.update(events)
        except KeyboardInterrupt:
            if hasattr(runner, "stop"):
                grace_s = SCHEDULER_GRACE_S if came else STOP_GRACE_S
                print(
                    f"stopping: a checkpoint is written if this step ends within {grace_s:g} s; Ctrl-C again: not even that",
                    file=sys.stderr,
                )
                runner.stop.remote()
                with suppress(KeyboardInterrupt):
                    ray.wait([running], timeout=grace_s)
            print(how_to_go_on(config), file=sys.stderr)
            raise
    return ray.get(running) is not False


def how_to_go_on(config: Any) -> str:
    """After an interruption: the newest checkpoint of the run, and the command that goes on after it."""
    from quadriga.checkpoint.store import CheckpointStore

    folder = Path(config.trainer.default_local_dir).expanduser()
    newest = CheckpointStore(folder / "checkpoints").checkpoints()[:1]
    if not newest:
        often = "" if config.trainer.save_freq > 0 else "; trainer.save_freq=N writes one every N steps"
        return f"no checkpoint was written yet{often}. {folder} has what was recorded"
    command = command_line()
    needs = {"trainer.experiment_name": config.trainer.experiment_name, "trainer.resume_mode": "auto"}
    if config.trainer.resume_mode == "auto":
        del needs["trainer.resume_mode"]
    given = [f"{key}={value}" for key, value in needs.items() if f"{key}={value}" not in command]
    again = shlex.join([*command, *given]) if command else f"the same program with {' '.join(given)}"
    return f"the checkpoint of step {newest[0].step} is {newest[0].path}\ngo on from there with: {again}"


def command_line() -> list[str]:
    """The command of this process as its user wrote it; empty where it is a program of the user's own."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    words = sys.orig_argv[1:]
    if module is not None and module.name.startswith("quadriga."):
        place = next((k for k, word in enumerate(words) if word == "-m" or word.startswith("-m")), None)
        return [] if place is None else ["python", *words[place:]]
    place = next((k for k, word in enumerate(words) if Path(word).name == "quadriga"), None)
    return [] if place is None else ["quadriga", *words[place + 1 :]]


def say_new_name(given: Any, config: Config) -> None:
    """Say what a run is called that its user gave no name: the next one will have another."""
    if "console" in config.trainer.logger and not isinstance(given, Config) and is_new(given):
        print(
            f"a new run in {config.trainer.default_local_dir}; the same command starts another one. "
            "With trainer.experiment_name=NAME it goes on where it was",
            flush=True,
        )


@contextmanager
def signals_like_ctrl_c() -> Iterator[list[int]]:
    """SIGTERM, as schedulers and `timeout` send it, and SIGHUP of a closed terminal are a Ctrl-C; all that follow the first are
    passed over: a scheduler that means it ends with SIGKILL.

    Yields:
        a list that holds the first of them, once it has come.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def interrupt(number: int, frame: Any) -> None:
        came.append(number)
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_here(runner: Any, config: Any, checked: Config) -> bool:
    """The same for a runner in this process: its news are shown as they come."""
    from quadriga.tracking.console import LiveView
    from quadriga.tracking.events import EventLog

    with signals_like_ctrl_c(), LiveView(live=False) as view:  # lines, not a panel: a debugger shares this terminal
        runner.events = EventLog(listener=lambda event: view.update([event]))
        try:
            return runner.run(config) is not False
        except KeyboardInterrupt:
            print(how_to_go_on(checked), file=sys.stderr)
            raise


def conclude(config: Config) -> None:
    """The summary of a finished run: figures, curve, answers before and after, and where the model lies."""
    from quadriga.checkpoint.store import CheckpointStore
    from quadriga.tracking.run_directory import RunDirectory
    from quadriga.tracking.summary import report

    folder = Path(config.trainer.default_local_dir)
    if not (folder / "metrics.jsonl").exists():
        return  # it was written on another machine, or by a runner that keeps no journal
    newest = CheckpointStore(folder / "checkpoints").checkpoints()[:1]
    report(RunDirectory(folder), newest[0].path / "huggingface" if newest else None)
