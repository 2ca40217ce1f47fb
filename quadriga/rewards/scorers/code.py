"""Programs judged by unit tests, in the sandbox of `quadriga.rewards.sandbox` (its docstring lists what it covers).

The program is the last Markdown code block of the response, else the whole response if it compiles. `ground_truth`
says how to test it, as data or as its JSON text:

    ["assert f(1) == 2", …]                                    tests
    {"test_list": […], "test_setup_code": "…"}                 MBPP
    {"prompt": "def f(x):…", "test": "…", "entry_point": "f"}  HumanEval; `test` defines check(candidate)
    {"inputs": ["1\\n", …], "outputs": ["2\\n", …]}              a program that reads stdin and writes stdout
    {"fn_name": "f", "inputs": [[1, 2], …], "outputs": [[3], …]}  APPS, TACO: a function, or a method of class Solution
    "assert f(1) == 2"                                         one test, as Python source
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, replace
from typing import Any

from quadriga.errors import ConfigError, DataError
from quadriga.rewards.sandbox import Limits, SandboxResult, can_isolate, run
from quadriga.rewards.scorers.extract import last_code_block


@dataclass(frozen=True)
class _Task:
    imports: str = ""
    setup: str = ""
    tests: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: tuple[list[Any], ...] = ()
    returned: tuple[Any, ...] = ()
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
    require_isolation: bool = True,
) -> dict[str, Any]:
    """1.0 when all tests pass, else 0.0, or the share of passed tests with `partial`.

    Args:
        timeout_s: wall-clock and CPU seconds for the whole sample; keep it below the pool's deadline. Running out of
            it is a wrong answer, not a timeout of the scorer.
        require_isolation: refuse to run programs on a machine that cannot shut them in (`sandbox.py` says what that is).
    """
    task = _task(ground_truth)
    code = _program(solution_str, task)
    if code is None:
        return {"score": 0.0, "acc": 0.0, "pred": None, "parsed": False}
    limits = Limits(wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_mb)
    run_task = _run_io if task.inputs else _run_calls if task.calls else _run_tests
    results, total = run_task(code, task, limits)
    isolated = all(result.isolated for result in results if result.status == "done")
    if require_isolation and not isolated:
        raise cannot_isolate()
    rate = sum(result.passed for result in results) / total
    return {
        "score": rate if partial else float(rate == 1.0),
        "acc": float(rate == 1.0),
        "pred": code,
        "parsed": True,
        "pass_rate": rate,
        "code_timeout": float(any(result.status == "timeout" for result in results)),
        "isolated": float(isolated),
        "first_error": next((result.error for result in results if result.error), None),
    }


def check_machine() -> None:
    """ConfigError where the sandbox cannot shut programs in."""
    if not can_isolate():
        raise cannot_isolate()


def cannot_isolate() -> ConfigError:
    return ConfigError(
        "programs that the model writes cannot be shut in on this machine: that takes Landlock (Linux 5.13 or newer) and "
        "seccomp, and one of them is missing or forbidden here",
        "run on a machine that has them, or set reward.require_isolation=False (quadriga eval: --no-isolation) where nothing is at stake",
    )


def _program(solution_str: str, task: _Task) -> str | None:
    code = last_code_block(solution_str)
    if code is None:
        code = solution_str if solution_str.strip() and _compiles(task.prompt + solution_str) else None
    if code is None:
        return None
    if not task.prompt:
        return code
    # A HumanEval answer may be only what follows the prompt, or the whole function, which may call others of the prompt.
    defined = re.compile(rf"^[ \t]*(?:async )?def {re.escape(task.entry_point)}\s*\(", re.MULTILINE)
    if defined.search(code) is None:
        return task.prompt + code
    before = defined.split(task.prompt, maxsplit=1)[0]
    return code if "__future__" in code else f"{before}\n{code}"


def _compiles(code: str) -> bool:
    try:
        compile(code, "<solution>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _run_tests(code: str, task: _Task, limits: Limits) -> tuple[list[SandboxResult], int]:
    program = "\n".join(filter(None, (task.imports, code, task.setup)))  # MBPP's setup uses what the answer defines
    return [run(program, list(task.tests), limits=limits)], len(task.tests)


def _run_calls(code: str, task: _Task, limits: Limits) -> tuple[list[SandboxResult], int]:
    result = run(code, limits=limits, calls=(task.entry_point, list(task.calls)))
    right = sum(worked and same_value(wanted, given) for (worked, given), wanted in zip(result.outputs, task.returned))
    return [replace(result, passed=right)], len(task.calls)


def same_value(wanted: Any, given: Any) -> bool:
    """Whether plain data is the same: true is not 1, 2 is 2.0, and other floats may differ by their last digits."""
    if isinstance(wanted, bool) or isinstance(given, bool) or wanted is None or given is None:
        return wanted is given
    if isinstance(wanted, (int, float)) and isinstance(given, (int, float)):
        noise = isinstance(wanted, float) or isinstance(given, float)
        return wanted == given or (
            noise and not float(wanted).is_integer() and math.isclose(wanted, given, rel_tol=1e-9)
        )
    if isinstance(wanted, list) and isinstance(given, list):
        return len(wanted) == len(given) and all(map(same_value, wanted, given))
    if isinstance(wanted, dict) and isinstance(given, dict):
        return wanted.keys() == given.keys() and all(same_value(wanted[key], given[key]) for key in wanted)
    return type(wanted) is type(given) and wanted == given


def _run_io(code: str, task: _Task, limits: Limits) -> tuple[list[SandboxResult], int]:
    deadline = time.monotonic() + limits.wall_s
    results = []
    for given, wanted in zip(task.inputs, task.outputs):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        result = run(code, None, given, Limits(left, limits.cpu_s, limits.memory_mb, limits.file_mb))
        results.append(result if same_text(wanted, result.stdout) else replace(result, passed=0))
    return results, len(task.inputs)


def same_text(wanted: str, printed: str) -> bool:
    """Line by line, but for space at the end of lines and empty lines at the end."""
    return _lines(wanted) == _lines(printed)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


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
        if given.get("fn_name"):
            calls, returned = _calls_of(given)
            return _Task(calls=calls, returned=returned, entry_point=given["fn_name"], prompt="")
        if _texts(given.get("inputs")) and len(given["inputs"]) == len(given.get("outputs", ())):
            return _Task(inputs=_texts(given["inputs"]), outputs=_texts(given["outputs"]))
        tests = _texts(given.get("test_list")) or _texts(given.get("tests"))
        if tests:
            imports = "\n".join(_texts(given.get("test_imports")))
            return _Task(imports=imports, setup=given.get("test_setup_code") or "", tests=tests)
    raise DataError(
        f"code ground truth {str(ground_truth)[:120]!r} holds no tests",
        "give test_list, test with entry_point, or inputs with outputs; see quadriga/rewards/scorers/code.py",
    )


def _calls_of(given: dict[str, Any]) -> tuple[tuple[list[Any], ...], tuple[Any, ...]]:
    """Arguments and results of a function's tests.

    APPS wraps each result into a list of one; LeetCode's tests are texts, with one JSON value a line.
    """
    inputs, outputs = (_plain_data(given.get(key)) for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"the tests of function {given['fn_name']!r} have no inputs with as many outputs", "mend the row"
        )
    if all(isinstance(entry, str) for entry in inputs):
        try:
            calls = [[json.loads(line) for line in entry.splitlines() if line.strip()] for entry in inputs]
            outputs = [json.loads(entry) if isinstance(entry, str) else entry for entry in outputs]
        except ValueError as problem:
            raise DataError(
                f"a test of function {given['fn_name']!r} is not JSON: {problem}", "mend the row"
            ) from problem
        return tuple(calls), tuple(outputs)
    calls = [entry if isinstance(entry, list) else [entry] for entry in inputs]
    wrapped = all(isinstance(entry, list) and len(entry) == 1 for entry in outputs)
    return tuple(calls), tuple(entry[0] if wrapped else entry for entry in outputs)


def _plain_data(value: Any) -> Any:
    """Arrays, as parquet gives lists back, as lists all the way down."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def _texts(values: Any) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, str):
        return (values,)
    return tuple(value if isinstance(value, str) else _as_text(value) for value in values)


def _as_text(value: Any) -> str:
    """APPS also has programs' input and output as lists of lines."""
    value = _plain_data(value)
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
