"""Profiles of a worker's calls in the steps that were asked for: one file a call, or ranges for Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quadriga.config.needs import profiler_section
from quadriga.config.schema import Config
from quadriga.errors import ConfigError

SILENT = ("profile_step", "join", "checkpoint_written")
"""Calls that are not worth a file."""


class CallProfiler:
    """What surrounds the calls of one worker.

    `global_profiler.tool=torch`: each call in a chosen step leaves a trace `<folder>/step_<n>/<role>_<rank>_<method>.json.gz`,
    which Perfetto and chrome://tracing read. `nsys`: each is an NVTX range, and the CUDA profiler runs during the step, so that
    `nsys profile --capture-range=cudaProfilerApi` records these steps alone.

    Args:
        config: the whole configuration.
        role: the worker's part, as `str(Role)`.
    """

    def __init__(self, config: Config, role: str) -> None:
        self.settings, self.section, self.role = config.global_profiler, profiler_section(config, role), role
        own = config.global_profiler.save_path
        self.folder = Path(own).expanduser() if own else Path(config.trainer.default_local_dir) / "profile"
        self.step: int | None = None
        self.calls: dict[str, int] = {}

    def begin_step(self, step: int | None, rank: int, device: str) -> None:
        """From here on calls are of this step; None: of no step that is profiled."""
        section, tool = self.section, self.settings.tool
        chosen = section is not None and section.enable and (section.all_ranks or rank in section.ranks)
        self.rank, self.device = rank, device
        was, self.step = self.step, step if chosen and tool is not None else None
        self.calls.clear()
        if tool == "nsys" and (was is None) != (self.step is None):
            if device != "cuda":
                raise ConfigError(
                    f"global_profiler.tool=nsys needs an NVIDIA GPU, and {self.role} runs on {device}",
                    "set global_profiler.tool=torch",
                )
            import torch

            torch.cuda.profiler.start() if self.step is not None else torch.cuda.profiler.stop()

    @contextmanager
    def around(self, method: str) -> Iterator[None]:
        if self.step is None or method in SILENT:
            yield
            return
        import torch

        if self.settings.tool == "nsys":
            with torch.cuda.nvtx.range(f"{self.role}.{method} step {self.step}"):
                yield
            return
        with torch.profiler.profile(**self._options()) as profile:
            yield
        profile.export_chrome_trace(str(self._file(method)))

    def _options(self) -> dict[str, Any]:
        import torch

        assert self.section is not None
        contents = self.section.tool_config.torch.contents
        known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        activities = [known[name] for name in known if name in contents and (name == "cpu" or self.device == "cuda")]
        return {
            "activities": activities or [torch.profiler.ProfilerActivity.CPU],
            "with_stack": "stack" in contents,
            "record_shapes": "shapes" in contents,
            "profile_memory": "memory" in contents,
        }

    def _file(self, method: str) -> Path:
        """A name of its own for each call: the second of a method in a step has a number."""
        count = self.calls[method] = self.calls.get(method, 0) + 1
        folder = self.folder / f"step_{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        number = "" if count == 1 else f"_{count}"
        return folder / f"{self.role}_{self.rank}_{method}{number}.json.gz"
