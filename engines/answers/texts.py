"""Answers in the text of a response, and one spelling for those that are only typeset in other
ways."""

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
    """The number right after the last `####`; without that mark, the last box; else None."""
    _, mark, after = solution.rpartition("####")
    if not mark:
        return boxed_answer(solution)
    number = re.match(r"\s*(-?\$?-?[\d.,]*\d)", after)
    return number[1] if number else None


def answer_line(solution: str) -> str | None:
    """Text after the last `Answer:` on its line, out of its box; without one, the last box."""
    lines = re.findall(r"(?i)\banswer\s*:[ \t]*([^\n]+)", solution)
    if not lines:
        return boxed_answer(solution)
    return boxed_answer(lines[-1]) or lines[-1]


def boxed_answer(solution: str) -> str | None:
    """Contents of the last `\\boxed{...}` or `\\fbox{...}`; None without a closing brace."""
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
    """A number without commas, dollars and blanks."""
    return re.sub(r"[,$\s]", "", answer)


def normalise_math(answer: str) -> str:
    """One spelling for answers that differ only in how they are typeset."""
    for pattern, replacement in REWRITES:
        answer = re.sub(pattern, replacement, answer)
    return answer


def same_number(one: str, other: str) -> bool | None:
    """Whether two plain decimal numbers are the same; None where one is something else."""
    if not (_NUMBER.match(one) and _NUMBER.match(other)):
        return None
    return Decimal(one) == Decimal(other)


def same_text(one: str, other: str) -> bool:
    """Whether two normalised answers are the same, where a name before `=` that one of them lacks
    says nothing: `x=5` is `5`, and not `y=5`."""
    if bool(_NAMED.match(one)) != bool(_NAMED.match(other)):
        one, other = _NAMED.sub("", one), _NAMED.sub("", other)
    return bool(one) and one == other
