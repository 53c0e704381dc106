"""Scorers for answers that can be checked by comparing text: 1.0 when right, 0.0 when not.

There is no symbolic algebra: two answers are equal when they are the same text after
normalisation. `1/2` equals `\\frac{1}{2}`; `0.5` does not. A score comes with the extracted
answer as `pred` (None if there was none), which majority voting needs.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

Score = dict[str, Any]
"""`score`, a float, and whatever else is worth keeping."""

GSM8K = ("openai/gsm8k", "refrain/arithmetic")
MATH = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
)
DAPO = ("math_dapo", "math_dapo_reasoning", "math")
AIME_PREFIX = "aime"


KNOWN_DATA_SOURCES = (*GSM8K, *MATH, *DAPO, f"{AIME_PREFIX}*")
"""The data sources scored here; a trailing `*` stands for any ending."""


def builtin_scorer(data_source: str) -> Callable[[str, Any], Score]:
    """The function of (response, ground truth) for this data source.

    GSM8K: the number after the last `####`, commas and $ aside. MATH: the last box. DAPO and AIME,
    whose prompts ask for a last line `Answer: ...`: that line, or a box; veRL gives -1 to a wrong
    answer, this 0, which gives the same advantages within a group.

    Raises ValueError when there is none.
    """
    if data_source in GSM8K:
        return partial(_compare, gsm8k_answer, _plain_number)
    if data_source in MATH:
        return partial(_compare, boxed_answer, normalise_math)
    if data_source in DAPO or data_source.lower().startswith(AIME_PREFIX):
        return partial(_compare, answer_line, normalise_math)
    raise ValueError(
        f"no built-in scorer for data_source {data_source!r}; there is one for "
        f"{', '.join(KNOWN_DATA_SOURCES)}. For any other set reward.type=function, reward.path "
        "to a Python file and reward.function to its compute_score"
    )


def gsm8k_answer(solution: str) -> str | None:
    """The number right after the last `####`; None if there is none."""
    _, mark, after = solution.rpartition("####")
    number = re.match(r"\s*(-?\$?-?[\d.,]*\d)", after) if mark else None
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


def accepted_answers(ground_truth: Any) -> list[str]:
    """The right answers: one, a list of them, or a JSON list of them.

    Raises ValueError for a text that begins as such a list and is none.
    """
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith('["'):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                "`reward_model.ground_truth` begins as a JSON list of answers and is none "
                f"({error}): mend it, or make it a list"
            ) from error
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return [boxed_answer(str(truth)) or str(truth) for truth in truths]


REWRITES = (
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
    (r"\^\{?\\circ\}?|\\[!,;: ()\[\]]|\\?[$%]|~|\*\*", ""),
    (r"(?<=\d),\s?(?=\d{3}(?!\d))", ""),
    (r"\s+", ""),
    (r"\.$", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt(\d)", r"\\sqrt{\1}"),
    (r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"^[a-zA-Z]=(?=.)", ""),
)


def normalise_math(answer: str) -> str:
    """One spelling for answers that differ only in how they are typeset."""
    for pattern, replacement in REWRITES:
        answer = re.sub(pattern, replacement, answer)
    return answer


def _plain_number(text: str) -> str:
    return re.sub(r"[,$\s]", "", text)


def _compare(
    extract: Callable[[str], str | None],
    normalise: Callable[[str], str],
    solution: str,
    ground_truth: Any,
) -> Score:
    answer = extract(solution)
    pred = None if answer is None else normalise(answer)
    accepted = {normalise(text) for text in accepted_answers(ground_truth)}
    return {"score": float(pred in accepted), "pred": pred}
