"""Scorers that refrain ships: 1.0 when an answer is right, 0.0 when not.

Two answers are equal when they are the same text after normalisation, or else the same value
(`algebra.same_value`). A score comes with the extracted answer as `pred` (None if there was none),
which majority voting needs. `compute_score` is called as a user's own function is.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from engines.answers.algebra import same_value
from engines.answers.puzzles import PREFIX, puzzle_scorer
from engines.answers.texts import (
    answer_line,
    boxed_answer,
    normalise_math,
    normalise_number,
    number_after_mark,
    same_number,
    same_text,
)

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


MAX_PRED_CHARACTERS = 1000
"""Length of an extracted answer in the record."""
KNOWN_DATA_SOURCES = (*GSM8K, *MATH, *DAPO, f"{AIME_PREFIX}*", f"{PREFIX}*")
"""The data sources scored here; a trailing `*` stands for any ending."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> Score:
    """Score of a response, by its data source."""
    del extra_info
    return builtin_scorer(data_source)(solution_str, ground_truth)


def builtin_scorer(data_source: str) -> Callable[[str, Any], Score]:
    """The function of (response, ground truth) for this data source.

    GSM8K: the number after the last `####`, commas and $ aside; without that mark, the last box.
    MATH: the last box. DAPO and AIME, whose prompts ask for a last line `Answer: ...`: that line,
    or a box; veRL gives -1 to a wrong answer, this 0, which gives the same advantages within a
    group. Sets of reasoning-gym: its own scorer, of the text between the last `<answer>` and
    `</answer>`, or in the last box.

    Raises ValueError when there is none.
    """
    if data_source in GSM8K:
        return partial(_compare, number_after_mark, normalise_number)
    if data_source in MATH:
        return partial(_compare, boxed_answer, normalise_math)
    if data_source in DAPO or data_source.lower().startswith(AIME_PREFIX):
        return partial(_compare, answer_line, normalise_math)
    if data_source.startswith(PREFIX):
        return puzzle_scorer(data_source.removeprefix(PREFIX))
    raise ValueError(
        f"no built-in scorer for data_source {data_source!r}; there is one for "
        f"{', '.join(KNOWN_DATA_SOURCES)}. For any other set reward.type=function, reward.path "
        "to a Python file and reward.function to its compute_score"
    )


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


def _compare(
    extract: Callable[[str], str | None],
    normalise: Callable[[str], str],
    solution: str,
    ground_truth: Any,
) -> Score:
    answer = extract(solution)
    if answer is None:
        return {"score": 0.0, "pred": None}
    pred = normalise(answer)

    def is_right(truth: str) -> bool:
        normalised = normalise(truth)
        if "%" not in answer + truth:
            as_numbers = same_number(pred, normalised)
            if as_numbers is not None:
                return as_numbers
        return same_text(pred, normalised) or same_value(answer, truth)

    return {
        "score": float(any(map(is_right, accepted_answers(ground_truth)))),
        "pred": pred[:MAX_PRED_CHARACTERS],
    }
