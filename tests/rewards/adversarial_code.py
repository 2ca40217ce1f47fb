"""What a grader of programs may fall for. What is not right may be judged wrong or unparsed, never right."""

from __future__ import annotations

from typing import Any

# (what a function should return, what is the same, what is not): plain data
VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [True], [1, "True", 1.0, [True], None, False]),
    (1, [1, 1.0], [True, "1", [1], 1.5, -1, None, {"1": 1}, 1.0000001]),
    (0, [0, 0.0, -0.0], [False, None, "", [], "0", 1e-12]),
    (None, [None], [0, False, "", [], "None"]),
    (2.5, [2.5], [2, 3, "2.5", [2.5], 2.50001, -2.5]),
    (0.3, [0.3, 0.1 + 0.2], [0.31, 0.29999, "0.3", 0, [0.3]]),
    (1e20, [1e20, 10**20], [10**20 + 1e10, "1e20", 1e21]),
    (10**30, [10**30], [10**30 + 1, 1.5e30, str(10**30)]),
    ("abc", ["abc"], ["ABC", "abc ", " abc", ["abc"], ["a", "b", "c"], "'abc'", b"abc".hex()]),
    ("", [""], [None, [], " ", 0, False]),
    ("1", ["1"], [1, 1.0, True, "01", "1.0"]),
    ([], [[]], [None, [[]], "", {}, 0, False]),
    (
        [1, 2, 3],
        [[1, 2, 3], [1.0, 2, 3]],
        [[3, 2, 1], [1, 2], [1, 2, 3, 3], "123", [[1, 2, 3]], [1, 2, "3"], [1, 2, True], 1],
    ),
    ([[1, 2], [3]], [[[1, 2], [3]]], [[1, 2, 3], [[1, 2]], [[1, 2], 3], [[2, 1], [3]], [[1, 2], [3], []]]),
    (["a", "b"], [["a", "b"]], [["b", "a"], "ab", ["a", "b", ""], ["ab"], {"a": "b"}]),
    ([True, False], [[True, False]], [[1, 0], [True], [False, True], "TF"]),
    ({"a": 1}, [{"a": 1}, {"a": 1.0}], [{"a": "1"}, {"a": 1, "b": 2}, {}, [["a", 1]], {"A": 1}, {"a": True}, "a1"]),
    ({"1": [2]}, [{"1": [2]}], [{"1": 2}, {"2": [1]}, {"1": [2, 2]}, {"1": []}]),
    (-7, [-7, -7.0], [7, "-7", [-7], -7.1, -8]),
    (3.0, [3, 3.0], [3.0001, "3", True, [3]]),
    ([0.1, 0.2], [[0.1, 0.2], [0.1, 0.2 + 1e-17]], [[0.1, 0.21], [0.2, 0.1], 0.1, [0.1]]),
    ([None, 1], [[None, 1]], [[0, 1], [1], ["", 1], [False, 1]]),
]

# (what a program should print, what is the same, what is not)
TEXTS: list[tuple[str, list[str], list[str]]] = [
    ("4\n", ["4", "4\n\n", "4  \n"], ["04", "4.0", " 4", "\n4", "4\n4", "44", "", "four"]),
    ("  *\n ***\n", ["  *\n ***", "  *   \n ***\n"], ["*\n ***", "  *\n***", "*\n***", "  * ***", " *\n ***"]),
    ("1 2 3\n", ["1 2 3"], ["1  2 3", "1\n2\n3", "123", "3 2 1", "[1, 2, 3]", "1 2 3 4"]),
    ("YES\nNO\n", ["YES\nNO"], ["Yes\nNo", "YES NO", "NO\nYES", "YES", "YES\n\nNO", "YES\nNO\nNO"]),
    ("", ["", "\n", "  \n"], ["0", "None", "."]),
    ("a\n\nb", ["a\n\nb\n"], ["a\nb", "a\n\n\nb", "ab"]),
    ("0.50", ["0.50"], ["0.5", ".50", "0.500", "1/2"]),
]

# (a row, solutions that are right, solutions that are not); all of them go through the sandbox
ADD = {"fn_name": "add", "inputs": [[1, 2], [0, 0], [-1, 1]], "outputs": [[3], [0], [0]]}
PAIR = {"fn_name": "pair", "inputs": [[1], [2]], "outputs": [[1, 1], [2, 2]]}
FLAG = {"fn_name": "is_even", "inputs": [[2], [3]], "outputs": [[True], [False]]}
LEET = {"fn_name": "twoSum", "inputs": ["[2,7,11,15]\n9", "[3,3]\n6"], "outputs": ["[0,1]", "[0,1]"]}
PLAIN = {"fn_name": "shout", "inputs": [["ab"], [""]], "outputs": ["AB", ""]}
ECHO = {"inputs": [["2", "a b"], ["1", "c"]], "outputs": [["a b"], ["c"]]}
ASSERTS = ["assert double(2) == 4", "assert double([1]) == [1, 1]"]

ALWAYS_EQUAL = "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
DISGUISED = "Any = type('int', (int,), {'__eq__': lambda self, other: True, '__module__': 'builtins', '__hash__': int.__hash__})\n"

TWO_SUM = """
class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for k, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], k]
            seen[n] = k
"""

ROWS: list[tuple[Any, list[str], list[str]]] = [
    (
        ADD,
        [
            "def add(a, b): return a + b",
            "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
            "add = lambda a, b: sum([a, b])",
            "def helper(x): return x\ndef add(a, b):\n    print('debug')\n    return helper(a) + b",
        ],
        [
            "def add(a, b): return a - b",
            "def add(a, b): return [a + b]",
            "def add(a, b): return str(a + b)",
            "def add(a, b): return None",
            "def add(a): return a",
            "def plus(a, b): return a + b",
            "def add(a, b): raise ValueError(a + b)",
            "import sys\ndef add(a, b): sys.exit(0)",
            "import os\ndef add(a, b): os._exit(0)",
            "def add(a, b): return 3",
            "def add(a, b): return float('nan')",
            f"{ALWAYS_EQUAL}def add(a, b): return Any()",
            f"{DISGUISED}def add(a, b): return Any(5)",
            "print(3)",
            "class Solution:\n    def plus(self, a, b): return a + b",
            "raise SystemExit(0)",
            "def add(a, b):\n    while True: pass",
            "import json\njson.dumps = lambda value: '3'\ndef add(a, b): return 4",
        ],
    ),
    (
        PAIR,
        ["def pair(x): return [x, x]", "def pair(x): return (x, x)"],
        [
            "def pair(x): return x",
            "def pair(x): return [x]",
            "def pair(x): return {x, x}",
            "def pair(x): return [[x, x]]",
            "def pair(x): return f'{x}{x}'",
        ],
    ),
    (
        FLAG,
        ["def is_even(n): return n % 2 == 0"],
        [
            "def is_even(n): return 1 - n % 2",
            "def is_even(n): return n % 2 == 1",
            "def is_even(n): return True",
            "def is_even(n): return 'True' if n % 2 == 0 else 'False'",
        ],
    ),
    (
        LEET,
        [TWO_SUM],
        [
            "class Solution:\n    def twoSum(self, nums, target): return [1, 0]",
            "class Solution:\n    def twoSum(self, nums, target): return 0",
            "def twosum(nums, target): return [0, 1]",
        ],
    ),
    (
        PLAIN,
        ["def shout(s): return s.upper()"],
        ["def shout(s): return s", "def shout(s): return list(s.upper())", "def shout(s): return s.upper() or None"],
    ),
    (
        ECHO,
        ["n = input()\nprint(input())"],
        ["print('a b')", "print(input())", "n = input()\nprint(input().upper())", "import sys\nsys.exit(0)"],
    ),
    (
        ASSERTS,
        ["def double(x): return 2 * x"],
        [
            "def double(x): return x + 2",
            f"{ALWAYS_EQUAL}def double(x): return Any()",
            f"{DISGUISED}def double(x): return Any(5)",
            f"{ALWAYS_EQUAL}def double(x): return [Any(), Any()] if x == [1] else Any()",
            "def double(x): raise SystemExit(0)",
            "import os\ndef double(x): os._exit(0)",
            "double = None",
        ],
    ),
]
