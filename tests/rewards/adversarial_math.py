r"""Pairs that a grader of mathematics may fall for: (reference, answers that are right, answers that are not).

An answer that is not right may be judged wrong or incomparable, never right.
"""

from __future__ import annotations

CASES: list[tuple[str, list[str], list[str]]] = [
    # a line break inside the answer must not reduce it to its last number
    (
        "4",
        ["4", "4.0", "\\frac{8}{2}", "2^2", "\\sqrt{16}", "2 +\n2"],
        ["3 +\n4", "3\n4", "1,\n4", "14", "x = 3\nx = 4", "-4", "|4", "4 + 0.0001"],
    ),
    (
        "7",
        ["3 +\n4", "7.", "\\dfrac{14}{2}", "14/2", "\\left(7\\right)"],
        ["3 + 5", "3 \\cdot 4", "77", "7_8", "7'", "7 +", "07 08"],
    ),
    # matrices
    (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        [
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
            "\\begin{bmatrix} 1 & 2 \\\\\n 3 & 4 \\end{bmatrix}",
            "\\begin{pmatrix} \\frac{2}{2} & 2 \\\\ 3 & 2^2 \\end{pmatrix}",
        ],
        [
            "4",
            "\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}",
            "\\begin{pmatrix} 1 & 2 & 3 & 4 \\end{pmatrix}",
            "\\begin{pmatrix} 4 \\end{pmatrix}",
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}",
            "1, 2, 3, 4",
            "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}",
        ],
    ),
    (
        "\\begin{pmatrix} 5 \\\\ -1 \\end{pmatrix}",
        ["\\begin{pmatrix} 5 \\\\[2pt] -1 \\end{pmatrix}", "\\left(\\begin{array}{c} 5 \\\\ -1 \\end{array}\\right)"],
        ["-1", "5", "\\begin{pmatrix} -1 \\\\ 5 \\end{pmatrix}", "\\begin{pmatrix} 5 & -1 \\end{pmatrix}", "(5, -1)"],
    ),
    # roots, signs and brackets
    (
        "5(\\sqrt{3}+1)",
        ["5\\sqrt{3}+5", "5(√3+1)", "5 + 5\\sqrt3", "5\\left(1+\\sqrt{3}\\right)"],
        ["7(\\sqrt{3}-1)", "7(√3-1)", "5(√3-1)", "5\\sqrt{3}+1", "5(\\sqrt{3+1})", "5\\sqrt{3+1}", "1"],
    ),
    (
        "\\sqrt{2}+\\sqrt{3}",
        ["\\sqrt{3}+\\sqrt{2}", "\\sqrt2+\\sqrt3", "\\sqrt{5+2\\sqrt{6}}"],
        ["\\sqrt{5}", "\\sqrt{2+3}", "\\sqrt{2}-\\sqrt{3}", "3.14626", "\\sqrt{2}\\sqrt{3}", "\\sqrt{23}"],
    ),
    (
        "2\\sqrt{2}",
        ["\\sqrt{8}", "\\sqrt 8", "\\frac{4}{\\sqrt{2}}", "2^{3/2}", "8^{\\frac12}"],
        ["\\sqrt{2}", "2^{2/3}", "2.828", "\\sqrt[3]{8}", "22", "2\\sqrt{-2}", "\\sqrt[2]{2}", "\\sqrt82"],
    ),
    (
        "-2",
        ["\\sqrt[3]{-8}", "-\\sqrt{4}", "−2", "1-3"],
        ["2", "\\sqrt{4}", "\\sqrt[3]{8}", "|{-2}|", "|-2|", "(-2)^2"],
    ),
    # numbers in another base
    ("1010_2", ["1010_{2}", "01010_2"], ["1010_3", "1010", "10", "1010_{10}", "101_2", "10102", "1010^2"]),
    ("2A3_{16}", ["2A3_{16}"], ["2A3", "2A4_{16}", "2A3_{15}", "675"]),
    # words and units
    (
        "3\\% \\text{ profit}",
        ["3\\% \\text{ Profit}", "3% profit"],
        ["3% Loss", "3\\% \\text{ loss}", "3\\%", "5% profit", "3"],
    ),
    (
        "12 \\text{ cm}",
        ["12", "12\\text{ cm}", "12 cm", "12 \\mathrm{cm}"],
        ["12 \\text{ m}", "12 \\text{ km}", "12 \\text{ apples}", "1.2 cm", "12 \\text{ cm}^2"],
    ),
    (
        "\\text{east}",
        ["east", "East", "\\text{ East }", "\\mathrm{east}"],
        ["\\text{seat}", "seat", "teas", "west", "e", "\\text{not east}", "\\text{eastern}"],
    ),
    (
        "\\text{(C)}",
        ["C", "(C)", "\\text{C}", "\\textbf{(C)}"],
        ["\\text{(D)}", "B", "(A), (C)", "CC", "\\text{not (C)}", "C+D"],
    ),
    ("\\text{Yes}", ["yes", "Yes", "\\mathrm{Yes}"], ["No", "\\text{no}", "Yes and no", "\\text{eyes}", "1"]),
    (
        "60^\\circ",
        ["60", "60°", "60^{\\circ}", "60 \\text{ degrees}"],
        ["60 \\text{ cm}", "6", "60^2", "60^0", "60 \\text{ percent}"],
    ),
    ("\\$18.50", ["18.5", "$18.50", "18.50 \\text{ dollars}"], ["18.5 \\text{ cents}", "1850", "18,50", "\\$1850"]),
    ("50\\%", ["50%", "50", "50 \\text{ percent}"], ["0.5\\%", "5\\%", "50^\\circ", "50 \\text{ dollars}"]),
    # tuples, sets, intervals, lists
    (
        "(1, 2)",
        ["(1,2)", "\\left(1, 2\\right)", "(\\frac{2}{2}, 2)"],
        ["(2, 1)", "1, 2", "[1, 2]", "(1, 2]", "\\{1, 2\\}", "2", "(1, 2, 2)", "1.2", "(1 2)", "12"],
    ),
    (
        "\\{1, 2, 3\\}",
        ["\\{3, 1, 2\\}", "\\left\\{1,2,3\\right\\}"],
        ["(1, 2, 3)", "\\{1, 2\\}", "\\{1, 2, 4\\}", "\\{1, 2, 3, 4\\}", "\\{1, 2, 3, 3\\}", "6"],
    ),
    (
        "[0, 1)",
        ["\\left[0, 1\\right)", "[0,1)"],
        ["(0, 1)", "[0, 1]", "(0, 1]", "[1, 0)", "0 \\le x < 1 \\text{ or } x = 5"],
    ),
    (
        "(-\\infty, 0) \\cup (2, \\infty)",
        ["(2, \\infty) \\cup (-\\infty, 0)", "(-\\infty,0)\\cup(2,+\\infty)"],
        [
            "(-\\infty, 0) \\cap (2, \\infty)",
            "(-\\infty, 0] \\cup (2, \\infty)",
            "(-\\infty, 0)",
            "(-\\infty, 2)",
            "(-\\infty, \\infty)",
            "(0, 2)",
        ],
    ),
    (
        "-1, 3",
        ["3, -1", "-1,3", "3 \\text{ or } -1", "x = -1, x = 3", "1 \\pm 2"],
        ["-1", "3", "1, 3", "-1, 3, 5", "-13", "(-1, 3)", "1 \\pm 3"],
    ),
    (
        "1 \\pm \\sqrt{5}",
        ["1+\\sqrt{5}, 1-\\sqrt{5}", "1±√5", "1-\\sqrt{5}, 1+\\sqrt{5}"],
        ["1+\\sqrt{5}", "\\pm\\sqrt{5}", "1 \\pm \\sqrt{6}", "-1 \\pm \\sqrt{5}"],
    ),
    (
        "10,000",
        ["10000", "10{,}000", "10\\,000", "10,\\!000", "10^4"],
        ["10", "10, 0", "100,00", "(10, 000)", "1,000", "10.000"],
    ),
    # fractions and decimals
    (
        "\\frac{1}{3}",
        ["1/3", "\\frac13", "0.\\overline{3}", "\\frac{2}{6}", "3^{-1}", "\\tfrac{1}{3}"],
        ["0.333", "0.3333333333333333", "\\frac{3}{1}", "13", "\\frac{1}{3}\\%", "1 \\div 3.0001", "\\frac{1}{-3}"],
    ),
    (
        "\\frac{5}{2}",
        ["2.5", "2\\frac{1}{2}", "2 \\frac12", "2 1/2", "\\frac{10}{4}"],
        ["2/5", "2.05", "2 + 1/3", "25", "\\frac{5}{2}x", "\\frac{2}{1/2}", "2\\frac{2}{1}"],
    ),
    (
        "1",
        ["1.0", "\\frac{2}{2}", "e^0", "\\sin^2 x + \\cos^2 x", "\\frac{x}{x}"],
        ["2\\frac{1}{2}", "2 1/2", "2 \\frac12", "1x", "i", "1 + 10^{-20}", "\\frac{1}{0}", "0^0", "1 = 2", "f(1)"],
    ),
    (
        "0",
        ["0.0", "\\frac{0}{5}", "x - x", "\\ln 1", "\\sin \\pi"],
        ["f(0)", "\\pi f'(0)", "\\infty", "\\frac{0}{0}", "10^{-41}", "-x", "\\emptyset", "o", "x \\cdot y(0)"],
    ),
    ("21/2", ["10.5", "\\frac{21}{2}"], ["2 1/2", "2\\frac{1}{2}", "2.5", "21.2", "2/21"]),
    (
        "1.5 \\times 10^3",
        ["1500", "1.5*10^3", "1,500"],
        ["1.5", "15000", "1.5 \\times 103", "1.5 + 10^3", "1.5 \\times 10^{-3}"],
    ),
    ("10^{-45}", ["10^{-45}", "\\frac{1}{10^{45}}"], ["0", "2 \\cdot 10^{-45}", "10^{45}", "-10^{-45}"]),
    # formulas
    (
        "x^2+2x+1",
        ["(x+1)^2", "1+2x+x^2", "x(x+2)+1", "(1+x)(x+1)"],
        ["(x+1)", "x^2+2x", "(y+1)^2", "x^2+2x-1", "x^{2+2x+1}", "x2+2x+1", "(x-1)^2", "X^2+2X+1"],
    ),
    (
        "\\frac{x}{2}",
        ["0.5x", "\\frac12 x", "x/2", "\\frac{1}{2}x"],
        ["1/2x", "\\frac{2}{x}", "x^{1/2}", "x-2", "\\frac{x}{2}+C"],
    ),
    (
        "y = 2x + 3",
        ["2x+3", "y = 3 + 2x", "2x - y + 3 = 0", "y - 3 = 2x", "2y = 4x + 6"],
        ["y = 2x - 3", "y = 3x + 2", "x = 2y + 3", "3", "y > 2x + 3", "2x + y + 3 = 0", "y = 2x + 3 + z"],
    ),
    ("x > 5", ["5 < x", "x \\gt 5"], ["x \\ge 5", "x < 5", "5 > x", "5", "x > 6", "x = 5"]),
    (
        "-1 \\le x < 2",
        ["-1 \\leq x < 2", "2 > x \\ge -1"],
        ["-1 < x \\le 2", "-1 \\le x \\le 2", "-1 \\le y < 2", "[-1, 2]", "-1 \\le x"],
    ),
    (
        "e^{2\\pi i/3}",
        [
            "e^{\\frac{2\\pi i}{3}}",
            "\\cos \\frac{2\\pi}{3} + i \\sin \\frac{2\\pi}{3}",
            "-\\frac12 + \\frac{\\sqrt3}{2} i",
        ],
        ["e^{\\pi i/3}", "1", "e^{2\\pi/3}", "-\\frac12 - \\frac{\\sqrt3}{2} i"],
    ),
    ("\\log_2 8", ["3", "\\frac{\\ln 8}{\\ln 2}"], ["\\log 8", "2", "\\log_8 2", "\\log 28"]),
    (
        "\\log 6",
        ["\\log 2 + \\log 3", "\\log(6)"],
        ["\\ln 6", "\\log_{10} 7", "\\log 2 \\cdot \\log 3", "\\log 5", "\\log_2 6"],
    ),
    ("\\ln 2 \\pi", ["\\ln 2 \\pi"], ["\\ln(2\\pi)", "\\pi \\ln 2", "2\\pi"]),
    (
        "2\\pi",
        ["\\pi \\cdot 2", "2π", "\\pi+\\pi", "2 pi"],
        ["6.28", "2p", "2^\\pi", "\\pi^2", "2 + \\pi", "2\\pi r", "\\frac{\\pi}{2}"],
    ),
    ("n!", ["n \\cdot (n-1)!", "n!"], ["n", "(n+1)!", "n!!", "(n-1)!", "n^n"]),
    (
        "\\binom{5}{2}",
        ["10", "\\frac{5!}{2!3!}", "\\dbinom{5}{3}"],
        ["\\frac{5}{2}", "20", "\\binom{5}{1}", "2.5", "52"],
    ),
    ("x_1 + x_2", ["x_2 + x_1", "x_{1} + x_{2}"], ["x_1 + x_3", "x_1 - x_2", "2x_1", "x1 + x2", "x + x", "y_1 + y_2"]),
    ("|x|", ["|x|", "|-x|", "\\sqrt{x^2}"], ["x", "-x", "x^2", "|x|^2"]),
    (
        "\\sin 2x",
        ["2 \\sin x \\cos x", "\\sin(2x)"],
        ["\\sin 2", "2\\sin x", "\\sin x^2", "\\sin^2 x", "\\sin 2 \\cdot x", "sin"],
    ),
    ("\\text{Monday}", ["Monday", "monday"], ["Sunday", "\\text{Mon}", "\\text{day on M}", "Monday, Tuesday"]),
    ("3东西", ["3 东西"], ["3西东", "3", "东西3", "٣东西"]),
    ("abc", ["abc"], ["cab", "ab", "abcd", "a+b+c", "ABC"]),
    (
        "\\text{no solution}",
        ["\\text{No solution}", "no solution"],
        ["\\text{one solution}", "0", "\\emptyset", "\\text{solution}"],
    ),
]


def pairs() -> list[tuple[str, str, bool]]:
    """(reference, answer, whether it is right)."""
    return [
        (truth, answer, verdict)
        for truth, right, wrong in CASES
        for answers, verdict in ((right, True), (wrong, False))
        for answer in answers
    ]
