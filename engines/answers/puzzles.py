"""Scores of reasoning-gym's own scorers, for its sets: https://github.com/open-thought/reasoning-gym.

A row's ground truth is what that package's scorer wants of a question, as JSON:

    {"answer": "12", "metadata": {...}, "tuples": false}
"""

import importlib
import json
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engines.answers.texts import boxed_answer

PREFIX = "reasoning_gym/"
"""Beginning of the `data_source` of its sets; the set's name follows."""
VERSION = "0.1.25"
INSTRUCTION = "Think step by step. Give the final answer between <answer> and </answer>."
_OPEN, _CLOSE = "<answer>", "</answer>"


@cache
def reasoning_gym() -> Any:
    """Return the package. Raises ValueError where it is not installed, or not whole, or another
    version of it is."""
    try:
        found = version("reasoning-gym")
        with warnings.catch_warnings():
            # Of the syntax in packages that it needs.
            warnings.simplefilter("ignore")
            package = importlib.import_module("reasoning_gym")
    except (PackageNotFoundError, ImportError) as error:
        raise ValueError(_advice(f"it cannot be imported ({error})")) from error
    if found != VERSION:
        raise ValueError(_advice(f"version {found} is installed"))
    return package


def _advice(why: str) -> str:
    return (
        f"reasoning-gym {VERSION} makes and scores these questions, and {why}: "
        f"run .venv/bin/python -m pip install reasoning-gym=={VERSION}"
    )


@cache
def puzzle_scorer(name: str) -> Callable[[str, Any], dict[str, Any]]:
    """Return the function of (response, ground truth) of this set; `name`: without the prefix.

    Partly right answers of some sets score between 0 and 1. A response without an answer scores 0.
    Raises ValueError when the package or the set is not there.
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
    """Return the text of the last answer in tags, or else in a box."""
    before, found, last = response.rpartition(_OPEN)
    if found and _CLOSE in last:
        return last.partition(_CLOSE)[0].strip()
    if found and _CLOSE in before:
        return stated_answer(before)
    return boxed_answer(response)


def write_entry(entry: dict[str, Any], score: Callable[[str, Any], float]) -> str:
    """Return a question's answer and metadata as a ground truth. JSON has no tuples and no
    fractions, which some scorers compare with: the form is kept in which they score as they should.

    Raises ValueError when there is none.
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
    """A score, or the name of the error that a malformed answer makes."""
    try:
        return float(score(answer, entry))
    except Exception as error:  # Whatever the set's own code raises.
        return type(error).__name__


def read_entry(ground_truth: Any) -> dict[str, Any]:
    """Return what `write_entry` wrote. Raises ValueError for anything else."""
    try:
        told = json.loads(ground_truth)
        entry = {"answer": told["answer"], "metadata": told["metadata"]}
        return _with_tuples(entry) if told["tuples"] else entry
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(
            "`reward_model.ground_truth` is not what refrain data reasoning-gym writes: "
            f"make the file again ({type(error).__name__}: {error})"
        ) from error


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tuples(inner) for name, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
