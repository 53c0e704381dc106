"""Figures of a validation: mean, best and majority over the samples of each prompt."""

import json

import pyarrow as pa
import pytest

from engines.reward.metrics import majority_of, sample_figures


def make_rewards(groups: dict[str, list[tuple[float, dict]]]) -> pa.Table:
    rows = [
        {"prompt_key": key, "sample_index": i, "reward": reward, "extra": json.dumps(extra)}
        for key, group in groups.items()
        for i, (reward, extra) in enumerate(group)
    ]
    return pa.Table.from_pylist(rows)


def test_figures_by_data_source():
    right, wrong = (1.0, {"pred": "4"}), (0.0, {"pred": "5"})
    rewards = make_rewards(
        {
            "a": [right, wrong, right],
            "b": [wrong, wrong, right],
            "c": [(0.25, {}), (0.5, {}), (0.75, {})],
        }
    )
    figures = sample_figures(rewards, {"a": "math", "b": "math", "c": "code"})
    assert figures == pytest.approx(
        {
            "math/mean@3": 0.5,
            "math/best@3": 1.0,
            "math/maj@3": 0.5,
            "code/mean@3": 0.5,
            "code/best@3": 0.75,
        }
    )


def test_majority():
    assert majority_of([(0.0, {"pred": "5"}), (1.0, {"pred": "4"})]) == 0.0, "the first of a tie"
    none = (0.0, {"pred": None})
    assert majority_of([none, none, (1.0, {"pred": "4"})]) == 1.0, "no answer is no vote"
    assert majority_of([none, none]) == 0.0
