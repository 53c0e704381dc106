"""Users' names become names that MLflow accepts, and different names stay different."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name

from refrain.engines.accounting.metrics import reward_metrics, validation_metrics
from refrain.engines.accounting.names import (
    MAX_NAME_CHARACTERS,
    distinct_text,
    tracked_name,
    tracked_text,
)
from refrain.schemas.evaluation import SourceFigures
from refrain.schemas.rollout import Split
from refrain.schemas.step import RewardedBatch

HOSTILE = (
    "math (v2)",
    "math, v2",
    "a+b",
    "https://example.com/a?b=c&d=e",
    "\N{GRINNING FACE}",
    "a\nb",
    "a\n",
    "",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a//b",
    "a/",
    "x" * 300,
    "a@b",
    "a\0b",
    "\ud800",
    "%s %(x)d {x}",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc",
)
names = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=300), st.text("./a", max_size=12))


@given(names)
def test_mlflow_takes_every_name(name: str) -> None:
    tracked = tracked_name(name)
    _validate_metric_name(tracked)
    assert 0 < len(tracked) <= MAX_NAME_CHARACTERS
    assert not tracked.startswith(("..", "/"))
    assert tracked_name(tracked) == tracked


@given(names, names)
def test_two_names_stay_two(one: str, other: str) -> None:
    assert (tracked_name(one) == tracked_name(other)) == (one == other)
    assert (distinct_text(one, 50) == distinct_text(other, 50)) == (one == other)


@pytest.mark.parametrize(
    "name", ["validation/openai/gsm8k/mean_at_4", "a b.c-d:e_f/1", "validation/数学/x", "x" * 250]
)
def test_a_name_that_mlflow_takes_stays(name: str) -> None:
    assert tracked_name(name) == name


def test_figures_of_one_source_stay_together() -> None:
    """The figure must stay at the end, because lookups and descriptions use it."""
    names = [tracked_name(f"validation/{'math (v2)' * 40}/{f}_at_4") for f in ("mean", "best")]
    heads = {name.rpartition("/")[0] for name in names}
    assert len(heads) == 1
    assert [name.rpartition("/")[2] for name in names] == ["mean_at_4", "best_at_4"]


def rewarded(**parts: float) -> RewardedBatch:
    figures = {"reward_mean": 0.5, "reward_max": 1.0, "reward_min": 0.0, "best_of_group": 1.0}
    return RewardedBatch(
        split=Split.TRAIN, step=1, num_rollouts=2, parts=parts, reward_s=1.0, **figures
    )


def test_every_source_has_its_metrics() -> None:
    """Any name of a source works, even both `a@b` and `a_at_b`."""
    sources = (*HOSTILE, "a_at_b", "math _v2_")
    figures = {"mean@4": 0.5}
    metrics = validation_metrics(
        rewarded(),
        # Without validation, because pydantic refuses half a surrogate pair.
        [SourceFigures.model_construct(data_source=one, figures=figures) for one in sources],
    )
    for name in metrics:
        _validate_metric_name(name)
        assert name == "validation/reward" or name.endswith("/mean_at_4")
    assert len(metrics) == 1 + len(sources)


def test_a_scorers_own_names_are_not_the_runs() -> None:
    plain, given_too = reward_metrics(rewarded()), reward_metrics(rewarded(score=7.0, rewards=8.0))
    assert plain.items() <= given_too.items()
    assert sorted(given_too[name] for name in given_too.keys() - plain.keys()) == [7.0, 8.0]


def test_texts_are_what_databases_hold() -> None:
    assert tracked_text("a\ud800\0b", 100) == "a\\ud800\\0b"
    assert tracked_text("abcdef", 5) == "ab..."
    assert tracked_text("abcde", 5) == "abcde"
