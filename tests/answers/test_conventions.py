"""In the conventions of public mathematics sets, equal answers score as right, others as wrong."""

import pytest
from math_verify import parse, verify

from refrain.engines.answers.builtin import builtin_scorer

RIGHT = [
    # fractions, decimals and percentages
    ("0.5", r"\frac{1}{2}"), (r"\frac{2}{4}", r"\frac12"), ("-0.25", r"-\frac{1}{4}"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"), (r"\dfrac{3}{4}", "0.75"), ("3/4", r"\frac34"),
    ("-3/2", r"\frac{-3}{2}"), ("0.5", r"50\%"), (r"50\%", "50"), ("72.00", "72"), ("033", "33"),
    # thousands, powers, units and money
    ("1{,}000", "1000"), ("1,234,567", "1234567"), ("10^{3}", "1000"),
    (r"1.5\times 10^{3}", "1500"), (r"5\text{ cm}", "5"), ("5", r"5\text{ cm}"),
    (r"12\,\text{m}^2", "12"), (r"7\text{ hours}", "7"), (r"90^\circ", "90"), (r"\$5.00", "5"),
    # expressions
    ("1+x^2", "x^2+1"), ("2(x+1)", "2x+2"), ("x^2-1", "(x-1)(x+1)"), (r"\frac{x}{2}", "0.5x"),
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\pi/4", r"\frac{\pi}{4}"), ("e^{2x}", r"\exp(2x)"), (r"\log 2", r"\log(2)"),
    (r"\binom{5}{2}", "10"), ("5!", "120"), (r"-\sqrt{3}i", r"-i\sqrt{3}"),
    ("|x|", r"\lvert x\rvert"),
    # equations and inequalities
    ("x=5", "5"), ("5", "x=5"), ("y=2x+1", "y = 1+2x"), ("x=2, x=3", "2,3"), (r"\pm 2", "2,-2"),
    ("x>2", "2<x"), (r"x\ge 2", r"x\geq 2"),
    # sets, intervals, points and matrices
    (r"\{1,2\}", r"\{2,1\}"), ("2,3", "3,2"), (r"\emptyset", r"\varnothing"), ("(3,4)", "(3, 4)"),
    (r"\left[0,1\right)", "[0, 1)"), (r"(-\infty, 3]", r"(-\infty,3]"), (r"x \in [0,1]", "[0,1]"),
    (r"(-1,1)\cup(2,3)", r"(2,3)\cup(-1,1)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    # words, choices and other bases
    (r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "C"), ("(C)", r"\text{(C)}"),
    ("10001_2", "10001_{2}"), ("12:30", "12:30"),
]  # fmt: skip
WRONG = [
    ("0.5", r"\frac{1}{3}"), ("0.33", r"\frac13"), ("0.333333", r"\frac13"),
    (r"\frac{1}{2}", r"\frac{2}{1}"), ("50", "0.5"), ("720", "72"), ("7.2", "72"), ("-72", "72"),
    ("1,23", "123"), ("1000", "10{,}000"), ("1.5e3", "15"), (r"5\text{ cm}", "50"),
    ("x^2+1", "x^2-1"), ("2x+1", "2y+1"), (r"\sqrt{2}", "1.414"), ("3.14", r"\pi"),
    ("22/7", r"\pi"), ("2^{10}", "2^{11}"), ("2+2", "5"), (r"\infty", r"-\infty"), ("1/0", "0"),
    ("x=5", "y=5"), ("y=2x+1", "y=2x-1"), ("x>2", "x<2"), (r"x\ge 2", "x>2"),
    (r"\{1,2\}", r"\{1,2,3\}"), ("34, 35", "34"), ("34 or 35", "34"), ("1", "1,2"),
    ("(3,4)", "[3,4]"), ("(3,4)", "(4,3)"), ("(1,2,3)", "(1,2)"), ("[0,1)", "(0,1]"),
    (r"\text{Evelyn}", "Eve"), ("B", "C"), (r"\text{no}", "yes"), ("12:30", "12.3"),
    ("10001_2", "10001"), ("", "0"), ("(2)", "-2"), ("9^{9^{9^{9}}}", "9"), ("x" * 5000, "x"),
]  # fmt: skip


def is_right(answer: str, truth: str) -> bool:
    return builtin_scorer("lighteval/MATH")(f"so \\boxed{{{answer}}}.", truth)["score"] == 1.0


@pytest.mark.parametrize(("answer", "truth"), RIGHT)
def test_equal_answers_score_as_right(answer, truth):
    assert is_right(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), WRONG)
def test_different_answers_score_as_wrong(answer, truth):
    assert not is_right(answer, truth)


def test_scorer_beats_plain_math_verify():
    def alone(answer: str, truth: str) -> bool:
        return verify(parse(f"${truth}$"), parse(f"\\boxed{{{answer}}}"))

    assert sum(is_right(*pair) for pair in RIGHT) >= sum(alone(*pair) for pair in RIGHT) > 40
    assert any(alone(*pair) for pair in WRONG[:-2])
