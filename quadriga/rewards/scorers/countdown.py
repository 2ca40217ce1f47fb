"""Countdown: reach a target from given numbers with + − × ÷, every number used exactly once.

`ground_truth` is `{"target": 30, "numbers": [59, 57, 32]}` (`nums` is accepted for `numbers`), or its JSON text. The
answer is the last `<answer>…</answer>`, else the last `\\boxed{…}`, else the text after the last `####`. It is
parsed, never evaluated as Python, and computed in exact fractions.
"""

from __future__ import annotations

import ast
import json
import re
from fractions import Fraction
from typing import Any

from quadriga.errors import DataError
from quadriga.rewards.scorers.extract import last_boxed, last_tag

_MAX_EXPRESSION = 500
_SYMBOLS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")", "{": "(", "}": ")"})
_LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), ("$", ""))
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.0,
) -> dict[str, Any]:
    """1.0 for an expression that uses each number once and equals the target, `format_score` for any other expression."""
    target, numbers = _task(ground_truth)
    expression = extract_expression(solution_str)
    value_and_used = evaluate(expression) if expression is not None else None
    if value_and_used is None:
        return {"score": 0.0, "acc": 0.0, "pred": expression, "parsed": False}
    value, used = value_and_used
    right = value == target and sorted(used) == sorted(numbers)
    return {"score": 1.0 if right else format_score, "acc": float(right), "pred": expression, "parsed": True}


def _task(ground_truth: Any) -> tuple[Fraction, list[int]]:
    task = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    try:
        numbers = task["numbers"] if "numbers" in task else task["nums"]
        return Fraction(str(task["target"])), [int(number) for number in numbers]
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(
            f"countdown ground truth {str(ground_truth)[:120]!r} has no target and numbers",
            'give reward_model.ground_truth as {"target": 30, "numbers": [59, 57, 32]}',
        ) from problem


def extract_expression(text: str) -> str | None:
    """The arithmetic expression that the response gives as its answer, without a trailing `= 30`."""
    answer = last_tag(text)
    if answer is None:
        answer = last_boxed(text)
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2].strip().partition("\n")[0]
    if not answer:
        return None
    answer = _FRAC.sub(r"((\1)/(\2))", answer)
    for latex, plain in _LATEX:
        answer = answer.replace(latex, plain)
    answer = answer.translate(_SYMBOLS).strip().rstrip(".")
    sides = [side.strip() for side in answer.split("=")]
    if len({found[0] for side in sides if (found := evaluate(side)) is not None}) > 1:
        return answer  # "1 + 2 = 4" is no expression
    # "30 = a + b" and "a + b = 30" are both written; the side with an operator is the expression.
    return next((side for side in sides if re.search(r"[-+*/(]", side)), sides[0]) or None


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Exact value and the numbers used, or None when this is not such an expression (or divides by zero)."""
    if len(expression) > _MAX_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() \t]+", expression):
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        used: list[int] = []
        return _value(tree.body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, used)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, used), _value(node.right, used)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError(f"{type(node).__name__} is not part of countdown")
