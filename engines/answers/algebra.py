"""Comparison of two answers by value, with math-verify. Equal are, for example, `0.5` and
`\\frac{1}{2}`, `1+x^2` and `x^2+1`, `5\\text{ cm}` and `5`; sets and intervals are compared too.
"""

import re

MAX_CHARACTERS = 400
"""Longest answer that is compared. A longer one counts as wrong."""
TIMEOUT_S = 5
"""Timeout in seconds, for reading an answer and for comparing two."""
DIGITS = 9
"""Digits after the point in which numbers must agree: `0.333333` is not a third."""
_BASE = re.compile(r"_\{?\d+\}?$")


def same_value(answer: str, truth: str) -> bool:
    """Return whether an answer, in LaTeX or plain text, equals the right one. An answer that cannot
    be read in time counts as wrong. Call this in the main thread of a process, because its timeout
    uses a signal.

    If one answer names a base, such as `101_2`, the other must name one too. math-verify alone
    ignores bases.
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
    """Return the expressions that math-verify reads in an answer, or none if it is not
    mathematics."""
    from math_verify import LatexExtractionConfig, parse

    return parse(
        f"\\boxed{{{answer}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=TIMEOUT_S,
    )
