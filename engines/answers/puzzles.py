"""Scores of reasoning-gym data by its own scorers: https://github.com/open-thought/reasoning-gym.

A row's ground truth is the JSON of what the scorer needs to know about a question:

    {"answer": "12", "metadata": {...}, "tuples": false}
"""

import importlib
import json
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from refrain.engines.answers.extraction import boxed_answer

PREFIX = "reasoning_gym/"
"""Prefix of the `data_source` of reasoning-gym sets; the name of the set follows."""
VERSION = "0.1.25"
INSTRUCTION = "Think step by step. Give the final answer between <answer> and </answer>."
_OPEN, _CLOSE = "<answer>", "</answer>"


@cache
def reasoning_gym() -> Any:
    """Return the package. Raise ValueError if it cannot be imported, or has another version."""
    try:
        found = version("reasoning-gym")
        with warnings.catch_warnings():
            # Ignore syntax warnings from the packages that it imports.
            warnings.simplefilter("ignore")
            package = importlib.import_module("reasoning_gym")
    except (PackageNotFoundError, ImportError) as error:
        raise ValueError(_advice(f"it cannot be imported ({error})")) from error
    if found != VERSION:
        raise ValueError(_advice(f"version {found} is installed"))
    return package


def _advice(why: str) -> str:
    return (
        f"these questions need reasoning-gym {VERSION}, but {why}. "
        f"Run .venv/bin/python -m pip install reasoning-gym=={VERSION}"
    )


@cache
def puzzle_scorer(name: str) -> Callable[[str, Any], dict[str, Any]]:
    """Return the function (response, ground truth) -> score of a set. `name`: without the prefix.

    Some sets give scores between 0 and 1 for partly right answers. A response without an answer
    scores 0. Raise ValueError if the package or the set is missing.
    """
    if name not in reasoning_gym().factory.DATASETS:
        raise ValueError(f"reasoning-gym {VERSION} has no set {name!r}")
    score = reasoning_gym().get_score_answer_fn(name)

    def compare(response: str, ground_truth: Any) -> dict[str, Any]:
        answer = stated_answer(response)
        entry = read_entry(ground_truth)
        value = 0.0 if answer is None else float(score(answer, entry))
        return {"score": value, "pred": answer}

    return compare


def stated_answer(response: str) -> str | None:
    """Return the text of the last answer in tags, or else in a box. None if there is neither."""
    before, found, last = response.rpartition(_OPEN)
    if found and _CLOSE in last:
        return last.partition(_CLOSE)[0].strip()
    if found and _CLOSE in before:
        return stated_answer(before)
    return boxed_answer(response)


def write_entry(entry: dict[str, Any], score: Callable[[str, Any], float]) -> str:
    """Return the ground truth of a question as JSON.

    JSON has no tuples and no fractions, and some scorers compare with them. So try lists, then
    tuples, and keep the form with which the scorer gives the same scores as with the original.

    Raise ValueError if neither form works.
    """
    tried = (entry["answer"], "", "7")
    expected = [_tried(score, answer, entry) for answer in tried]
    for tuples in (False, True):
        told = {"answer": entry["answer"], "metadata": entry["metadata"], "tuples": tuples}
        text = json.dumps(told, default=str)
        if [_tried(score, answer, read_entry(text)) for answer in tried] == expected:
            return text
    raise ValueError(f"JSON cannot hold what the scorer of {entry['question'][:80]!r} needs")


def _tried(score: Callable[[str, Any], float], answer: str, entry: dict[str, Any]) -> float | str:
    """Return a score, or the name of the error that the scorer raises."""
    try:
        return float(score(answer, entry))
    except Exception as error:  # Whatever the set's own code raises.
        return type(error).__name__


def read_entry(ground_truth: Any) -> dict[str, Any]:
    """Return the entry that `write_entry` wrote. Raise ValueError for anything else."""
    try:
        told = json.loads(ground_truth)
        entry = {"answer": told["answer"], "metadata": told["metadata"]}
        return _with_tuples(entry) if told["tuples"] else entry
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(
            "`reward_model.ground_truth` was not written by `refrain data reasoning-gym` "
            f"({type(error).__name__}: {error}). Write the data file again with that command"
        ) from error


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tuples(inner) for name, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
