"""From a command line to a supervised run: in this process, in one of torchrun's, or in several that are started here."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from quadriga.accelerator import collectives, device_module
from quadriga.config.command_line import compose_file, take_file
from quadriga.config.load import load_config, screen_overrides
from quadriga.config.local_device import detect_local_device
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.controller import rendezvous
from quadriga.errors import ConfigError, ResourceError, RunStopped
from quadriga.tracking.sinks import sink_problems
from quadriga.tracking.steady_output import steady_output

PROCESSES = "--nproc-per-node"
POLL_S = 0.1
FAILURE_GRACE_S = 5.0
INTERRUPT_GRACE_S = 60.0


@steady_output()
def run_supervised(config: Any, kind: str) -> dict[str, float]:
    """Run a whole job of `kind` (sft, rm or dpo) in this process, one of torchrun's or the only one.

    Returns the last step's metrics.
    """
    checked = load_config(config, SCHEMAS[kind], also_check=lambda checked: sink_problems(checked.trainer.logger))
    import torch.distributed as dist
    from transformers.utils import logging as transformers_logging

    from quadriga.trainer.supervised.ranks import same_on_all_ranks
    from quadriga.trainer.supervised.trainer import SupervisedTrainer
    from quadriga.trainer.watching import how_to_go_on

    transformers_logging.disable_progress_bar()
    device = _join_process_group(checked.trainer.device or detect_local_device(), checked.trainer.nccl_timeout)
    trainer = checked.trainer
    place = (trainer.experiment_name, trainer.default_local_dir)  # it may have the time in it
    trainer.experiment_name, trainer.default_local_dir = same_on_all_ranks(place)
    try:
        return SupervisedTrainer(checked, device).fit()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(how_to_go_on(checked), file=sys.stderr)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_arguments(kind: str, arguments: list[str]) -> int:
    """`quadriga sft|rm|dpo key=value …`; with `--nproc-per-node=N` in so many processes. Returns the exit code."""
    processes, rest = _take_processes(arguments)
    if processes > 1:
        return _launch(kind, processes, rest)
    try:
        return _run_screened(kind, screen_overrides(rest, SCHEMAS[kind]))
    except (ConfigError, RunStopped):
        if os.environ.get("RANK", "0") == "0":
            raise
        return 1  # every process has found the same; one of them says so


def _run_screened(kind: str, arguments: list[str]) -> int:
    file, rest = take_file(arguments)
    if file is not None:
        run_supervised(compose_file(file, rest, SCHEMAS[kind]), kind)
        return 0
    import hydra

    raised: list[BaseException] = []

    @hydra.main(config_path="../config", config_name=f"{kind}_trainer", version_base=None)
    def job(config: Any) -> None:
        """Hydra would print a line of its own above an error that goes through it, so none does."""
        if not raised:  # else an earlier job of a sweep has failed
            try:
                run_supervised(config, kind)
            except BaseException as error:
                raised.append(error)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's own errors reach the caller
    sys.argv = [sys.argv[0], *arguments]
    job()
    if raised:
        raise raised[0]
    return 0


def sft(arguments: list[str]) -> int:
    return run_arguments("sft", arguments)


def rm(arguments: list[str]) -> int:
    return run_arguments("rm", arguments)


def dpo(arguments: list[str]) -> int:
    return run_arguments("dpo", arguments)


def _take_processes(arguments: list[str]) -> tuple[int, list[str]]:
    rest, given = [], None
    queue = iter(arguments)
    for argument in queue:
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == PROCESSES:
            given = value if equals else next(queue, "")
        else:
            rest.append(argument)
    if given is None:
        return 1, rest
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(f"{PROCESSES} {given!r} is no number of processes", f"write {PROCESSES}=2, for example")
    return int(given), rest


def _launch(kind: str, processes: int, arguments: list[str]) -> int:
    """The same command in `processes` processes of this machine; returns the exit code of the first that failed, or 0."""
    listener = rendezvous.bound_socket("127.0.0.1")
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        rendezvous.SECRET: secrets.token_hex(16),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    command = [sys.executable, "-m", "quadriga.trainer.supervised", kind, *arguments]
    ranks = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank == 0:
            own[rendezvous.LISTENER] = str(listener.fileno())
        environment = {**os.environ, **shared, **own}
        ranks.append(subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()] if rank == 0 else []))
    listener.close()
    try:
        return _wait_for_ranks(ranks)
    except KeyboardInterrupt:  # they have had the same Ctrl-C from the terminal
        _end(ranks, INTERRUPT_GRACE_S)
        raise
    finally:
        _end(ranks, 0.0)


def _wait_for_ranks(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Until all have ended well, or one has not; the others get a moment to say what they have to say."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            _end(ranks, FAILURE_GRACE_S)
            return failed if failed > 0 else 128 - failed
        if None not in codes:
            return 0
        time.sleep(POLL_S)


def _end(ranks: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _join_process_group(device_type: str, timeout_s: int) -> Any:
    """Join the other processes, if there are any; returns the device of this one."""
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, local_rank)
    if device.type != "cpu":
        accelerator = device_module(device)
        if local_rank >= accelerator.device_count():
            raise ResourceError(
                f"process {local_rank} of this node has no {device.type} device; there are {accelerator.device_count()}",
                "start as many processes as there are devices (torchrun --nproc_per_node), or set trainer.device=cpu",
            )
        accelerator.set_device(device)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not dist.is_initialized():
        # Started by `_launch`, and not by torchrun from a process that was: torchrun has a store of its own.
        if rendezvous.SECRET in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            rendezvous.join(device.type, int(os.environ["RANK"]), ranks, timeout_s)
        else:
            dist.init_process_group(collectives(device.type), timeout=timedelta(seconds=timeout_s))
    return device
