"""Programs judged by unit tests, in the sandbox of `quadriga.rewards.sandbox` (its docstring lists what it covers).

The program is the last Markdown code block of the response, else the whole response if it compiles. `ground_truth`
says how to test it, as data or as its JSON text:

    ["assert f(1) == 2", …]                                    tests
    {"test_list": […], "test_setup_code": "…"}                 MBPP
    {"prompt": "def f(x):…", "test": "…", "entry_point": "f"}  HumanEval; `test` defines check(candidate)
    {"inputs": ["1\\n", …], "outputs": ["2\\n", …]}              a program that reads stdin and writes stdout
    "assert f(1) == 2"                                         one test, as Python source
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from quadriga.errors import DataError, RewardError
from quadriga.rewards.sandbox import Limits, SandboxResult, run
from quadriga.rewards.scorers.extract import last_code_block


@dataclass(frozen=True)
class _Task:
    setup: str = ""
    tests: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    prompt: str = ""
    entry_point: str = ""


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    partial: bool = False,
    timeout_s: float = 10.0,
    memory_mb: int = 1024,
    require_isolation: bool = False,
) -> dict[str, Any]:
    """1.0 when all tests pass, else 0.0, or the share of passed tests with `partial`.

    Args:
        timeout_s: wall-clock and CPU seconds for the whole sample; keep it below the pool's deadline. Running out of
            it is a wrong answer, not a timeout of the scorer.
        require_isolation: fail (RewardError) where neither namespaces nor a system-call filter shut off the network.
    """
    task = _task(ground_truth)
    code = _program(solution_str, task)
    if code is None:
        return {"score": 0.0, "acc": 0.0, "pred": None, "parsed": False}
    limits = Limits(wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_mb)
    results, total = _run_io(code, task, limits) if task.inputs else _run_tests(code, task, limits)
    network_isolated = all(r.filtered or r.namespaces for r in results if r.status == "done")
    if require_isolation and not network_isolated:
        raise RewardError(
            "the sandbox cannot shut off the network on this machine",
            "allow user namespaces or seccomp, or unset require_isolation",
        )
    rate = sum(result.passed for result in results) / total
    return {
        "score": rate if partial else float(rate == 1.0),
        "acc": float(rate == 1.0),
        "pred": code,
        "parsed": True,
        "pass_rate": rate,
        "code_timeout": float(any(result.status == "timeout" for result in results)),
        "network_isolated": float(network_isolated),
        "first_error": next((result.error for result in results if result.error), None),
    }


def _program(solution_str: str, task: _Task) -> str | None:
    code = last_code_block(solution_str)
    if code is None:
        code = solution_str if solution_str.strip() and _compiles(task.prompt + solution_str) else None
    if code is None:
        return None
    # A HumanEval answer may be the whole function or only what follows the prompt.
    return task.prompt + code if task.prompt and f"def {task.entry_point}" not in code else code


def _compiles(code: str) -> bool:
    try:
        compile(code, "<solution>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _run_tests(code: str, task: _Task, limits: Limits) -> tuple[list[SandboxResult], int]:
    program = f"{task.setup}\n{code}" if task.setup else code
    return [run(program, list(task.tests), limits=limits)], len(task.tests)


def _run_io(code: str, task: _Task, limits: Limits) -> tuple[list[SandboxResult], int]:
    deadline = time.monotonic() + limits.wall_s
    results = []
    for given, wanted in zip(task.inputs, task.outputs):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        result = run(code, None, given, Limits(left, limits.cpu_s, limits.memory_mb, limits.file_mb))
        same = _lines(result.stdout) == _lines(wanted)
        results.append(
            result if same else SandboxResult(result.status, 0, result.error, "", result.namespaces, result.filtered)
        )
    return results, len(task.inputs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _task(ground_truth: Any) -> _Task:
    given = ground_truth
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = [given]
    if hasattr(given, "tolist"):  # parquet gives lists back as arrays
        given = given.tolist()
    if isinstance(given, list):
        given = {"test_list": given}
    if isinstance(given, dict):
        if given.get("test") and given.get("entry_point"):
            test = f"{given['test']}\ncheck({given['entry_point']})"
            return _Task(tests=(test,), prompt=given.get("prompt", ""), entry_point=given["entry_point"])
        if _texts(given.get("inputs")) and len(given["inputs"]) == len(given.get("outputs", ())):
            return _Task(inputs=_texts(given["inputs"]), outputs=_texts(given["outputs"]))
        tests = _texts(given.get("test_list")) or _texts(given.get("tests"))
        if tests:
            imports = "\n".join(_texts(given.get("test_imports")))
            return _Task(setup="\n".join(filter(None, (imports, given.get("test_setup_code")))), tests=tests)
    raise DataError(
        f"code ground truth {str(ground_truth)[:120]!r} holds no tests",
        "give test_list, test with entry_point, or inputs with outputs; see quadriga/rewards/scorers/code.py",
    )


def _texts(values: Any) -> tuple[str, ...]:
    if values is None:
        return ()
    return (values,) if isinstance(values, str) else tuple(str(value) for value in values)
