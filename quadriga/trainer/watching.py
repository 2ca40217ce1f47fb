"""The user's terminal while a run goes on elsewhere: ask the runner for news, show it, until it is done."""

from __future__ import annotations

from typing import Any

POLL_S = 0.3


def watch(runner: Any, running: Any) -> None:
    """Wait for `running`, the call of `runner.run`, showing the run's news meanwhile; raises what the run raised.

    A runner without `news`, such as a user's own, is just waited for.
    """
    import ray

    from quadriga.tracking.console import LiveView

    if not hasattr(runner, "news"):
        ray.get(running)
        return
    cursor = 0
    with LiveView() as view:
        while True:
            done, _ = ray.wait([running], timeout=POLL_S)
            try:
                events, cursor = ray.get(runner.news.remote(cursor), timeout=10)
                view.update(events)
            except ray.exceptions.RayError:
                pass  # the runner is busy or gone: what it has to say comes with the result
            if done:
                break
    ray.get(running)
