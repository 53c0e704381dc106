"""Step times learnt from steps: the truth is found, interruptions are not learnt."""

import json

import numpy as np
import pytest

from engines.histospec.step_times import WARM_UP_STEPS, MeasuredStepTimes, PassTimes

TRUE = np.array([3e-3, 8e-5, 1e-7, 2e-5, 1.5e-5])


def run(times, rng, num_steps, truth=TRUE, noise=0.05):
    now_s = 0.0
    for _ in range(num_steps):
        batch = int(rng.integers(1, 256))
        context = batch * float(rng.integers(50, 300))
        drafts = rng.integers(0, 8, batch) * (rng.random() < 0.8)
        times.step_begins(now_s, context, drafts)
        features = [1.0, batch, context, np.count_nonzero(drafts), drafts.sum()]
        now_s += float(truth @ features) * (1 + noise * rng.standard_normal())
        times.step_ended(now_s, batch, joined=False)


def predict(times, batch, context, rows, tokens):
    return float(times.step_s(batch, context, np.array([rows]), np.array([tokens]))[0])


def test_it_finds_the_machine_it_runs_on():
    times = MeasuredStepTimes()
    run(times, np.random.default_rng(0), 400)
    for batch, rows, tokens in ((256, 0, 0), (256, 200, 900), (8, 8, 60), (1, 0, 0)):
        expected = float(TRUE @ [1.0, batch, 100.0 * batch, rows, tokens])
        assert predict(times, batch, 100.0 * batch, rows, tokens) == pytest.approx(
            expected, rel=0.1
        )


def test_it_follows_a_machine_that_gets_slower():
    times, rng = MeasuredStepTimes(), np.random.default_rng(1)
    run(times, rng, 300)
    run(times, rng, 1500, truth=2.0 * TRUE)
    expected = 2.0 * float(TRUE @ [1.0, 128, 12800.0, 100, 300])
    assert predict(times, 128, 12800.0, 100, 300) == pytest.approx(expected, rel=0.1)


def test_what_was_learnt_is_carried_on():
    one, other = MeasuredStepTimes(), MeasuredStepTimes()
    run(one, np.random.default_rng(3), 200)
    other.restore(json.loads(json.dumps(one.state())))
    assert predict(other, 64, 6400.0, 60, 300) == predict(one, 64, 6400.0, 60, 300)
    with pytest.raises(ValueError, match="another version"):
        other.restore({"coefficients": [1.0], "covariance": [[1.0]]})


def test_what_is_not_known_is_tried_and_what_is_known_is_not_belittled():
    fresh, learnt = MeasuredStepTimes(), MeasuredStepTimes()
    assert predict(fresh, 64, 6400.0, 60, 300) == predict(fresh, 64, 6400.0, 0, 0)
    # Always about the same number of drafts for each request: their sum is known, if not its parts.
    rng, now_s = np.random.default_rng(4), 0.0
    for _ in range(600):
        batch = int(rng.integers(1, 256))
        drafts = np.full(batch, 4) if rng.random() < 0.9 else np.zeros(batch)
        learnt.step_begins(now_s, 100.0 * batch, drafts)
        rows, tokens = np.count_nonzero(drafts), drafts.sum()
        now_s += float(TRUE @ [1.0, batch, 100.0 * batch, rows, tokens])
        learnt.step_ended(now_s, batch, joined=False)
    drafts_s = predict(learnt, 128, 12800.0, 128, 512) - predict(learnt, 128, 12800.0, 0, 0)
    assert drafts_s == pytest.approx(float(TRUE[3:] @ [128, 512]), rel=0.25)


def test_interrupted_steps_teach_nothing():
    times = MeasuredStepTimes()
    run(times, np.random.default_rng(2), 100)
    before, num_learnt = times.coefficients, times.num_learnt
    times.step_begins(0.0, 100.0, [2, 0])
    times.step_ended(60.0, 2, joined=False)  # a pause of a minute
    times.step_begins(0.0, 100.0, [2, 0])
    times.step_ended(0.01, 2, joined=True)  # a prefill was in it
    times.step_ended(0.01, 2, joined=False)  # nothing had begun
    assert (times.coefficients == before).all()
    assert times.num_learnt == num_learnt


def test_predictions_never_pay_one_to_draft():
    times = MeasuredStepTimes()
    times.coefficients = np.array([1e-3, 1e-5, 1e-8, -1e-5, -1e-6])
    assert predict(times, 8, 100.0, 8, 64) == predict(times, 8, 100.0, 0, 0)


def test_costs_are_told_once_they_are_learnt():
    times, rng = MeasuredStepTimes(), np.random.default_rng(0)
    run(times, rng, WARM_UP_STEPS - 1)
    assert times.costs == ()
    run(times, rng, 500)
    assert times.costs == pytest.approx(TRUE, rel=0.3, abs=1e-5)
    times.coefficients[2] = -1.0
    assert times.costs[2] == 0.0


def test_passes_are_told_apart_and_those_with_prefill_left_out():
    passes = PassTimes()
    passes.pass_ended(5.0, prefilled=False)
    for began_s, ended_s, drafts, prefilled in (
        (10.0, 11.0, 0, False),
        (11.5, 13.5, 7, False),
        (14.0, 99.0, 7, True),
        (99.0, 99.5, 0, False),
    ):
        passes.pass_begins(began_s, drafts)
        passes.pass_ended(ended_s, prefilled)
    assert passes.take() == {"decode_s": 1.5, "verify_s": 2.0}
    assert passes.take() == {"decode_s": 0.0, "verify_s": 0.0}
