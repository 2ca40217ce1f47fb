"""Reward functions that misbehave, for the pool's tests. What to do is the response's first word."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def behave(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """Returns the ground truth as the score unless told to misbehave."""
    action = getattr(Misbehaviour, solution_str.partition(" ")[0], None)
    return action(solution_str, extra_info) if action else float(ground_truth)


class Misbehaviour:
    @staticmethod
    def sleep(text: str, info: dict[str, Any]) -> float:
        time.sleep(1e6)
        return 1.0

    @staticmethod
    def spin(text: str, info: dict[str, Any]) -> float:
        while True:
            pass

    @staticmethod
    def nap(text: str, info: dict[str, Any]) -> float:
        time.sleep(float(text.split()[1]))
        return 1.0

    @staticmethod
    def fork_and_return(text: str, info: dict[str, Any]) -> float:
        os.fork()
        return 1.0

    @staticmethod
    def leave_a_child(text: str, info: dict[str, Any]) -> float:
        subprocess.Popen(["sleep", "1000"])
        return 1.0

    @staticmethod
    def leave_a_daemon(text: str, info: dict[str, Any]) -> float:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        return 1.0

    @staticmethod
    def daemon_then_hang(text: str, info: dict[str, Any]) -> float:
        Misbehaviour.leave_a_daemon(text, info)
        time.sleep(1e6)
        return 1.0

    @staticmethod
    def daemon_then_die(text: str, info: dict[str, Any]) -> float:
        Misbehaviour.leave_a_daemon(text, info)
        os._exit(7)

    @staticmethod
    def many_forks(text: str, info: dict[str, Any]) -> float:
        for _ in range(30):
            if os.fork() == 0:
                time.sleep(1000)
        time.sleep(1e6)
        return 1.0

    @staticmethod
    def eat_10_gb(text: str, info: dict[str, Any]) -> float:
        return float(len(bytearray(10 << 30)))

    @staticmethod
    def children_eat(text: str, info: dict[str, Any]) -> float:
        for _ in range(4):
            if os.fork() == 0:
                keep = bytearray(150 << 20)
                time.sleep(1000 + len(keep))
        time.sleep(1e6)
        return 1.0

    @staticmethod
    def segfault(text: str, info: dict[str, Any]) -> float:
        return float(len(ctypes.string_at(0)))

    @staticmethod
    def exit_hard(text: str, info: dict[str, Any]) -> float:
        os._exit(3)

    @staticmethod
    def exit_softly(text: str, info: dict[str, Any]) -> float:
        sys.exit("I am leaving")

    @staticmethod
    def print_megabytes(text: str, info: dict[str, Any]) -> float:
        for _ in range(30):
            print("x" * 1_000_000)
            os.write(2, b"y" * 1_000_000)
        return 1.0

    @staticmethod
    def close_everything(text: str, info: dict[str, Any]) -> float:
        os.closerange(3, 1000)
        return 1.0

    @staticmethod
    def tell_and_nap(text: str, info: dict[str, Any]) -> float:
        """Leaves its pid and its parent's in a file; takes a second."""
        with open(info["marker"], "a") as marker:
            marker.write(f"{os.getpid()} {os.getppid()}\n")
        time.sleep(1.0)
        return 1.0

    @staticmethod
    def kill_itself(text: str, info: dict[str, Any]) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    @staticmethod
    def kill_its_parent(text: str, info: dict[str, Any]) -> float:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1e6)
        return 1.0

    @staticmethod
    def kill_its_grandparent(text: str, info: dict[str, Any]) -> float:
        line = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(line.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(1e6)
        return 1.0

    @staticmethod
    def garble(text: str, info: dict[str, Any]) -> float:
        """Writes what is in `info["bytes"]` to every socket it has."""
        for fd in range(3, 100):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, info["bytes"])
        return 1.0

    @staticmethod
    def nan(text: str, info: dict[str, Any]) -> float:
        return float("nan")

    @staticmethod
    def text(text: str, info: dict[str, Any]) -> str:
        return "1.0"

    @staticmethod
    def nothing(text: str, info: dict[str, Any]) -> None:
        return None

    @staticmethod
    def list_of_two(text: str, info: dict[str, Any]) -> list[float]:
        return [1.0, 2.0]

    @staticmethod
    def dict_without_score(text: str, info: dict[str, Any]) -> dict[str, float]:
        return {"reward": 1.0}

    @staticmethod
    def throw(text: str, info: dict[str, Any]) -> float:
        raise KeyError("a bug in the reward function")

    @staticmethod
    def fail_the_first_time(text: str, info: dict[str, Any]) -> float:
        marker = Path(info["marker"])
        if not marker.exists():
            marker.touch()
            raise RuntimeError("not yet")
        return 1.0


async def asynchronous(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {"score": float(ground_truth), "length": len(solution_str)}


def for_a_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[dict[str, Any]]
) -> list[Any]:
    """One score per sample; `short`, `nan` and `sleep` among the responses misbehave."""
    if "sleep" in solution_strs:
        time.sleep(1e6)
    scores: list[Any] = [float(truth) for truth in ground_truths]
    if "nan" in solution_strs:
        scores[solution_strs.index("nan")] = float("nan")
    return scores[:-1] if "short" in solution_strs else scores


def two_arguments(solution_str: str, ground_truth: Any) -> float:
    return 1.0


def four_other_names(source: str, answer: str, reference: Any, info: dict[str, Any]) -> float:
    return float(reference)


def where_it_runs(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": 1.0, "pid": os.getpid(), "has_torch": "torch" in sys.modules}
