"""The figures of `refrain bench distillation`."""

import duckdb
import pytest

from refrain.benchmarks.distillation import HELD_OUT, figures, samples_until


def run(*rewards: float) -> list[dict[str, float]]:
    return [{"step": n, "reward": reward, "samples": 100 * n} for n, reward in enumerate(rewards)]


def test_a_student_is_as_good_after_two_validations_in_a_row() -> None:
    assert samples_until(run(0.1, 0.5, 0.4, 0.5, 0.6, 0.3), 0.5) == 300
    assert samples_until(run(0.1, 0.5, 0.6), 0.5) == 100
    assert samples_until(run(0.5, 0.6), 0.5) == 0
    assert samples_until(run(0.1, 0.6, 0.4, 0.6), 0.5) == float("inf")


def test_figures_leave_out_what_was_never_reached() -> None:
    rows = [
        {"way": "the teacher", "reward": 0.62},
        *(
            {"way": "teacher", "seed": n, "held_out": run(0.1, 0.61 - n / 100, 0.7)}
            for n in range(2)
        ),
        *({"way": "grpo", "seed": n, "held_out": run(0.1, 0.2 + n / 10)} for n in range(2)),
    ]
    found = figures(rows)
    assert found["samples_teacher"] == 100
    assert "samples_grpo" not in found
    assert found["last_grpo"] == pytest.approx(0.25)


def test_samples_before_a_validation_are_counted() -> None:
    with duckdb.connect() as connection:
        for table in ("rollouts", "rewards"):
            connection.execute(f"CREATE TABLE {table} (split TEXT, step INT, reward DOUBLE)")
            rows = [("train", 1), ("train", 1), ("train", 2), ("validation", 0), ("validation", 2)]
            connection.executemany(f"INSERT INTO {table} VALUES (?, ?, 0.5)", rows)
        assert connection.execute(HELD_OUT).fetchall() == [(0, 0.5, 0), (2, 0.5, 3)]
