"""The numbers in the picture of a step's distributions, and the picture itself."""

import pyarrow as pa
import pytest

from engines.reports.distributions import draw_distributions, step_distributions

ROWS = pa.table(
    {
        "response_tokens": [10, 20, 30, 40, 100],
        "finish_reason": ["stop", "stop", "stop", "length", "length"],
        "drafter": ["histospec", "histospec", "ngram", "ngram", "none"],
        "num_draft_tokens": [10, 30, 8, 0, 0],
        "num_accepted_tokens": [5, 30, 2, 0, 0],
    }
)


def test_lengths_and_acceptance_are_those_of_the_rows():
    of = step_distributions(ROWS, max_tokens=100)
    assert of.median_tokens == 30.0
    assert of.num_cut == 2
    assert {name: rates.tolist() for name, rates in of.acceptance.items()} == {
        "histospec": [0.5, 1.0],
        "ngram": [0.25],
    }
    assert of.mean_acceptance == {"histospec": pytest.approx(35 / 40), "ngram": 0.25}


def test_a_step_without_drafts_has_a_picture_too(tmp_path):
    undrafted = ROWS.set_column(3, "num_draft_tokens", pa.array([0] * 5))
    for name, rows in (("drafted", ROWS), ("undrafted", undrafted)):
        path = tmp_path / f"{name}.png"
        draw_distributions(step_distributions(rows, 100), path, "train step 1")
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert step_distributions(undrafted, 100).acceptance == {}
