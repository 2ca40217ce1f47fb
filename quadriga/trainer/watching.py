"""The user's terminal while a run goes on elsewhere: ask the runner for news, show it, until it is done."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from quadriga.config.schema import Config

POLL_S = 0.3
STOP_GRACE_S = 4.0


def watch(runner: Any, running: Any, show: bool = True) -> None:
    """Wait for `running`, the call of `runner.run`, showing the run's news meanwhile; raises what the run raised.

    A runner without `news`, such as a user's own, is just waited for, and so is any if `show` is False.
    """
    import ray

    from quadriga.tracking.console import LiveView

    if not show or not hasattr(runner, "news"):
        ray.get(running)
        return
    cursor = 0
    done: list[Any] = []
    with LiveView() as view:
        try:
            while not done:
                done, _ = ray.wait([running], timeout=POLL_S)
                with suppress(ray.exceptions.RayError):  # busy or gone: what it has to say comes with the result
                    events, cursor = ray.get(runner.news.remote(cursor), timeout=10)
                    view.update(events)
        except KeyboardInterrupt:
            # The step at hand may end within the grace, and then it is not lost.
            view.console.print("stopping: a checkpoint is written if this step ends within a few seconds")
            runner.stop.remote()
            ray.wait([running], timeout=STOP_GRACE_S)
            raise
    ray.get(running)


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
