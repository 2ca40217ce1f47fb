"""From a command line to a supervised run: in this process, in one of torchrun's, or in several that are started here."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from quadriga.accelerator import collectives, device_module
from quadriga.config.command_line import compose_file, compose_from_arguments, hydra_errors, quote, take_file
from quadriga.config.devices import detect_local_device
from quadriga.config.load import load_config, screen_overrides
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.controller import rendezvous
from quadriga.errors import INTERRUPTED, ConfigError, QuadrigaError, ResourceError, RunStopped
from quadriga.rewards.processes import die_with_parent
from quadriga.tracking.run_directory import RunDirectory
from quadriga.tracking.steady_output import steady_output
from quadriga.trainer.before_start import supervised_problems_here

PROCESSES = "--nproc-per-node"
LAUNCHER = "QUADRIGA_LAUNCHER"
"""Environment variable with the process that has started this one, and without which it is not to live on."""
POLL_S = 0.1
FAILURE_GRACE_S = 5.0
INTERRUPT_GRACE_S = 60.0


@steady_output()
def run_supervised(config: Any, kind: str) -> dict[str, float]:
    """Run a whole job of `kind` (sft, rm or dpo) in this process, one of torchrun's or the only one.

    Returns the last step's metrics.
    """
    # What the machine lacks is the same for all processes: the first of them looks, the others meet it where they wait for it.
    checked = load_config(config, SCHEMAS[kind], also_check=supervised_problems_here if _is_first() else None)
    import torch.distributed as dist
    from transformers.utils import logging as transformers_logging

    from quadriga.trainer.supervised.ranks import same_on_all_ranks, together
    from quadriga.trainer.supervised.trainer import SupervisedTrainer
    from quadriga.trainer.watching import how_to_go_on, signals_like_ctrl_c

    transformers_logging.disable_progress_bar()
    with signals_like_ctrl_c(), ExitStack() as opened:
        device = _join_process_group(checked.trainer.device or detect_local_device(), checked.trainer.nccl_timeout)
        if dist.is_initialized():
            opened.callback(dist.destroy_process_group)
        trainer = checked.trainer
        place = (trainer.experiment_name, trainer.default_local_dir)  # the first one's, if its user gave it no name
        trainer.experiment_name, trainer.default_local_dir = same_on_all_ranks(place)
        try:
            if _is_first():
                directory = RunDirectory(trainer.default_local_dir)
                together(directory.lock)
                opened.callback(directory.unlock)
            else:
                directory = None
                together(lambda: None)
            return SupervisedTrainer(checked, device, directory).fit()
        except KeyboardInterrupt:
            if _is_first() and LAUNCHER not in os.environ:
                print(how_to_go_on(checked), file=sys.stderr)
            raise


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def run_arguments(kind: str, arguments: list[str]) -> int:
    """`quadriga sft|rm|dpo key=value …`; with `--nproc-per-node=N` in so many processes. Returns the exit code."""
    processes, rest = _take_processes(arguments)
    if processes > 1:
        return _launch(kind, processes, rest)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        die_with_parent(int(launcher))
    try:
        problems = supervised_problems_here if _is_first() else None
        return _run_screened(kind, screen_overrides(rest, SCHEMAS[kind], problems))
    except QuadrigaError as error:
        met_by_all = isinstance(error, ConfigError | RunStopped)
        if met_by_all and not _is_first() and not rendezvous.outlived_the_first():
            return 1  # the first says so
        _tell_torchrun(error)
        raise
    except KeyboardInterrupt:
        if launcher is None:
            raise
        return INTERRUPTED  # the launcher says so


def _tell_torchrun(error: QuadrigaError) -> None:
    """torchrun ends with a stack of its own whatever has happened, and this lets it say below it what has."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")


def _checked_here(kind: str, arguments: list[str]) -> Any:
    """The configuration, once nothing that can be seen from here would stop the run; None where only Hydra can compose it."""
    schema = SCHEMAS[kind]
    screened = screen_overrides(arguments, schema, supervised_problems_here)
    try:
        composed = compose_from_arguments(screened, schema)
    except ConfigError:
        return None
    return load_config(composed, schema, also_check=supervised_problems_here)


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

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's own errors reach us
    sys.argv = [sys.argv[0], *arguments]
    with hydra_errors():
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
    from quadriga.trainer.watching import how_to_go_on, signals_like_ctrl_c

    checked = _checked_here(kind, arguments)  # what stops it is told before any of them starts
    if checked is not None:
        arguments = [*arguments, f"trainer.experiment_name={quote(checked.trainer.experiment_name)}"]
    listener = rendezvous.bound_socket("127.0.0.1")
    shared = {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME")
        or "lo",  # else gloo listens where the host's name leads
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        rendezvous.SECRET: secrets.token_hex(16),
        LAUNCHER: str(os.getpid()),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    command = [sys.executable, "-m", "quadriga.trainer.supervised", kind, *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    with signals_like_ctrl_c() as came:
        try:
            for rank in range(processes):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if rank == 0:
                    own[rendezvous.LISTENER] = str(listener.fileno())
                environment = {**os.environ, **shared, **own}
                inherited = [listener.fileno()] if rank == 0 else []
                ranks.append(subprocess.Popen(command, env=environment, pass_fds=inherited))
            listener.close()
            return _wait_for_ranks(ranks)
        except KeyboardInterrupt:
            for each in ranks if came else []:  # a Ctrl-C of the terminal has reached them too
                each.send_signal(signal.SIGTERM)
            _end(ranks, INTERRUPT_GRACE_S)
            if checked is not None:
                print(how_to_go_on(checked), file=sys.stderr)
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
