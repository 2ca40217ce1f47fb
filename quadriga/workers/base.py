"""What all workers of a run have in common: a role, the configuration, and collectives with their peers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quadriga.config.host_memory import host_items, require_host_memory
from quadriga.config.schema import Config
from quadriga.config.typed import set_key
from quadriga.controller.dispatch import Dispatch, register
from quadriga.controller.worker import Worker
from quadriga.errors import WorkerError
from quadriga.host import enter_callers_folder, usable_memory
from quadriga.protocol import DataProto
from quadriga.registry import import_libraries
from quadriga.tracking.process_log import keep_output
from quadriga.workers.profiling import CallProfiler

if TYPE_CHECKING:
    from quadriga.checkpoint.disk import BackgroundWrite, WriteState


@dataclass(frozen=True)
class WorkerReport:
    """One line of the table that a run prints when its workers are up."""

    role: str
    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    collectives: str
    threads: int


class RunWorker(Worker):
    """A worker of a training run.

    Args:
        config: the whole, checked configuration.
        role: the part it plays, as `str(Role)`.
    """

    has_collectives = True
    """Whether its ranks talk to each other. One of those that do not can be replaced alone."""

    def __init__(self, config: Config, role: str) -> None:
        super().__init__()
        enter_callers_folder()
        if os.environ.get("WG_BACKEND") == "ray":  # else this is the process that started the run
            keep_output(config.trainer.default_local_dir, role, self.rank)
        import_libraries(config.actor_rollout_ref.model.external_lib, "actor_rollout_ref.model.external_lib")
        self.config, self.role = config, role
        self._profiler = CallProfiler(config, role)

    def around_call(self, method: str) -> AbstractContextManager[None]:
        """What surrounds every call of this worker: its profile, in the steps that have one."""
        return self._profiler.around(method)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def profile_step(self, step: int | None) -> None:
        """The calls to come are of this step, whose profile is wanted; None: of no such step."""
        self._profiler.begin_step(step, self.rank, self.device_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join(self) -> WorkerReport:
        """Get ready. Where the ranks have collectives, join them and prove it: every rank must hear of every other."""
        from transformers.utils import logging as transformers_logging

        from quadriga.models.exact import set_exact

        transformers_logging.disable_progress_bar()
        set_exact(self.config.trainer.deterministic == "exact")
        # What is drawn from the global stream (a new adapter's weights) is the same on every rank and in every run.
        torch.manual_seed(self.config.data.seed)
        self._require_host_memory()
        self.use_own_device()
        backend = self._connect() if self.has_collectives else "no collectives"
        return WorkerReport(
            role=self.role,
            rank=self.rank,
            world_size=self.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=self.device_name,
            collectives=backend,
            threads=torch.get_num_threads(),
        )

    def _require_host_memory(self) -> None:
        """ResourceError if this node cannot hold what the workers of this role will keep in its memory."""
        items = [item for item in host_items(self.config, self.device_name) if item.role == self.role]
        workers = {self.role: self.local_world_size}
        require_host_memory(items, workers, self.rank == 0, usable_memory()[1], f"the node {socket.gethostname()}")

    def _connect(self) -> str:
        """Join the collectives; returns what carries them."""
        import torch.distributed as dist

        self.init_process_group(self.config.actor_rollout_ref.nccl_timeout)
        ranks = torch.tensor([self.rank], device=None if self.device_name == "cpu" else self.device_name)
        dist.all_reduce(ranks)
        if int(ranks) != self.world_size * (self.world_size - 1) // 2:
            raise WorkerError(
                f"the collectives of {self.role} do not connect its {self.world_size} ranks: their numbers add up to {int(ranks)}",
                "check that DIST_INIT_METHOD, where set, is the same for all ranks and free for this run",
            )
        return dist.get_backend()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def compute(self, function: Callable[[DataProto], DataProto], rows: DataProto) -> DataProto:
        """`function(rows)` on all rows at once."""
        return function(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def map_rows(self, function: Callable[[DataProto], DataProto], rows: DataProto) -> DataProto:
        """`function(rows)`, each rank with rows of its own."""
        return function(rows)


class LearningWorker(RunWorker):
    """A worker whose `engine` trains: its state is part of a checkpoint."""

    engine: Any
    optimiser: str
    """`optim.name`."""
    _copied: dict[str, Any]
    _writing: BackgroundWrite

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_key(self, key: str, value: Any) -> None:
        """Another value of a configuration key, from the next update on: the learning rate, the weight of a loss term."""
        set_key(self.config, key, value)
        schedule = self.engine.schedule
        if schedule is not None:
            schedule.move_to(schedule.step)  # its factor of this step, of the new learning rate

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> int:
        """About what this rank's part of a checkpoint will take on disk, before there is any."""
        from quadriga.checkpoint.shards import expected_bytes

        return expected_bytes(self.engine, self.optimiser)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def copy_checkpoint(self) -> int:
        """Copy this rank's part of a checkpoint to host memory. Returns the bytes that it will take on disk."""
        self._copied = self.checkpoint_parts()
        return sum(part.bytes for part in self._copied.values())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_checkpoint(self, folder: str) -> None:
        """Begin to write the copy into the folders of its parts in `folder`; `checkpoint_written` tells how far it is."""
        from quadriga.checkpoint.disk import BackgroundWrite

        parts, self._copied = self._copied, {}

        def write() -> None:
            for name in list(parts):
                parts.pop(name).write(os.path.join(folder, name))  # its memory is free as soon as it is written

        self._writing = BackgroundWrite(write)

    def checkpoint_written(self) -> WriteState:
        """Asked beside the calls that train on."""
        return self._writing.state()

    def checkpoint_parts(self) -> dict[str, Any]:
        """Folder → what this rank writes into it: something with `bytes` and `write(folder)`."""
        from quadriga.checkpoint.shards import copy_engine

        return {self.role: copy_engine(self.engine)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Take up the state that any number of ranks wrote."""
        from quadriga.checkpoint.shards import load_engine

        load_engine(self.engine, folder)


def named(metrics: dict[str, float], role: str) -> dict[str, float]:
    """Metrics under the role's name, unless they carry one."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}


def warm_up() -> None:
    """Load the libraries, and touch the device."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  (loaded when first named)

    import quadriga.engine
    import quadriga.models.load
    import quadriga.rollout.interface
    import quadriga.workers.actor_rollout_ref

    if os.environ.get("QUADRIGA_DEVICE") == "cuda":
        import quadriga.rollout.native.cuda.runner  # noqa: F401

        torch.zeros(1, device="cuda")
