"""Extraction of answers from a response, and normalisation of answers that differ only in
typesetting.
"""

import re
from decimal import Decimal

REWRITES = (
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\^\{?\\circ\}?|\\[!,;: ()\[\]]|\\?[$%]|~|\*\*", ""),
    (r"(?<=\d)(?:,\s?|\{,\})(?=\d{3}(?!\d))", ""),
    (r"\s+", ""),
    (r"\.$", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt(\d)", r"\\sqrt{\1}"),
    (r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.])\.(?=\d)", "0."),
)
_NUMBER = re.compile(r"^-?\d{1,400}(\.\d{1,400})?$")
_NAMED = re.compile(r"^[a-zA-Z]=(?=.)")


def number_after_mark(solution: str) -> str | None:
    """Return the number directly after the last `####`, or the last box without that mark, else
    None."""
    _, mark, after = solution.rpartition("####")
    if not mark:
        return boxed_answer(solution)
    number = re.match(r"\s*(-?\$?-?[\d.,]*\d)", after)
    return number[1] if number else None


def answer_line(solution: str) -> str | None:
    """Return the text after the last `Answer:` on its line, without its box. Without such a line,
    return the last box."""
    lines = re.findall(r"(?i)\banswer\s*:[ \t]*([^\n]+)", solution)
    if not lines:
        return boxed_answer(solution)
    return boxed_answer(lines[-1]) or lines[-1]


def boxed_answer(solution: str) -> str | None:
    """Return the contents of the last `\\boxed{...}` or `\\fbox{...}`, or None if it has no closing
    brace."""
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        return None
    inside = solution[solution.index("{", start) + 1 :]
    depth = 1
    for brace in re.finditer(r"[{}]", inside):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return inside[: brace.start()]
    return None


def normalise_number(answer: str) -> str:
    """Return a number without commas, dollar signs and spaces."""
    return re.sub(r"[,$\s]", "", answer)


def normalise_math(answer: str) -> str:
    """Return one spelling for answers that differ only in typesetting."""
    for pattern, replacement in REWRITES:
        answer = re.sub(pattern, replacement, answer)
    return answer


def same_number(one: str, other: str) -> bool | None:
    """Return whether two plain decimal numbers are equal, or None if one of them is something
    else."""
    if not (_NUMBER.match(one) and _NUMBER.match(other)):
        return None
    return Decimal(one) == Decimal(other)


def same_text(one: str, other: str) -> bool:
    """Return whether two normalised answers are equal. A name before `=` that only one of them has
    is ignored: `x=5` equals `5`, but not `y=5`."""
    if bool(_NAMED.match(one)) != bool(_NAMED.match(other)):
        one, other = _NAMED.sub("", one), _NAMED.sub("", other)
    return bool(one) and one == other
