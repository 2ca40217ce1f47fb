r"""LaTeX formulas as numbers: a strict parser, and whether two formulas are the same.

The parser knows what competition answers are made of (fractions, roots, powers, functions, factorials, binomials, mixed
numbers, symbols with subscripts) and nothing else. What it does not know, or what can be read in two ways (`1/2x`,
`\log 2\pi`), raises `Unsure`: a grader then says that it cannot compare, never a wrong yes.

Two formulas are the same when they agree in exact fractions or, where roots and the like make that impossible, to 40
digits at six random values of their symbols. No algebra is rewritten, so that nothing takes long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]|\S")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "²": "^2", "³": "^3", "°": r"^\circ ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "（": "(", "）": ")", "，": ",", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
})  # fmt: skip
_REWRITTEN = [(re.compile(pattern), replacement) for pattern, replacement in (
    (r"(?<=[0-9])(?:\{,\}|,?\\[!,]|\\,)(?=[0-9]{3}(?![0-9]))", ""),  # thousands, the LaTeX way
    (r"([0-9]*)\.([0-9]*)\\overline\s*\{([0-9]+)\}", lambda match: _repeating(*match.groups())),
    (r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|bigg|Bigg)(?![A-Za-z])\s*\.?", ""),
    (r"\\(?:displaystyle|textstyle|limits|quad|qquad)(?![A-Za-z])|(?<!\\)\\[!,;: ]|~", " "),
    (r"\\varnothing(?![A-Za-z])|∅", r"\\emptyset "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*\{\s*d(?=[^{}]*\}\s*\{\s*d)", r"\\derivative "),
    (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"(?<![\\A-Za-z])[A-Za-z]\s*\\times\s*(?=[A-Za-z](?![A-Za-z]))", r"\g<0>\\crossed "),  # A × B may be no product
    (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\(?:l|r)brace(?![A-Za-z])", lambda match: r"\{" if match.group()[1] == "l" else r"\}"),
    (r"\\l?vert(?![A-Za-z])|\\r?vert(?![A-Za-z])", "|"),
    (r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|ln|log|exp|arcsin|arccos|arctan|infty)(?![A-Za-z])", r"\\\1 "),
    (r"\*\*", "^"),
)]  # fmt: skip
_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp")},
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan")},
}
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon "
    "phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell infty"
)
_SYMBOLS = {f"\\{name}" for name in _GREEK.split()}
_APPLIED = {
    *"fghFGHTUL",
    r"\phi",
    r"\varphi",
    r"\psi",
    r"\Gamma",
    r"\zeta",
    r"\sigma",
    r"\Phi",
    r"\Psi",
}  # f(x) is no product
_LOG_BASE = "base of log"  # of a logarithm that names none: 10 or e
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_FRACTION_NEXT = re.compile(r"(?:\\frac \{ (\d+) \} \{ (\d+) \}|(\d+) / (\d+))(?= |$)")
_POINTS, _DIGITS, _SAME = 6, 60, 40
_MAX_EXPONENT, _MAX_FACTORIAL, _MAX_TOKENS = 100_000, 2_000, 600

Formula = tuple[Any, ...]


class Unsure(Exception):
    """It cannot be said what a formula means, or whether two are the same."""


def tokens_of(text: str) -> list[str]:
    """The parts of a formula, without what only changes its looks."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return _TOKEN.findall(text)


def look_same(one: list[str], other: list[str]) -> bool:
    """Whether two formulas are written alike, but for braces around one character or command: `x^{n}` and `x^n`."""
    return _without_braces(one) == _without_braces(other)


def _without_braces(tokens: list[str]) -> list[str]:
    kept: list[str] = []
    for token in tokens:
        kept.append(token)
        if len(kept) > 3 and kept[-4] in "^_" and kept[-3] == "{" and token == "}":
            inner = kept[-2]
            if (inner.isalnum() and len(inner) == 1) or inner[1:].isalpha():  # log_23 may be read as log_2 3
                kept[-3:] = [inner]
    return kept


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    """0.1(6) as a fraction."""
    nines = int("9" * len(repeated)) * 10 ** len(fixed)
    value = int(whole + fixed + repeated or "0") - int(whole + fixed or "0")
    return rf"\frac{{{value}}}{{{nines}}}"


def parse(tokens: list[str]) -> Formula:
    """The formula that all of `tokens` make up, as nested tuples; Unsure where they do not make up exactly one."""
    if len(tokens) > _MAX_TOKENS:
        raise Unsure("too long")
    parser = _Parser(tokens)
    try:
        formula = parser.sum()
    except RecursionError:
        raise Unsure("too deep") from None
    if parser.at < len(tokens):
        raise Unsure(f"{tokens[parser.at]!r} is not understood")
    return formula


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0
        self.in_bars = 0

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def next(self) -> str:
        self.at += 1
        return self.peek(-1)

    def expect(self, token: str) -> None:
        if self.next() != token:
            raise Unsure(f"{token!r} is missing")

    def sum(self) -> Formula:
        formula = self.product()
        while self.peek() in ("+", "-"):
            formula = (self.next(), formula, self.product())
        return formula

    def product(self) -> Formula:
        formula, divided = self.signed(), False
        while True:
            if self.peek() in ("*", "/"):
                divided = self.peek() == "/"
                formula = (self.next(), formula, self.signed())
            elif self._starts_a_factor():
                if divided or (self.peek()[0] in ".0123456789" and self.peek(-1) != "!"):
                    raise Unsure("two readings: a quotient and a factor, or two numbers, side by side")
                formula = ("*", formula, self.power())
            else:
                return formula

    def _starts_a_factor(self) -> bool:
        token = self.peek()
        if token == "|":
            return not self.in_bars
        return bool(token) and (token[0].isalnum() or token in "([{." or token[0] == "\\" or token[0] == ".")

    def signed(self) -> Formula:
        if self.peek() in ("+", "-"):
            return ("*", ("number", Fraction(-1 if self.next() == "-" else 1)), self.signed())
        return self.power()

    def power(self) -> Formula:
        base = self.postfix()
        if self.peek() == "^":
            self.next()
            base = ("^", base, self.exponent())
            if self.peek() == "^":
                raise Unsure("a power of a power without braces")
        return base

    def exponent(self) -> Formula:
        return self.signed() if self.peek() in ("+", "-") else self.atom()

    def postfix(self) -> Formula:
        formula = self.atom()
        if self.peek() == "!":
            self.next()
            formula = ("!", formula)
            if self.peek() == "!":
                raise Unsure("a double factorial")
        return formula

    def atom(self) -> Formula:
        token = self.next()
        if not token:
            raise Unsure("it ends too early")
        if _NUMBER.fullmatch(token):
            return self.number(token)
        if token in _CLOSING:
            if token == "[" and self.peek() != "(":
                raise Unsure("[x] may be the whole part of x")
            formula = self.sum()
            self.expect(_CLOSING[token])
            return formula
        if token == "|":
            self.in_bars += 1
            formula = ("f", "abs", self.sum())
            self.in_bars -= 1
            self.expect("|")
            return formula
        if (token.isalpha() and token.isascii()) or token in _SYMBOLS:
            return self.symbol(token)
        if token == r"\pi":
            return ("constant", "pi")
        if token == r"\frac":
            return ("/", self.argument(), self.argument())
        if token == r"\sqrt":
            return self.root()
        if token in (r"\binom", r"\dbinom", r"\tbinom"):
            return ("binom", self.argument(), self.argument())
        if token in (r"\ln", r"\log") or token[1:] in _FUNCTIONS:
            return self.function(token[1:])
        raise Unsure(f"{token!r} is not understood")

    def number(self, token: str) -> Formula:
        value = Fraction(token)
        if self.peek() == "_":
            self.next()
            return (
                "symbol",
                f"{token.lstrip('0') or '0'}_{self.subscript()}",
            )  # digits in another base: equal as they stand
        if token.isdigit():
            part = self._proper_fraction()
            if part is not None:
                return ("number", value + part)
        return ("number", value)

    def _proper_fraction(self) -> Fraction | None:
        r"""`1/2` or `\frac{1}{2}` after a whole number: a mixed number."""
        match = _FRACTION_NEXT.match(" ".join(self.tokens[self.at : self.at + 7]))
        if match is None:
            return None
        above, below = (int(group) for group in match.groups() if group)
        if not 0 < above < below:
            raise Unsure("a number before a fraction that is not below 1")
        self.at += len(match.group().split())
        return Fraction(above, below)

    def symbol(self, token: str) -> Formula:
        name = token
        while self.peek() == "'":
            name += self.next()
        if self.peek() == "_":
            self.next()
            name += f"_{self.subscript()}"
        elif token in ("e", "i"):
            return ("constant", token)
        if self.peek() == "(" and (token in _APPLIED or name != token or not self._holds_a_symbol()):
            raise Unsure("a function that is not known")
        return ("symbol", name)

    def _holds_a_symbol(self) -> bool:
        """Whether the bracket that opens here is a factor such as (x+1), not an argument such as (0)."""
        end = self.tokens.index(")", self.at) if ")" in self.tokens[self.at :] else len(self.tokens)
        return any(token.isalpha() or token[0] == "\\" for token in self.tokens[self.at : end])

    def subscript(self) -> str:
        if self.peek() != "{":
            return self.next()
        start, depth = self.at, 0
        while True:
            depth += {"{": 1, "}": -1, "": -1000}.get(self.next(), 0)
            if depth <= 0:
                break
        inner = self.tokens[start + 1 : self.at - 1]
        if depth < 0 or not inner:
            raise Unsure("a subscript without an end")
        return "".join(inner)

    def argument(self) -> Formula:
        r"""Of `\frac` and the like: braces, or a single character."""
        if self.peek() == "{":
            return self.atom()
        token = self.peek()
        if len(token) == 1 and token.isalnum() and token.isascii():
            self.next()
            return ("number", Fraction(token)) if token.isdigit() else self._lone(token)
        raise Unsure("an argument without braces")

    @staticmethod
    def _lone(token: str) -> Formula:
        return ("constant", token) if token in ("e", "i") else ("symbol", token)

    def root(self) -> Formula:
        degree: Formula = ("number", Fraction(2))
        if self.peek() == "[":
            self.next()
            degree = self.sum()
            self.expect("]")
        if self.peek() == "(":
            return ("root", self.atom(), degree)
        return ("root", self.argument(), degree)

    def function(self, name: str) -> Formula:
        power, base = None, None
        if self.peek() == "_" and name == "log":
            self.next()
            base = self.argument()
        if self.peek() == "^":
            self.next()
            power = self.exponent()
            if power[0] != "number" or power[1] < 1:
                raise Unsure("an inverse function or a reciprocal")
        inner = self.atom() if self.peek() in _CLOSING or self.peek() == "|" else self._bare_argument()
        if name == "ln":
            formula: Formula = ("f", "ln", inner)
        elif name == "log":
            # Without a base it may be 10 or e: an unknown factor keeps both open.
            formula = ("/", ("f", "ln", inner), ("f", "ln", base) if base else ("symbol", _LOG_BASE))
        else:
            formula = ("f", _FUNCTIONS[name], inner)
        return ("^", formula, power) if power else formula

    def _bare_argument(self) -> Formula:
        first = self.power()
        if first[0] == "number" and self.peek().isalpha():
            first = ("*", first, self.power())
        if self._starts_a_factor() and self.peek()[1:] not in (*_FUNCTIONS, "ln", "log"):
            raise Unsure("it is open where a function's argument ends")
        return first


def same(one: Formula, other: Formula) -> bool:
    """Whether two formulas are the same; Unsure where a value cannot be computed."""
    left, right = exact(one), exact(other)
    if left is not None and right is not None:
        return left == right
    if any(value is not None and value.denominator > 10**20 for value in (left, right)):
        raise Unsure("many digits of what may be no fraction")
    if _has_symbols(one, r"\infty") or _has_symbols(other, r"\infty"):
        return _sign_of_infinity(one) == _sign_of_infinity(other)
    agree = all(_close(evaluate(one, point), evaluate(other, point)) for point in range(_POINTS))
    if not agree and (_has_symbols(one, _LOG_BASE) or _has_symbols(other, _LOG_BASE)):
        raise Unsure("which base a logarithm has")
    return agree


def _sign_of_infinity(formula: Formula) -> int:
    """1 or -1, and 0 for what has no infinity in it; with infinities nothing can be computed."""
    match formula:
        case ("symbol", r"\infty"):
            return 1
        case ("*", ("number", sign), ("symbol", r"\infty")) if abs(sign) == 1:
            return int(sign)
    if _has_symbols(formula, r"\infty"):
        raise Unsure("arithmetic with infinities")
    return 0


def proportional(one: Formula, other: Formula) -> bool:
    """Whether one is a constant multiple of the other, not zero: two equations that say the same."""
    if any(abs(evaluate(other, point)) < 1e-9 for point in range(_POINTS)):
        raise Unsure("an equation that always holds")
    ratios = [_mp().fdiv(*(evaluate(formula, point) for formula in (one, other))) for point in range(_POINTS)]
    return all(_close(ratio, ratios[0]) for ratio in ratios) and abs(ratios[0]) > 1e-9


def exact(formula: Formula) -> Fraction | None:
    """The value as a fraction, or None where it is none or that cannot be seen."""
    kind = formula[0]
    if kind == "number":
        return formula[1]
    if kind not in ("+", "-", "*", "/", "^"):
        return None
    left, right = exact(formula[1]), exact(formula[2])
    if left is None or right is None:
        return None
    if kind == "^":
        if (
            right.denominator != 1
            or abs(right) * max(left.numerator.bit_length(), left.denominator.bit_length()) > 10_000
        ):
            return None
        if left == 0 and right <= 0:
            raise Unsure("a power of zero")
        return left ** int(right)
    if kind == "/" and right == 0:
        raise Unsure("a division by zero")
    return {"+": left + right, "-": left - right, "*": left * right}.get(kind, left / right if right else None)


@lru_cache(maxsize=1)
def _mp() -> Any:
    import mpmath

    context = mpmath.MPContext()
    context.dps = _DIGITS
    return context


def evaluate(formula: Formula, point: int) -> Any:
    """The value, to 60 digits, where every symbol has a random value that depends on its name and `point` only."""
    try:
        value = _value(formula, point)
        if not _mp().isfinite(value):
            raise Unsure("not finite")
        return value
    except (ZeroDivisionError, ValueError, OverflowError, TypeError, RecursionError, MemoryError) as problem:
        raise Unsure(f"cannot be computed: {problem}") from problem


def _value(formula: Formula, point: int) -> Any:
    mp, (kind, *parts) = _mp(), formula
    if kind == "number":
        return mp.mpf(parts[0].numerator) / parts[0].denominator
    if kind == "constant":
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[parts[0]]
    if kind == "symbol":
        digest = hashlib.sha256(f"{parts[0]} {point}".encode()).digest()
        return mp.mpf(int.from_bytes(digest)) / mp.mpf(2) ** 254 - 2  # between -2 and 2
    if kind == "f":
        argument = _value(parts[1], point)
        if abs(argument) > _MAX_EXPONENT and parts[0] not in ("ln", "abs"):
            raise Unsure("an argument that is too large")
        return _functions()[parts[0]](argument)
    values = [_value(part, point) for part in parts]
    if kind == "!":
        if abs(values[0]) > _MAX_FACTORIAL:
            raise Unsure("a factorial that is too large")
        return mp.factorial(values[0])  # of a symbol by the gamma function
    if kind == "^":
        return _raised(*values)
    if kind == "root":
        degree = values[1]
        if (
            values[0].imag == 0
            and values[0].real < 0
            and degree == int(degree)
            and int(degree) % 2
            and not _has_symbols(parts[0])
        ):
            return -mp.power(-values[0], 1 / degree)
        return _raised(values[0], 1 / degree)
    if kind == "binom":
        return mp.binomial(*values)
    return {"+": mp.fadd, "-": mp.fsub, "*": mp.fmul, "/": mp.fdiv}[kind](*values)


def _raised(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _MAX_EXPONENT or (base == 0 and exponent == 0):
        raise Unsure("an exponent that is too large, or 0 to the 0")
    return _mp().power(base, exponent)


def _has_symbols(formula: Formula, name: str | None = None) -> bool:
    if formula[0] == "symbol":
        return name is None or formula[1] == name
    return any(isinstance(part, tuple) and _has_symbols(part, name) for part in formula[1:])


@lru_cache(maxsize=1)
def _functions() -> dict[str, Callable[[Any], Any]]:
    mp = _mp()
    return {name: getattr(mp, name) for name in _FUNCTIONS.values()} | {"ln": mp.log, "abs": abs}


def _close(one: Any, other: Any) -> bool:
    size = max(abs(one), abs(other))
    return bool(abs(one - other) <= size * _mp().mpf(10) ** -_SAME or size < _mp().mpf(10) ** -_SAME)
