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

# "reference ~ answer", three spaces between pairs: no two of these are the same, whichever is the reference.
NOT_THE_SAME = r"""
x^2 ~ x^{2}1   12 ~ 1 2   12 ~ 1{2}   12 ~ {1}{2}   12 ~ 1\,2   12 ~ 1\!2   12 ~ 1\;2   12 ~ 1\ 2   12 ~ 1\quad 2   6 ~ 2~3   6 ~ 2 3
23 ~ 2(3)   0.5 ~ 0,5   1,234 ~ 1.234   1234 ~ 1,2,3,4   1234 ~ 1,2 34   1000 ~ 1,\! 000   1000,1000 ~ 1000   2 ~ 1,1   2 ~ 2,2
2, 2 ~ 2   1,2 ~ 2,1,1   \frac{1}{2} ~ 1/2/1/1.0/2   \frac{1}{2} ~ \frac{1}{2}{3}   \frac{1}{2} ~ \frac{1}{2   \frac{1}{2} ~ \frac12 3
\frac{1}{23} ~ \frac1 23   \frac{12}{3} ~ \frac123   \frac{1}{2} ~ -\frac{1}{2}   \frac{3}{2} ~ 3 \frac{1}{2}
\frac{7}{2} ~ 3 \cdot \frac{1}{2}   \frac{3}{2} ~ 1 \frac{3}{6}x   -\frac{5}{2} ~ -2 + \frac{1}{2}   -\frac{3}{2} ~ -2 \frac{1}{2}
-1.5 ~ -2\frac{1}{2}   x^{-1} ~ \frac{1}{x^{2}}   \sin^{-1} x ~ \frac{1}{\sin x}   \sin^{-1}(x) ~ (\sin x)^{-1}   \sin^2 x ~ \sin x^2
\sin(x)^2 ~ \sin(x^2)   \sin 2x ~ \sin(2)x   \log x^2 ~ (\log x)^2   \log^2 x ~ \log x^2   \log_{2} 3x ~ (\log_2 3) x   \ln ab ~ b\ln a
\tan^{-1} 1 ~ \cot 1   \sqrt{x^2} ~ x   \sqrt{x^2} ~ -x   x ~ |x|   |x|y|z| ~ |x||y||z|   |a|b|c| ~ |a b c|   (a,b) ~ [a,b]
(a,b] ~ [a,b)   (1,2) ~ (1,2   (1,2),(3,4) ~ (1,3),(2,4)   (1,2),(3,4) ~ (2,1),(4,3)   (1,2),(3,4) ~ (1,2,3,4)   \{1,2\} ~ \{\{1\},2\}
\{1,2\},\{3\} ~ \{1,2,3\}   \emptyset ~ \{\}   \emptyset ~ 0   \emptyset ~ \phi   \emptyset ~ \{\emptyset\}   \infty ~ -\infty
\infty ~ 2\infty   \infty ~ \infty+1   -\infty ~ \infty   \text{A} ~ \text{B}   \text{A and B} ~ \text{A}   \text{A, B} ~ \text{A}
A,B ~ A   AB ~ BA   BC ~ CB   \overline{AB} ~ AB   \vec{a} ~ a   \overline{ab} ~ ab   \hat{x} ~ x   \bar{x} ~ x   \dot{x} ~ x   x' ~ x
x'' ~ x'   f(x) ~ fx   f(2) ~ 2f   f(x)=x ~ x=f   y=f(x) ~ y=fx   a_n ~ a_{n+1}   a_n ~ a n   a_1 2 ~ a_{12}   2^{3^2} ~ 2^3^2
2^{3^2} ~ (2^3)^2   2^{-3} ~ 2^-3+1   -2^2 ~ (-2)^2   (-2)^2 ~ -2^2   -x^2 ~ (-x)^2   1/2x ~ \frac{1}{2}x   1/(2x) ~ 1/2x
a/bc ~ a/(bc)   a/bc ~ (a/b)c   1/2\pi ~ \frac{1}{2\pi}   \pi/2 ~ \frac{\pi}{3}   3! ~ 3   3!! ~ 6   (3!)! ~ 3!!   10! ~ 10   5\% ~ 0.05
5\% ~ 5\$   0.05 ~ 5\%   0.05\% ~ 5   50\% ~ \frac{1}{2}   50\% ~ 0.5   150\% ~ 1.5   1.5 ~ 150\%   200\% ~ 2   \$5 ~ 5\%
\$5 ~ 5 cents   5 cents ~ \$5   5 \text{ dollars} ~ 5 \text{ cents}   5 \text{ m} ~ 5 \text{ cm}   5 m ~ 5 cm   5 m ~ 5m^2   5 m/s ~ 5 m
5 m/s ~ 5 km/h   5 \text{ m/s} ~ 5 \text{ km/h}   5 \text{ m/s} ~ 5 \text{ m}   5 \text{ cm}^2 ~ 5 \text{ cm}^3
5 \text{ cm}^2 ~ 5 \text{ cm}   25 \text{ cm} ~ 5^2 \text{ cm}^2
3 \text{ hours } 20 \text{ minutes} ~ 3 \text{ minutes } 20 \text{ hours}   3 \text{ hours } 20 \text{ minutes} ~ 60
3 \text{ feet } 4 \text{ inches} ~ 34   3\text{ hours }20\text{ minutes} ~ 320   5 \text{ km} ~ 5 \text{ miles}
5 \text{ days} ~ 5 \text{ weeks}   10:30 \text{ a.m.} ~ 10:30 \text{ p.m.}   10:30 ~ 1030   10:30 ~ 1:3   10:30 ~ 10/30   2:3 ~ 3:2
2:3 ~ 4:6:8   2:3 ~ 23   1:2 ~ \frac{1}{2}x   30^\circ ~ 30 rad   30^\circ ~ 30 \text{ radians}   \frac{\pi}{6} ~ 30^\circ
30^\circ ~ \frac{\pi}{6}   \sin 30^\circ ~ \sin 30   \sin 30^\circ ~ \frac12+1   \cos 60^\circ ~ \cos 60   x^\circ ~ x^0
10^\circ ~ 10^{0}   1 ~ 10^0 0   100 ~ 10^\circ   1 ~ x^\circ   3 ~ \sqrt{9}i   i ~ -i   i^2 ~ 1   3+4i ~ 4+3i   3+4i ~ 3+4j
3+4i ~ 3-4i   e^x ~ ex   e^{x} ~ \exp   e ~ 2.71828   \pi ~ 3.14159   \pi ~ \frac{22}{7}
\pi ~ 3.14159265358979323846264338327950288419716939937510   \sqrt{2} ~ 1.41421356237309504880168872420969807856967187537694   e ~ c
1.999999999999999999999999999 ~ 2   0.\overline{9} ~ 0.9   0.1\overline{6} ~ 0.16   0.\overline{12} ~ 0.12
0.\overline{12} ~ 0.\overline{21}   0.\dot{3} ~ 0.3   0.333\ldots ~ 0.333   0.333... ~ 0.333   1, 2, \ldots ~ 1, 2
1,2,3,\dots,10 ~ 1,2,3,10   1,2,\dots ~ 1,2,\dots,\dots   x \in \mathbb{R} ~ x   x \in [1,2] ~ x \in (1,2)   x \in (1,2) ~ x = (1,2)
x \notin A ~ x \in A   x \ne 1 ~ x = 1   x \neq 1 ~ x \geq 1   x \not= 1 ~ x = 1   x \not\in A ~ x \in A   x \nmid 3 ~ x \mid 3
x = 1 ~ y = 1   x=1, y=2 ~ x=2, y=1   x=1,y=2 ~ 1,2   x=1,y=2 ~ 2,1   x=1, y=2 ~ x=1   x=2 ~ x^2=4   x^2=4 ~ x=2   x^2=y^2 ~ x=y
x=y ~ x=-y   x=y ~ 2x=3y   (x-1)(x-2)=0 ~ x=1   x=0 ~ y=0   0=x ~ 0=x^2   x+y=1 ~ x+y=-1   x+y=1 ~ x+y+1=0   x-y=0 ~ y+x=0
y = \sqrt{x} ~ y^2 = x   y = |x| ~ y = x   y=x ~ y=x+0z+1   xy=1 ~ x=1/y+y   x<1 ~ x>1   x<1 ~ 1<x   x<1 ~ x\le1   x<y ~ y<x
1<x<2 ~ 2<x<1   1<x<2 ~ 1<x,x<3   1<x\le2 ~ 1\le x<2   x<1 \text{ or } x>2 ~ x<1 \text{ and } x>2   x<1 \text{ or } x>2 ~ x<1, x<2
1 < x ~ x > 2   -x<1 ~ x<-1   x \equiv 1 \pmod{3} ~ x \equiv 1 \pmod{4}   x \equiv 1 \pmod 3 ~ x \equiv 1   1 \pmod 3 ~ 1 \pmod 4
3x \equiv 1 ~ x \equiv 1   A \cup B ~ A \cap B   A \cup B ~ A, B   A \setminus B ~ AB   A \times B ~ B \times A   A \cdot B ~ A + B
a \times b ~ b \times a + 1   A^T ~ A   A^{-1} ~ A   A^c ~ Ac   \bar{A} ~ A   \neg p ~ p   p \to q ~ q \to p   p \land q ~ p \lor q
\forall x ~ \exists x   \int_0^1 x dx ~ \int_0^2 x dx   \int x ~ x   \sum_{i=1}^n i ~ \sum_{i=1}^n i^2   \lim_{x\to0} x ~ x
\lfloor 2.5 \rfloor ~ 2.5   \lceil 2.5 \rceil ~ \lfloor 2.5 \rfloor   \lfloor x \rfloor ~ x   [x] ~ x   \{x\} ~ x   \max(1,2) ~ (1,2)
\gcd(4,6) ~ \text{lcm}(4,6)   \gcd(4,6) ~ (4,6)   n \choose k ~ n/k   \binom{n}{k} ~ \binom{k}{n}   \binom{n}{k} ~ \frac{n}{k}
{5 \choose 2} ~ 52   P(5,2) ~ C(5,2)   _5P_2 ~ _5C_2   A_5^2 ~ C_5^2   C_5^2 ~ C_5^3   2^{n} ~ 2n   2^n ~ 2^{n+1}   2n+1 ~ 2(n+1)
2n-1 ~ 2n+1   n^2 ~ n2   (n+1)! ~ n!+1   n!/2 ~ (n/2)!   3\sqrt[3]{2} ~ 3\sqrt{2}   \sqrt[3]{2} ~ \sqrt{2}^3   \sqrt 23 ~ \sqrt{23}
\sqrt23 ~ \sqrt{23}   \sqrt{2}3 ~ \sqrt{23}   \sqrt{2 3} ~ \sqrt{23}   \sqrt2x ~ \sqrt{2x}   \sqrt x+1 ~ \sqrt{x+1}
\sqrt{a+b} ~ \sqrt{a}+\sqrt{b}   sqrt(2)/2 ~ sqrt(2/2)   sqrt2/2 ~ sqrt(1)   \frac{\sqrt{2}}{2} ~ \sqrt{\frac{2}{2}}
-\frac{1}{x} ~ \frac{-1}{-x}   \frac{a}{b}+c ~ \frac{a+c}{b}   \frac{1}{1+\frac{1}{x}} ~ \frac{1}{1}+\frac{1}{x}   1_2 ~ 1_3
12_{10} ~ 12_{8}   12_8 ~ 10   FF_{16} ~ FF_{15}   ABC_{16} ~ ABC   ABC_{16} ~ BAC_{16}   2BC_{16} ~ 2CB_{16}   2AB_{16} ~ 2BA_{16}
1A2_{16} ~ 12A_{16}   0_2 ~ 00_3   11_2+1_2 ~ 11_2   1.01_2 ~ 1.01   101_{\text{two}} ~ 101   101_{two} ~ 101_{three}   \text{two} ~ 2
\text{two} ~ \text{three}   \text{two} ~ \text{owt}   \text{one-half} ~ \text{one half dozen}   \text{twenty-one} ~ \text{twenty}
\text{Tom and Jerry} ~ \text{Jerry}   \text{Tom, Jerry} ~ \text{Tom}   \text{Tom} > \text{Jerry} ~ \text{Jerry} > \text{Tom}
\text{even} ~ \text{odd}   \text{even} ~ \text{not even}   \text{true} ~ \text{false}   \text{True} ~ \text{Not True}
\text{Yes} ~ \text{No}   \text{No} ~ No, Yes   \text{a circle} ~ \text{a line}   \text{increasing} ~ \text{decreasing}
\text{ellipse} ~ \text{parabola}   \text{all real numbers} ~ \text{no real numbers}   \text{all } x > 0 ~ x > 0, x < 1
\text{Monday } 5 ~ \text{Tuesday } 5   5 \text{ apples} ~ 5 \text{ oranges}   5 \text{ apples} ~ 5 \text{ apples}, 6
\text{first} ~ \text{second}   1st ~ 1   1^{st} ~ 1   2^{nd} ~ 2   4^{th} ~ 4   4th ~ 4h   \text{Jan } 5 ~ \text{Feb } 5
\text{C and D} ~ \text{D}   \text{(A) 5} ~ 5, A   \text{A} ~ a   \text{I} ~ i   \text{I only} ~ \text{II only}
\text{I and II} ~ \text{I and III}   I, II ~ I   II ~ I   III ~ II   IV ~ VI   XI ~ IX   iv ~ vi   MDC ~ MCD   pq ~ qp   ACB ~ ABC
\triangle ABC ~ \triangle ACB   \angle ABC ~ \angle ACB   AB = CD ~ AC = BD   AB \parallel CD ~ AB \perp CD
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}1&2\end{pmatrix}   \begin{pmatrix}1\\2\end{pmatrix} ~ (1,2)
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\4&3\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ 2\begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}^T
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}\begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{vmatrix}1&2\\3&4\end{vmatrix}
\begin{vmatrix}1&2\\3&4\end{vmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{cases}x=1\\y=2\end{cases} ~ \begin{cases}x=2\\y=1\end{cases}
\begin{cases}x&x>0\\-x&x<0\end{cases} ~ \begin{cases}x&x<0\\-x&x>0\end{cases}
\begin{array}{c}1\\2\end{array} ~ \begin{pmatrix}2\\1\end{pmatrix}
\left(\begin{array}{c}1\\2\end{array}\right) ~ \left|\begin{array}{c}1\\2\end{array}\right|
\left[\begin{array}{c}1\\2\end{array}\right) ~ \left(\begin{array}{c}1\\2\end{array}\right]   \frac{x+1}{x-1} ~ \frac{x-1}{x+1}
x^2-1 ~ (x-1)^2   (x+1)^3 ~ x^3+1   x^3+3x^2+3x+1 ~ (x+1)^2   (x-2)(x-3) ~ (x-2)(x+3)   x+y ~ x-y   x+y ~ xy   xyz ~ x+y+z
ab+c ~ a(b+c)   ab+cd ~ ad+bc   a-b-c ~ a-(b-c)   a/b/c ~ a/(b/c)   a-(b+c) ~ a-b+c   2x ~ 2X   x ~ X   x ~ \chi   \alpha ~ a   \mu ~ u
\nu ~ v   \rho ~ p   l ~ 1   O ~ 0   I ~ 1   S ~ 5   \ell ~ l   \epsilon ~ \varepsilon x   \phi ~ \varphi+1   5 ~ ٥٥   5 ~ 5⁵   52 ~ 5²
5 ~ ５6   10 ~ 1０0   -5 ~ 5-   5 ~ +-5   5 ~ --5 0   5 ~ 5--   5 ~ 5 -   5 ~ - 5   5 ~ \sim 5   5 ~ \approx 5   5 ~ \approx 5.1   5 ~ > 5
5 ~ \geq 5   5 ~ x > 5   x\ge5 ~ 5   5 ~ \ne 5   5 ~ \neg 5   5 ~ \not 5   5 ~ 5?   5 ~ ?5   5 ~ 5, ?   5 ~ 5 or 6   5 ~ 5 \text{ or } 6
5 ~ 5/6 or 5   5 ~ either 5 or 6   5 ~ not 5   5 ~ \text{not } 5   5 ~ \text{almost } 5   5 ~ at most 5   5 ~ at least 5   5 ~ no 5
5 ~ 5 no   5 ~ \cancel{5}   5 ~ \underline{5}6   5 ~ \phantom{5}6   5 ~ \hphantom{6}5   5 ~ \color{red}5 6   5 ~ \textcolor{red}{5}
5 ~ \boxed{6}, 5   5 ~ 5 \to 6   5 ~ 5 \rightarrow 6   5 ~ 5 \mapsto 6   5 ~ 5 = 6   5 ~ 4 = 5   5 ~ 4+1 = 6   5 ~ 5 = 5 = 6
5 ~ x = 5 = 6   5 ~ x = y = 5   5 ~ x=5,6   5 ~ n+1=5   5 ~ 2x = 5   5 ~ x^2 = 5   5 ~ |x|=5   5 ~ f(5)   5 ~ g(5)=6   5 ~ k = -5
5 ~ -k = 5   5 ~ \sqrt{x}=5   5 ~ \log x = 5   5 ~ 5!   5 ~ 5'   5 ~ 5^\prime   5 ~ 5^*   5 ~ 5^+   5 ~ 5^{+}   5 ~ 5^-   5 ~ 5_{}
5 ~ 5_{10}   5 ~ 5^{}   5 ~ 5\\   5 ~ 5\\6   5 ~ 5 \\ 6   5 ~ 5&6   5 ~ 5\&6   5 ~ 5\#6   5 ~ 5#6   5 ~ 5;6   5 ~ 5|6   5 ~ 5:6
5 ~ 5..6   5 ~ 5-6   5 ~ 5–6   5 ~ 5—6   5 ~ [5,6]   5 ~ (5   5 ~ 5)   5 ~ [5)   5 ~ \{5\}   5 ~ (5,)   5 ~ (,5)   5 ~ 5,5   5 ~ 5, x
5 ~ 5.0.0   5 ~ 5..   5 ~ 5e0   5 ~ 5e   5 ~ 5e1   50 ~ 5e1   5 ~ 5E0   500 ~ 5E2   5 ~ 0x5   0 ~ 0x5   0 ~ 0b1   0 ~ -0.0001
0 ~ 0\ldots   0 ~ \text{0 or 1}   0 ~ 0^0   0 ~ \frac{0}{x-x}   0 ~ \frac{x-x}{x-x}   0 ~ 0\cdot\infty   0 ~ 0 \cdot \frac{1}{0}
0 ~ \log 0   0 ~ \text{none}   0 ~ \text{zero solutions}   0 ~ \text{no}   0 ~ \lim 0   0 ~ \sin 180   1 ~ \sin 90   1 ~ \tan 45
\frac{1}{2} ~ \sin 30   0.5 ~ \cos 60   1 ~ 1^{\infty}   1 ~ \infty^0   1 ~ \frac{\infty}{\infty}   -1 ~ e^{i\pi/2}   -1 ~ i
-1 ~ (-1)^{1/2}   -1 ~ (-1)^{2/2}+0i+1   -2 ~ (-8)^{1/3}   2 ~ (-8)^{1/3}   \sqrt[3]{-8} ~ 1+\sqrt{3}i   \sqrt{-4} ~ 2   \sqrt{-4} ~ -2i
\sqrt{(-2)^2} ~ -2   \sqrt[4]{16} ~ -2   4^{1/2} ~ -2   \log_2 8 ~ \log 8   \log_{10} 100 ~ \log_{100} 10   \log 100 ~ \ln 100
\log 10 ~ e   \log 100 ~ 3   \log e ~ 2   \log a + \log b ~ \log(a+b)   \log\frac{a}{b} ~ \frac{\log a}{\log b}
\frac{\log 8}{\log 2} ~ \log 4   \log 2 ~ 0.30103   \log_2 x ~ \log 2x   \log_2 x ~ \log_{2x}   \log_23 ~ \log_{23}
\log_2 3 ~ \log_{23}   \ln 2 ~ \ln^2   \arcsin x ~ \sin x   \arcsin x ~ \frac{1}{\sin x}   \sec x ~ \cos x   \cot x ~ \tan x
\sin x \cos y ~ \sin(x\cos y)   \sin x + y ~ \sin(x+y)   \sin x/2 ~ \sin(x/2)   \sin x y ~ \sin(x) y   \cos^2x ~ \cos 2x
\cosh x ~ \cos h x   \cosh x ~ \cos x   1\pm\sqrt2 ~ 1\mp\sqrt3   a\pm b ~ a\mp b, c   \pm1\pm2 ~ \pm3   \pm1\pm2 ~ 3,-1
\pm 1, \pm 2 ~ \pm 1   \pm 2 ~ 2   \pm 2 ~ 2, 2   x=\pm2 ~ x=2   x=\pm2 ~ x=2,y=-2   (1,\pm2) ~ (1,2)   (\pm1,\pm2) ~ (1,2),(-1,-2)
(\pm1,\pm2) ~ (1,-2),(-1,2)   (1,2]\cup[3,4) ~ [1,2)\cup(3,4]   (1,2)\cup(3,4) ~ (1,2),(3,4)   (1,2)\cup(3,4) ~ (1,2)\cup(3,4)\cup(5,6)
(1,2)\cap(3,4) ~ (3,4)\cap(1,5)   (-\infty,2) ~ (\infty,2)   (-\infty,2) ~ (2,-\infty)   (-\infty,2) ~ x<3   (-\infty,2) ~ x\le2
[2,\infty) ~ [2,\infty]   [2,\infty) ~ x>2   \mathbb{R} ~ R   \mathbb{R} ~ \mathbb{Z}   \mathbb{R} ~ \mathbb{Q}
\mathbb{R}\setminus\{0\} ~ \mathbb{R}   \mathbb{R}^2 ~ \mathbb{R}   \mathbb{N} ~ N   \mathbb{C} ~ C   \mathrm{R} ~ \mathrm{Z}
\mathcal{A} ~ A   \{1,2\}\setminus\{2\} ~ \{1\}   \{x|x>1\} ~ \{x|x>2\}   \{x\mid x>1\} ~ \{x\mid x\ge1\}   \{x:x>1\} ~ \{y:y<1\}
\{1,1\} ~ \{1\}   \{(1,2)\} ~ \{(2,1)\}   \{(1,2)\} ~ \{1,2\}   \{(1,2),(3,4)\} ~ \{(1,3),(2,4)\}   (1,2,3) ~ (1,(2,3))
((1,2),3) ~ (1,(2,3))   (1;2) ~ (2;1)   (1,2) ~ (1.2)   (1,2) ~ \langle 1,2\rangle   \langle1,2\rangle ~ \langle2,1\rangle
1,2;3,4 ~ 1,3;2,4   1,2;3,4 ~ 3,4;1   1,2,3 ~ 1,23   1,2,3 ~ 123   123 ~ 1,23   1,234,567 ~ 1,234567   1,234 ~ 1;234   1,234 ~ 234,1
(1,234) ~ (1234)   (1,234) ~ 1234   12,345 ~ 12345.0001   0,001 ~ 1   0,5 ~ 0.5   3,14 ~ 3.14   1.000.000 ~ 1000000   1'000 ~ 1000
1_000 ~ 1000   1 000 ~ 1000   1\ 000 ~ 1000   2,000 ~ 2   2.0 ~ 20   0.10 ~ 0.01   -0 ~ 0.0001   .5 ~ 5   5. ~ .5   1.5.2 ~ 1.52
110% ~ 10%   10\%\text{ increase} ~ 10\%\text{ decrease}   10\%\text{ increase} ~ -10\%   +10\% ~ -10\%
\$10 \text{ loss} ~ \$10 \text{ gain}   \$10 ~ 10\text{ euros}   €10 ~ \$10   £10 ~ €10   ¥10 ~ £10   10\text{ USD} ~ 10\text{ EUR}
\$1.2 \text{ million} ~ 1.2   \$1.2 \text{ million} ~ \$1.2 \text{ billion}   1.2 \text{ million} ~ 1200   5 \text{ thousand} ~ 5
5 \text{ dozen} ~ 5   5 \text{ hundred} ~ 5   5 \text{ million} ~ 5 \text{ thousand}   5k ~ 5   5K ~ 5k+1   5M ~ 5   5\times10^3 ~ 5
5\cdot10^{3} ~ 5\cdot10^{-3}   5e3 ~ 5   10^{3} ~ 103   10^3 ~ 10\cdot3   1\times10^{3} ~ 1\times 103
12 \text{ inches} ~ 12 \text{ feet}   12'' ~ 12'   12' ~ 12   12'' ~ 12   5'6'' ~ 5'7''   30' ~ 30^\circ   30^\circ15' ~ 30^\circ
30^\circ 15' ~ 30.15^\circ   30^\circ 15' ~ 3015   30^{\circ}C ~ 30^{\circ}F   30^\circ\text{C} ~ 30^\circ\text{F}
30^\circ\mathrm{C} ~ 30   -5^\circ ~ 5^\circ   10\text{ cm} ~ 10\text{ mm}   10\text{ in} ~ 10\text{ ft}   10\text{ in} ~ 10\text{ in}^2
10\text{ g} ~ 10\text{ kg}   10\text{ L} ~ 10\text{ mL}   10\mathrm{cm} ~ 10\mathrm{m}   10\,\mathrm{m/s} ~ 10\,\mathrm{m}
10\,\mathrm{m/s} ~ 10\,\mathrm{km/h}   10\mathrm{m^2} ~ 10\mathrm{m^3}   10\mathrm{~m} ~ 10\mathrm{~cm}
10\text{ sq units} ~ 10\text{ cubic units}   10\text{ square units} ~ 10\text{ cubic units}   10\text{ units}^2 ~ 10\text{ units}^3
10 \text{ hours} ~ 10 \text{ minutes}   10 \text{ a.m.} ~ 10 \text{ p.m.}   3:00\text{ PM} ~ 3:00\text{ AM}   3\text{ PM} ~ 3\text{ AM}
3\text{ p.m.} ~ 3   12:00 ~ 12   2:30 ~ 2.30   2:30 ~ 2.5   \frac{2}{3}:\frac{1}{3} ~ 1:2   2:1 ~ 1:2   1:2:3 ~ 1:3:2   1:2:3 ~ 3:2:1
3 \text{ to } 5 ~ 5 \text{ to } 3   3 \text{ to } 5 ~ 3, 5   3 \text{ out of } 5 ~ 5 \text{ out of } 3
3 \text{ in } 5 ~ 5 \text{ in } 3   3 \text{ boys}, 5 \text{ girls} ~ 5 \text{ boys}, 3 \text{ girls}
3 \text{ red}, 5 \text{ blue} ~ 3 \text{ blue}, 5 \text{ red}   3 \text{ red}, 5 \text{ blue} ~ 5 \text{ blue}, 3 \text{ green}
\text{Ann } 3, \text{Bob } 5 ~ \text{Bob } 3, \text{Ann } 5   \text{Ann}=3, \text{Bob}=5 ~ \text{Bob}=3,\text{Ann}=5
A=3, B=5 ~ A=5, B=3   a=1,b=2 ~ b=1,a=2   a=1, b=2 ~ a=1, c=2   a=b=1 ~ a=1   (x,y)=(1,2) ~ (x,y)=(2,1)   (x,y)=(1,2) ~ (y,x)=(1,2)
(x,y)=(1,2) ~ (2,1)   (x,y)=(1,2) ~ (a,b)=(1,2)   x=1\text{ or }x=2 ~ x=1   x=1\text{ and }x=2 ~ x=1\text{ or }x=3   f(x)=2x ~ f(x)=2
f(x)=2x ~ g(x)=2x   f(x)=2x ~ f(y)=2x   f(x)=x+1 ~ y+1   f(n)=n^2 ~ n^2+c   f(x)=0, f(x)=x ~ f(x)=0   f(x)=ax+b ~ f(x)=bx+a
f^{-1}(x)=x ~ f(x)=x   f'(x)=2 ~ f(x)=2   f'(x)=2 ~ f''(x)=2   P(x)=x ~ Q(x)=x   y=x^2 ~ x=y^2   y=x^2 ~ y=-x^2   y-x=0 ~ y+x=0
x^2+y^2=1 ~ x^2-y^2=1   x^2+y^2=1 ~ x^2+y^2=2   x^2+y^2=1 ~ x+y=1   \frac{x^2}{4}+\frac{y^2}{9}=1 ~ \frac{x^2}{9}+\frac{y^2}{4}=1
2x+3y=6 ~ 3x+2y=6   2x+3y=6 ~ 2x+3y   2x+3y-6=0 ~ 2x+3y+6=0   x=0 ~ x\cdot y=0   0=0 ~ x=0   0=0 ~ 1=1   x=x ~ y=y   a<b<c ~ a<c<b
a<b<c ~ c<b<a   a>b>c ~ a<b<c   a\ge b ~ a>b   |x|<1 ~ x<1   |x-1|<2 ~ |x+1|<2   0<x<1 ~ 0\le x\le 1   0<x<1 ~ x>0   x>0,y>0 ~ x>0,y<0
x>0 ~ x\in(0,1)   x\in(0,1) ~ (0,1]   x\in[0,1] ~ y\in[0,1]   x\in\{1,2\} ~ x\in(1,2)   n\in\mathbb{Z} ~ n\in\mathbb{N}
k\pi, k\in\mathbb{Z} ~ 2k\pi, k\in\mathbb{Z}   k\pi ~ \pi   \frac{\pi}{4}+k\pi ~ \frac{\pi}{4}+2k\pi
\frac{\pi}{4}+k\pi ~ \frac{\pi}{4}   2k\pi\pm\frac{\pi}{3} ~ 2k\pi+\frac{\pi}{3}   n=2k ~ n=2k+1   2k ~ 2n
\text{odd } n ~ \text{even } n   n\text{ is odd} ~ n\text{ is even}   n \text{ odd} ~ n   \text{n is prime} ~ \text{n is not prime}
p \equiv 1 \pmod{4} ~ p \equiv 3 \pmod{4}   p\equiv1\mod4 ~ p\equiv3\mod4   7\bmod 3 ~ 7   1\mod 3 ~ 1
2 \text{ and } 3 ~ 2 \text{ and } 5   2\text{ and }3 ~ 23   2 \& 3 ~ 23   \text{2 and 3} ~ \text{23}   \text{2, 3} ~ \text{3}
\text{5} ~ \text{6}   \text{5} ~ 6   \text{5 apples} ~ \text{6 apples}   \text{5 apples} ~ 5   \text{x=5} ~ \text{x=6}
\text{May 5} ~ \text{May 6}   \text{May 5, 2000} ~ \text{May 2000, 5}   \text{5 May} ~ \text{6 May}   \text{Q1} ~ \text{Q2}
\text{Plan A} ~ \text{Plan B}   \text{Plan A} ~ \text{Plan}   \text{Option (A)} ~ \text{Option (B)}   \text{Box 1} ~ \text{Box 2}
\text{(a)} ~ \text{(b)}   \text{(A), (B)} ~ \text{(A)}   (A) ~ (B)   (A)(B) ~ (A)   A,B,C ~ A,B   A,B,C ~ ABC   A, C ~ A, B, C
ABD ~ ACD   BD ~ B   D ~ \text{DB}   B ~ 8   a ~ A   E ~ e   e ~ E   i ~ I   \text{e} ~ 2.718281828   \text{i} ~ 1
\text{none} ~ \text{no}   \text{none} ~ \text{one}   \text{all} ~ \text{tall}   \text{none of these} ~ \text{all of these}
\text{infinite} ~ \text{finite}   \text{infinitely many} ~ \text{finitely many}   \text{infinity} ~ \text{affinity}
\text{undefined} ~ \text{defined}   \text{DNE} ~ 0   \text{does not exist} ~ \text{exists}   \text{does not exist} ~ \text{does exist}
\text{positive} ~ \text{negative}   \text{nonnegative} ~ \text{negative}   \text{non-negative} ~ \text{negative}
\text{non-zero} ~ \text{zero}   \text{not} A ~ A   \text{rational} ~ \text{irrational}   \text{convergent} ~ \text{divergent}
\text{right} ~ \text{acute}   \text{max} ~ \text{min}   \max ~ \min   \max x ~ x   \min(3,4) ~ 3   \min(3,4) ~ (3,4)   \sup A ~ \inf A
\det A ~ A   \operatorname{rank} A ~ A   \operatorname{lcm}(2,3) ~ \gcd(2,3)   \operatorname{Re} z ~ \operatorname{Im} z   \Re z ~ \Im z
\overline{z} ~ z   |z| ~ z   |z|=1 ~ z=1   z^* ~ z   \dfrac{dy}{dx} ~ \dfrac{y}{x}   \frac{d}{dx} ~ \frac{1}{x}
\frac{dy}{dx}=x ~ \frac{y}{x}=x   dx ~ xd   \partial x ~ x   \nabla f ~ f   \vec{v} ~ v   \hat{i} ~ i   \hat{\imath} ~ \hat{\jmath}
\overrightarrow{AB} ~ \overrightarrow{BA}   \overrightarrow{AB} ~ AB   \angle A ~ A   \triangle ABC ~ ABC   \widehat{AB} ~ AB
\odot O ~ O   A' ~ A   A_1 ~ A_2   A_1 ~ A   A^1 ~ A_1   \Delta ~ \delta   \Delta x ~ x   \Gamma(n) ~ n!   \zeta(2) ~ 2   \Phi ~ \phi
\omega ~ w   \theta ~ 0   \epsilon ~ e   \sigma^2 ~ \sigma   \log_{10}2 ~ \log_2 10   \log_3 2 ~ \log_2 3   \log_{3}{2} ~ \log_{3}{4}
\log_2 3^2 ~ (\log_2 3)^2   \ln x+1 ~ \ln(x+1)   \ln|x| ~ \ln x   \ln|x|+C ~ \ln|x|   \frac{x^2}{2}+C ~ \frac{x^2}{2}
\frac{x^2}{2}+C ~ \frac{x^2}{2}-C   e^{2x} ~ e^{x^2}   e^{2x} ~ e^2x   e^{-x} ~ e^x   -e^x ~ e^{-x}   2^{x+1} ~ 2^x+1
2^{x+1} ~ 2^{x}+2   (2x)^2 ~ 2x^2   2(x)^2 ~ (2x)^2   \sqrt{4x} ~ 4\sqrt{x}   \sqrt[3]{x^2} ~ \sqrt{x^3}   \sqrt[n]{x} ~ n\sqrt{x}
\sqrt[3]{x} ~ 3\sqrt{x}   x^{1/3} ~ x^1/3   x^{\frac13} ~ x^{\frac31}   1+\frac{1}{2+\frac{1}{3}} ~ 1+\frac{1}{2}+\frac13
1-\frac12+\frac13 ~ 1-(\frac12+\frac13)   \sum_{k=1}^{n}k ~ \sum_{k=1}^{n}k^2   \prod_{k=1}^n k ~ \sum_{k=1}^n k
\int_a^b f ~ \int_b^a f   \lim_{n\to\infty}a_n ~ a_n   1+2+\cdots+n ~ 1+2+n   1+2+\ldots+100 ~ 1+2+100   1\cdot2\cdots n ~ 1\cdot 2 n
a_1,a_2,\ldots,a_n ~ a_1,a_2,a_n   \overbrace{11\ldots1}^{n} ~ 111   \underbrace{2+2}_{4} ~ 4   \overset{\frown}{AB} ~ AB
\stackrel{?}{=} ~ =   5\text{ (mod 7)} ~ 5\text{ (mod 9)}   5 \text{ remainder } 2 ~ 5 \text{ remainder } 3   5R2 ~ 5R3   5R2 ~ 10R
5 R 2 ~ 52   5\text{R}2 ~ 7   5\ R\ 2 ~ 10R   3^{5} ~ 5^{3}   3^5 ~ 35   3^5 ~ 15   {3}^{5} ~ 35   3\,^5 ~ 35   3{^5} ~ 35
\frac{3}{5} ~ 3,5   \frac{3}{5} ~ 3:5:1   3/5 ~ 3\div5\div1.1   0.6 ~ 3/5%   60 ~ 3/5   \frac{60}{100} ~ 60   7\frac{1}{2} ~ \frac{7}{2}
7\frac{1}{2} ~ 7\cdot\frac12   7\tfrac12 ~ 71/2   -7\frac12 ~ -6.5   7 1/2 ~ 71/2   7-1/2 ~ 7 1/2   x\frac12 ~ x+\frac12
1\frac{x}{2} ~ 1+\frac{x}{2}   3\frac{5}{4} ~ 3+\frac54   \begin{bmatrix}1&0\\0&1\end{bmatrix} ~ I
\begin{bmatrix}1&0\\0&1\end{bmatrix} ~ 1
\begin{bmatrix}1\\2\end{bmatrix},\begin{bmatrix}3\\4\end{bmatrix} ~ \begin{bmatrix}1\\4\end{bmatrix},\begin{bmatrix}3\\2\end{bmatrix}
\begin{bmatrix}1&2\end{bmatrix} ~ \begin{bmatrix}1&2&\end{bmatrix}   \begin{bmatrix}1&2\end{bmatrix} ~ \begin{bmatrix}12\end{bmatrix}
\begin{bmatrix}1&2\end{bmatrix} ~ (1,2)   \begin{bmatrix}1&2\end{bmatrix} ~ [1,2]
\begin{bmatrix}1&2\\&3\end{bmatrix} ~ \begin{bmatrix}1&2\\3&\end{bmatrix}
\begin{aligned}x&=1\\y&=2\end{aligned} ~ \begin{aligned}x&=2\\y&=1\end{aligned}
\begin{pmatrix}-1\\2\end{pmatrix} ~ \begin{pmatrix}1\\-2\end{pmatrix}
-\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}1\\2\end{pmatrix}
\frac12\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}1\\2\end{pmatrix}
\begin{Bmatrix}1\\2\end{Bmatrix} ~ \begin{pmatrix}1\\2\end{pmatrix}   \begin{array}{r}12\\+3\\\hline 15\end{array} ~ 15
\begin{array}{c|c}1&2\end{array} ~ \begin{array}{cc}2&1\end{array}
5 ~ 5 \text{ thousand}   5 ~ 5 \text{ dozen}   5 ~ 5 \text{ or so}   5 ~ 5 \text{ not}   5 ~ -5 \text{ apples}
5 ~ 5 \text{ and a half}   5 ~ 5 \text{ and a half apples}   5 ~ 5 \text{ to } 6   5 ~ 5 \text{ base } 7
5 ~ 5 \text{ or } 6   5 ~ 5\text{ m}6   5 ~ 5\mathrm{I}   5 ~ 5\text{x}   5 ~ 5 \text{ times } x
5 ~ 5.1 \text{ apples}   5 ~ 5x \text{ apples}   5 ~ 5! \text{ ways}   5 ~ 3+5 \text{ ways}
5 ~ 2\cdot 5 \text{ ways}   5 ~ 5^2 \text{ ways}   5 ~ \frac{5}{2} \text{ ways}   5 ~ \sqrt{5} \text{ cups}
5 ~ 5\sqrt{2} \text{ cups}   5 ~ 5\pi \text{ cups}   5 ~ 5, 6 \text{ cups}   5 ~ x > 5 \text{ cups}
5 ~ \le 5 \text{ cups}   5 ~ \approx 5 \text{ cups}   5 ~ 5 \text{ cups}, 6 \text{ pots}   5 ~ 5 \text{ is wrong}
5 ~ 5 \text{ squared}   5 ~ 5 \text{ factorial}   5 ~ 5 \text{ percent}x   5 ~ 5 \text{ halves}   5 ~ 5 \text{th}
5 ~ 5 \text{ cups less than } x   5 ~ 5 \text{ cups less than six}   5000 ~ 5 \text{ thousand}
5\% ~ 5 \text{ apples}   5 \text{ cm} ~ 5 \text{ apples}   \$5 ~ 5 \text{ apples}   (3,4) ~ (y, x) = (3, 4)
(3,4) ~ (x, y) = (4, 3)   (3,4) ~ (x, x) = (3,4)   [3,4] ~ (x,y) = (3,4)   (3,4) ~ (x,y,z) = (3,4)
(3,4) ~ (x,y) \ne (3,4)   (3,4) ~ (x,y) \in (3,4)   (3,4) ~ (a+b, c) = (3,4)   (3,4) ~ 2(x,y) = (3,4)
5 ~ a \in 5   3, 5 ~ x \in 3, 5   [0,1] ~ x \in [0,1)   [0,1] ~ x \notin [0,1]   [0,1] ~ x \not\in [0,1]   [0,1] ~ x \in [0,1], y \in [0,1]
x \in [0,1] ~ y \in [0,1]   x \in [0,1] ~ x \notin [0,1]   [0,1] ~ x \in [0,1] \cup [2,3]
[0,1] \cup [2,3] ~ x \in [0,1]   [0,1] ~ x^2 \in [0,1]   [0,1] ~ -x \in [0,1]   [0,1] ~ 1 - x \in [0,1]
[0,1] ~ x \in [0,1] \setminus \{0\}   [0,1] ~ x \in [1,0]   1, 2 ~ 1   \{1,2\} ~ 1   1,2 ~ \{1,2,3\}
1,2 ~ \{1\},\{2\}   1,2 ~ \{(1,2)\}   (1,2) ~ \{1,2\}   1,2 ~ \{1,1\}   2,2 ~ \{2\}   (1,2),(3,4) ~ \{1,2,3,4\}
(1,2),(3,4) ~ \{(1,3),(2,4)\}   1,2 ~ \{1,2   1,2 ~ \{x : x = 1, 2\}   x=1,y=2 ~ \{1,2\}   x^n y ~ x^{ny}
x^{n}y ~ x^{n y}   a_{n}1 ~ a_{n1}   a_{1}2 ~ a_{12}   x^{2}3 ~ x^{23}   \frac{x^{2}}{3} ~ \frac{x^{2}3}{}
3,5,7 ~ 3, 5, \text{ and }   3, 5 ~ 3 and 5 and 7   3,5 ~ 35   3,5 ~ 3 and   \text{June 20} ~ \text{June 21}
\text{June 20} ~ 20   \text{June 20} ~ \text{July 20}   7:30 \text{ PM} ~ 7:30 \text{ AM}   7:30 PM ~ 7:30 AM
5 ~ AB = 6   AB = 5 ~ AC = 5   AB = 5 ~ CD = 5   P(A) = \frac12 ~ P(B) = \frac12   \frac12 ~ 1 - P(A) = \frac12
5 ~ 2x = 5   5 ~ x + 1 = 5   5 ~ -x = 5   5 ~ x^2 = 5   5 ~ |x| = 5   5 ~ \sqrt{x} = 5   5 ~ x \ne 5
5 ~ \angle A + \angle B = 5   5 ~ 2 \angle A = 5   5 ~ AB + CD = 5   5 ~ AB^2 = 5   5 ~ AB < 5   5 ~ AB \cdot CD = 5
5 ~ f(1) + 1 = 5   5 ~ f(1) = 5x   5 ~ f(1) = 5, f(2) = 6   p \text{ and } q ~ p \text{ or } q   p and q ~ p or q
p \land q ~ p \text{ or } q   x < 1 or x > 2 ~ x < 1 and x > 2   a = 1 and b = 2 ~ a = 1 or b = 2
a = 1 and b = 2 ~ a = 2 and b = 1   \emptyset ~ 0   \varnothing ~ \phi   \varnothing ~ \{0\}
\begin{vmatrix} 1 \\ 2 \end{vmatrix} ~ \begin{vmatrix} 12 \end{vmatrix}   a \\ b ~ a b   a \\ b ~ ab   2 \\, 3 ~ 2, 3
\text{not A} ~ \text{A}   \text{A or B} ~ \text{A and B}   \text{I} ~ 1   \text{II} ~ 2
\text{I and II} ~ \text{I or II}   \text{I and II} ~ \text{I, II, III}
"""

# "reference ~ answer", in the same way: as references of MATH and DeepMath are written, and as models write the same.
THE_SAME = r"""
11\sqrt2 ~ 11\sqrt{2}   \left( 3, \frac{\pi}{2} \right) ~ (3, \pi/2)
\left( 3, \frac{\pi}{2} \right) ~ (3,\frac{\pi}2)   p - q ~ p-q   \frac{14}{3} ~ 14/3   \text{Evelyn} ~ Evelyn
27 ~ 27 \text{ pages}   90^\circ ~ 90   90^\circ ~ 90\text{ degrees}   3\sqrt{13} ~ \sqrt{117}   4 ~ x = 4
2220 ~ 2{,}220   \frac{3}{56} ~ \dfrac{3}{56}   284 ~ 284.   5 ~ n = 5   \sqrt{51} ~ \sqrt{51} \text{ units}
6 - 5i ~ 6-5i   6 - 5i ~ -5i + 6
\begin{pmatrix} -2 & 1 \\ 3/2 & -1/2 \end{pmatrix} ~ \begin{pmatrix} -2 & 1 \\ \frac{3}{2} & -\frac{1}{2} \end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} ~ \begin{pmatrix}-\frac13\\ \frac23\\ \frac53\end{pmatrix}
\text{(C)} ~ C   \text{(C)} ~ (C)   \text{C} ~ \textbf{(C)}   10\% ~ 10   10\% ~ 10 \%   10 ~ 10\%
\$32,\!348 ~ 32348   \$32,\!348 ~ \$32,348   32348 ~ \$32{,}348   5.4 \text{ cents} ~ 5.4   15\mbox{ cm}^2 ~ 15
15\mbox{ cm}^2 ~ 15 \text{ cm}^2   15\mbox{ cm}^2 ~ 15 cm^2   15\mbox{ cm}^2 ~ 15\,\text{cm}^2
15 ~ 15 \text{ square units}   (-\infty, -8)\cup (8, \infty) ~ (-\infty,-8) \cup (8,\infty)   x \in [-2,7] ~ [-2,7]
[-2,7] ~ x \in [-2,7]   x \in (-\infty,3) \cup (4,\infty) ~ (-\infty, 3) \cup (4, \infty)
(-\infty, 3) \cup (4, \infty) ~ x \in (-\infty,3)\cup(4,\infty)   4210_{5} ~ 4210_5   \frac{9}{7} ~ \frac{9}{7}.
3, 5, 7 ~ 3,5,7   3, 5, 7 ~ 3, 5, \text{ and } 7   3, 5, 7 ~ 3, 5 \text{ and } 7   3, 5, 7 ~ \{3, 5, 7\}
\{3, 5, 7\} ~ 3, 5, 7   1, -2 ~ x = 1, -2   1, -2 ~ x = 1 \text{ or } x = -2   1,-2 ~ x=1, x=-2   1,-2 ~ \{1, -2\}
(2,12), (3,1) ~ (3,1), (2,12)   (x+3)(x-3) ~ x^2-9   y=2x+3 ~ 2x+3   y = 2x + 3 ~ y=2x+3   1\frac{4}{5} ~ 9/5
1\frac{4}{5} ~ 1.8   0.5 ~ \frac{1}{2}   .5 ~ 0.5   -.5 ~ -\frac12   \frac{\sqrt{3}}{3} ~ \frac{1}{\sqrt{3}}
\frac{2\sqrt{149}}{3} ~ \frac{2}{3}\sqrt{149}   \frac{3\sqrt{3}}{4} ~ 3\sqrt{3}/4   2k+2 ~ 2(k+1)
\frac{1}{2}x ~ \frac{x}{2}   x^3+3x-6 ~ x^3 + 3x - 6   \text{June 20} ~ June 20   \text{June 20} ~ \text{June } 20
\text{Monday} ~ Monday   \text{even} ~ even   \text{ellipse} ~ Ellipse   \text{two} ~ two   6 + 9i ~ 9i+6
1 \pm \sqrt{19} ~ 1+\sqrt{19}, 1-\sqrt{19}   \pi ~ \pi   12\pi ~ 12 \pi   \frac{4}{3}\pi ~ \frac{4\pi}{3}
\frac{4}{3}\pi ~ 4\pi/3   10{,}000 ~ 10000   2^{10} ~ 1024   2 ~ 2.0   2:3 ~ 2:3   \sin^2 x ~ (\sin x)^2
\ln 2 ~ \ln(2)   e^{2} ~ e^2   -1 ~ -1   k = -1 ~ -1   (3,4) ~ (x, y) = (3, 4)   (3,4) ~ \left(3,4\right)
8 \text{ inches} ~ 8   12:00 ~ 12:00   5 \text{ mph} ~ 5 mph   5 ~ 5 \text{ mph}   5 ~ 5 \text{ m/s}
5 ~ 5\text{ apples}   120 ~ 120 ways   120 ~ 120\text{ ways}   x\le 5 ~ x \leq 5   \frac{1}{3} ~ 0.\overline{3}
\emptyset ~ \varnothing   \text{no real solutions} ~ no real solutions   f(x) = x^2 ~ x^2   x^2 ~ f(x) = x^2
x^2 ~ f(x)=x^{2}   a_n = 2n+1 ~ 2n+1   C = 5 ~ 5   \angle A = 30^\circ ~ 30   \overline{AB} ~ \overline{AB}
\triangle ABC ~ \triangle ABC   \frac{a}{b+c} ~ a/(b+c)   \sqrt[3]{4} ~ 4^{1/3}   2^{2/3} ~ \sqrt[3]{4}
n(n+1)/2 ~ \frac{n(n+1)}{2}   \frac{n(n+1)}{2} ~ \frac{n^2+n}{2}   \frac{n(n+1)}{2} ~ \frac{1}{2}n(n+1)
\binom{10}{3} ~ 120   10! ~ 3628800   \mathbb{R} ~ \mathbb{R}   \mathbb{R}^n ~ \mathbb{R}^{n}   \text{True} ~ True
\text{Yes} ~ Yes   \text{Yes} ~ \text{Yes}.   3 \text{ and } 4 ~ 3, 4   3\text{ or }4 ~ 3, 4   \log_2 3 ~ \log_{2}3
\log_2 3 ~ \frac{\ln 3}{\ln 2}   \frac{\pi}{4} ~ \arctan 1   -\frac{1}{2} ~ \frac{-1}{2}   -\frac{1}{2} ~ -1/2
-\frac{1}{2} ~ -0.5   \frac{1}{x+1} ~ (x+1)^{-1}   |x - 1| ~ |1-x|   \lfloor x \rfloor ~ \lfloor x\rfloor
1 + \sqrt{2} ~ \sqrt{2} + 1   1.5 ~ \frac{3}{2}   25\pi ~ 25\pi \text{ cm}^2   25\pi \text{ cm}^2 ~ 25\pi
3 \times 10^8 ~ 3\cdot 10^8   3 \times 10^8 ~ 300000000   2 + 2\sqrt{3} ~ 2(1+\sqrt{3})   i ~ i
x=\frac{1}{2} ~ \frac{1}{2}   (0,9) \cup (9,36) ~ (0,9)\cup(9,36)   6.0 ~ 6   070 ~ 70   33 ~ 033   \text{A, B} ~ A, B
7:30 \text{ PM} ~ 7:30 PM   7:30 p.m. ~ 7:30 \text{ p.m.}   100\% ~ 100 \text{ percent}
\frac{3}{4} \text{ hours} ~ \frac{3}{4}   \sqrt{2}/2 ~ \frac{\sqrt{2}}{2}   \frac{\sqrt 2}{2} ~ \frac{\sqrt{2}}{2}
\dfrac{1}{\sqrt[3]{2}} ~ 2^{-1/3}   27 ~ 27 \text{ km/h}   5 ~ 5\,\text{m}   5 ~ 5 \text{ m}^2
1,200 ~ 1200 \text{ people}   12 ~ 12\mbox{ ways}   5 ~ AB = 5   \frac12 ~ P(A) = \frac{1}{2}
60^\circ ~ \angle ABC = 60^\circ   3 ~ f(2) = 3   \sqrt{2}\,x ~ \sqrt2 x   3, 5 ~ 3 and 5   3, 5 ~ 3 or 5
x=1, x=2 ~ x=1 or x=2   \emptyset ~ ∅   \text{Arithmetic Progression} ~ Arithmetic Progression.   MN ~ \text{MN}
B^n = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ B^{n}=\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}   a \\ b ~ a\\b
"""


def pairs() -> list[tuple[str, str, bool]]:
    """(reference, answer, whether it is right)."""
    return [
        (truth, answer, verdict)
        for truth, right, wrong in CASES
        for answers, verdict in ((right, True), (wrong, False))
        for answer in answers
    ]


def unequal_pairs() -> list[list[str]]:
    """[one, another], not the same."""
    return _split(NOT_THE_SAME)


def ordinary_pairs() -> list[list[str]]:
    """[reference, answer], the same."""
    return _split(THE_SAME)


def _split(text: str) -> list[list[str]]:
    return [pair.split(" ~ ") for pair in text.strip().replace("\n", "   ").split("   ")]
