"""The user's terminal while a run goes on elsewhere: ask the runner for news, show it, until it is done."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from quadriga.config.schema import Config

POLL_S = 0.3
STOP_GRACE_S = 3.0


def watch(runner: Any, running: Any, show: bool = True) -> None:
    """Wait for `running`, the call of `runner.run`, and with `show` tell the run's news meanwhile; raises what it raised.

    Ctrl-C, or SIGTERM as cluster schedulers send it, lets the step at hand end within a few seconds and be kept.
    A user's own runner may lack `news` and `stop`.
    """
    import ray

    from quadriga.tracking.console import LiveView

    cursor = 0
    done: list[Any] = []
    with _sigterm_like_ctrl_c(), LiveView() if show and hasattr(runner, "news") else nullcontext() as view:
        try:
            while not done:
                done, _ = ray.wait([running], timeout=POLL_S)
                if view is None:
                    continue
                with suppress(ray.exceptions.RayError):  # busy or gone: what it has to say comes with the result
                    events, cursor = ray.get(runner.news.remote(cursor), timeout=10)
                    view.update(events)
        except KeyboardInterrupt:
            if hasattr(runner, "stop"):
                print("stopping: a checkpoint is written if this step ends within a few seconds", file=sys.stderr)
                runner.stop.remote()
                ray.wait([running], timeout=STOP_GRACE_S)
            raise
    ray.get(running)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def watch_here(runner: Any, config: Any) -> None:
    """The same for a runner in this process: its news are shown as they come."""
    from quadriga.tracking.console import LiveView
    from quadriga.tracking.events import EventLog

    with LiveView(live=False) as view:  # lines, not a panel: a debugger shares this terminal
        runner.events = EventLog(listener=lambda event: view.update([event]))
        runner.run(config)


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
