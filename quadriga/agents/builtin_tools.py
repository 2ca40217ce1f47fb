"""Tools that come with Quadriga. They run in tool processes, as the user's own do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 1000
MAX_BITS = 4096
"""No number on the way may have a numerator or denominator longer than this."""
MAX_OUTPUT = 20_000

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
_BINARY: dict[type, Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Fraction | int]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda x, digits=Fraction(0): Fraction(round(x, int(digits))),
}


def calculator(expression: str) -> str:
    """
    Computes an arithmetic expression exactly.

    Args:
        expression: The expression, such as "(17 + 5) * 3 / 4". Operators: + - * / // % **; functions: abs, min, max, round.

    Returns:
        The value.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    source = expression.translate(_SIGNS).strip()
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ValueError("this is no arithmetic expression") from None
    return as_text(_value(tree, source))


def as_text(value: Fraction) -> str:
    """A whole number or a finite decimal as it is, any other with 15 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    digits = max(twos, fives)
    if rest == 1 and digits <= 30:
        scaled = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
        return ("-" if value < 0 else "") + scaled[:-digits] + "." + scaled[-digits:]
    try:
        return f"{float(value):.15g}"
    except OverflowError:
        return str(round(value))


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        text = (ast.get_source_segment(source, node) or "").replace("_", "")
        try:  # from the text: 0.1 is a tenth here
            value = Fraction(node.value) if isinstance(node.value, int) else _decimal(text)
        except (ValueError, OverflowError):
            raise ValueError(f"{text!r} is no number that can be used here") from None
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand, source)
        value = -value if isinstance(node.op, ast.USub) else value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_value(node.left, source), _value(node.right, source))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, source), _value(node.right, source)
        if right == 0 and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
            raise ValueError("division by zero")
        value = Fraction(_BINARY[type(node.op)](left, right))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords or not node.args or len(node.args) > 100:
            raise ValueError(f"{node.func.id} takes numbers, separated by commas")
        value = Fraction(_function(node.func.id, [_value(argument, source) for argument in node.args]))
    else:
        text = ast.get_source_segment(source, node) or ""
        raise ValueError(f"{text[:40]!r} is not allowed here: numbers, + - * / // % ** and abs, min, max, round are")
    return _bounded(value)


def _decimal(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > 1000:
        raise ValueError("out of bounds")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _function(name: str, values: list[Fraction]) -> Fraction | int:
    if name == "round" and len(values) == 2 and (values[1].denominator != 1 or abs(values[1]) > 1000):
        raise ValueError("round takes a whole number of digits")
    try:
        return _FUNCTIONS[name](*values) if len(values) > 1 or name in ("abs", "round") else values[0]
    except TypeError:
        raise ValueError(f"{name} does not take {len(values)} numbers") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and abs(exponent) * max(bits - 1, 1) > MAX_BITS:
        raise ValueError("the number would be too long")
    if abs(exponent) > 1_000_000:
        exponent = exponent % 2 + 2  # the base is 0, 1 or -1
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the number would be too long")
    return value


def python(code: str) -> str:
    """
    Runs a Python program by itself and returns what it prints. It has no network, no files and a few seconds.

    Args:
        code: The program. Print what you want to know.

    Returns:
        What the program printed, and its error if it failed.
    """
    from quadriga.rewards.sandbox import Limits, run

    result = run(code, limits=Limits(wall_s=8.0, cpu_s=8.0, memory_mb=512, file_mb=4))
    if result.status == "timeout":
        raise TimeoutError("the program did not end in time")
    if result.status == "died":
        raise RuntimeError("the program ended without a result (it ran out of memory, or was stopped)")
    if not result.isolated:
        raise RuntimeError("this machine cannot shut programs in, so none is run")
    printed = result.stdout[:MAX_OUTPUT]
    return f"{printed.rstrip()}\n{result.error}".strip() if result.error else printed
