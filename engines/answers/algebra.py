"""Whether two answers mean the same, by math-verify: `0.5` and `\\frac{1}{2}`, `1+x^2` and `x^2+1`,
`5\\text{ cm}` and `5`, sets and intervals."""

import re

MAX_CHARACTERS = 400
"""Length of an answer that is looked at; what is longer is taken for another."""
TIMEOUT_S = 5
"""Longest time for each of reading an answer and comparing two, in seconds."""
DIGITS = 9
"""Digits after the point in which numbers must agree: `0.333333` is no third."""
_BASE = re.compile(r"_\{?\d+\}?$")


def same_value(answer: str, truth: str) -> bool:
    """Whether an answer is the right one, in LaTeX or plain. What cannot be read, or not in time,
    is another. Call it in a process's main thread: its time is bounded by a signal.

    Numbers in another base must say so, which math-verify alone does not look at.
    """
    from math_verify import verify

    if max(len(answer), len(truth)) > MAX_CHARACTERS:
        return False
    if bool(_BASE.search(answer.strip())) != bool(_BASE.search(truth.strip())):
        return False
    given, right = _read(answer), _read(truth)
    if not given or not right:
        return False
    return verify(right, given, float_rounding=DIGITS, timeout_seconds=TIMEOUT_S)


def _read(answer: str) -> list:
    """Expressions that math-verify makes of it; none where that is not mathematics."""
    from math_verify import LatexExtractionConfig, parse

    return parse(
        f"\\boxed{{{answer}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=TIMEOUT_S,
    )
