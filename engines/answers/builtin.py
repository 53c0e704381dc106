"""Built-in scorers: 1.0 if an answer is right, 0.0 if it is wrong.

Two answers are equal if their normalised texts are equal, or else their values
(`algebra.same_value`). A score comes with the extracted answer as `pred` (None if there was none),
for majority voting. `compute_score` has the signature of a user's own reward function.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from refrain.engines.answers.algebra import same_value
from refrain.engines.answers.extraction import (
    answer_line,
    boxed_answer,
    normalise_math,
    normalise_number,
    number_after_mark,
    same_number,
    same_text,
)
from refrain.engines.answers.puzzles import PREFIX, puzzle_scorer

Score = dict[str, Any]
"""`score`, a float, and any other values to record."""

GSM8K = ("openai/gsm8k", "refrain/arithmetic")
MATH = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
)
DAPO = ("math_dapo", "math_dapo_reasoning", "math")
AIME_PREFIX = "aime"


MAX_PRED_CHARACTERS = 1000
"""Longest extracted answer that is recorded."""
KNOWN_DATA_SOURCES = (*GSM8K, *MATH, *DAPO, f"{AIME_PREFIX}*", f"{PREFIX}*")
"""Data sources with a built-in scorer. A trailing `*` stands for any ending."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> Score:
    """Return the score of a response, by its data source."""
    del extra_info
    return builtin_scorer(data_source)(solution_str, ground_truth)


def builtin_scorer(data_source: str) -> Callable[[str, Any], Score]:
    """Return the function (response, ground truth) -> score of this data source. Raise ValueError
    if there is none.

    - GSM8K: the number after the last `####`, without commas and $. Without that mark, the last
      box.
    - MATH: the last box.
    - DAPO and AIME: the last line `Answer: ...`, which their prompts ask for, or the last box. veRL
      gives -1 to a wrong answer and refrain 0, with the same advantages within a group.
    - Sets of reasoning-gym: its own scorer, on the text between the last `<answer>` and
      `</answer>`, or
      in the last box.
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
        f"no built-in scorer for data_source {data_source!r}; supported: "
        f"{', '.join(KNOWN_DATA_SOURCES)}. For other data, set reward.type=function, reward.path "
        "to a Python file and reward.function to its compute_score"
    )


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the right answers, given one answer, a list of them, or a JSON list of them. Raise
    ValueError if a text begins like a JSON list but is not one."""
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith('["'):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                "`reward_model.ground_truth` begins like a JSON list of answers but is not one "
                f"({error}). Fix the text, or store a list"
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
