"""Built-in scorers: right answers score 1, wrong ones 0, and near misses stay wrong."""

import pytest

from refrain.engines.answers.builtin import (
    KNOWN_DATA_SOURCES,
    accepted_answers,
    builtin_scorer,
    compute_score,
)
from refrain.engines.answers.extraction import boxed_answer, normalise_math


def score(data_source, solution, ground_truth):
    return builtin_scorer(data_source)(solution, ground_truth)["score"]


@pytest.mark.parametrize("data_source", ["openai/gsm8k", "refrain/arithmetic"])
@pytest.mark.parametrize(
    ("solution", "ground_truth", "expected"),
    [
        ("6 * 12 = 72\n#### 72", "72", 1.0),
        ("####72", "72", 1.0),
        ("#### 72.00", "72", 1.0),
        (r"so \boxed{72}", "72", 1.0),
        (r"\boxed{72} no\n#### 7", "72", 0.0),
        ("#### $1,234", "1234", 1.0),
        ("#### -$5.", "-5", 1.0),
        ("#### 72 apples", ["72"], 1.0),
        ("#### 72", '["71", "72"]', 1.0),
        ("#### 72", 72, 1.0),
        ("#### 7\n#### 72", "72", 1.0),
        ("#### 72\n#### 7", "72", 0.0),
        ("#### 72\n#### none", "72", 0.0),
        ("The answer is 72", "72", 0.0),
        ("#### 720", "72", 0.0),
        ("#### 7.2", "72", 0.0),
        ("#### -72", "72", 0.0),
        ("####", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_gsm8k(data_source, solution, ground_truth, expected):
    assert score(data_source, solution, ground_truth) == expected


@pytest.mark.parametrize(
    "data_source", ["lighteval/MATH", "HuggingFaceH4/MATH-500", "math_dapo", "aime_2024", "AIME25"]
)
@pytest.mark.parametrize(
    ("solution", "ground_truth", "expected"),
    [
        (r"so \boxed{34}", "34", 1.0),
        (r"so $\boxed{\dfrac{1}{2}}$.", r"\frac{1}{2}", 1.0),
        (r"\boxed{1/2}", r"\frac12", 1.0),
        (r"\boxed{12} no, \boxed{\left( 3, 4 \right)}", "(3,4)", 1.0),
        (r"\boxed{12}", r"\boxed{12}", 1.0),
        (r"\boxed{10{,}000}", "10{,}000", 1.0),
        (r"\boxed{10,000}", "10000", 1.0),
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0),
        (r"\boxed{x=5}", "5", 1.0),
        (r"\boxed{.5}", "0.5", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{34", "34", 0.0),
        (r"\boxed{35}", "34", 0.0),
        (r"\boxed{0.5}", r"\frac{1}{3}", 0.0),
        (r"\boxed{1,23}", "123", 0.0),
        (r"\boxed{3} then \boxed{}", "3", 0.0),
        ("34", "34", 0.0),
        ("", "34", 0.0),
    ],
)
def test_math(data_source, solution, ground_truth, expected):
    assert score(data_source, solution, ground_truth) == expected


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("Answer: 34", 1.0),
        ("**Answer:** $34$", 1.0),
        (r"answer: \boxed{34}", 1.0),
        ("Answer: 3\nAnswer: 34", 1.0),
        ("Answer: 34 or 35", 0.0),
    ],
)
def test_an_answer_line_counts_for_dapo_only(solution, expected):
    assert score("math_dapo", solution, "34") == expected
    if "boxed" not in solution:
        assert score("lighteval/MATH", solution, "34") == 0.0


def test_the_extracted_answer_is_kept():
    assert builtin_scorer("openai/gsm8k")("#### 1,000", "5")["pred"] == "1000"
    assert builtin_scorer("lighteval/MATH")("no box", "5")["pred"] is None


@pytest.mark.parametrize("ground_truth", ['["4', '["4"] or so', '["' + "[" * 5000])
def test_invalid_lists_of_answers_are_refused(ground_truth):
    with pytest.raises(ValueError, match=r"ground_truth` begins like a JSON list .* is not one"):
        accepted_answers(ground_truth)


def test_nested_braces():
    assert boxed_answer(r"\boxed{\frac{1}{\sqrt{2}}} is it") == r"\frac{1}{\sqrt{2}}"


def test_arrows_are_not_brackets():
    assert normalise_math(r"a\leftarrow b") == r"a\leftarrowb"


def test_an_unknown_data_source_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'mine'.*openai/gsm8k.*aime\*.*reward.type=function"):
        builtin_scorer("mine")
    assert "refrain/arithmetic" in KNOWN_DATA_SOURCES


def test_an_answer_without_end_is_kept_in_part():
    score = compute_score("math_dapo", "Answer: " + "9" * 100_000, "9")
    assert score == {"score": 0.0, "pred": "9" * 1000}
