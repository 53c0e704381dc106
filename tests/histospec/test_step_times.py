"""Step times learnt from measured passes approach the machine's true times and ignore
interruptions."""

import json

import numpy as np
import pytest

from refrain.engines.histospec.step_times import (
    FULL_BATCH,
    LASTING,
    LEAST_SHARE,
    WARM_UP_STEPS,
    MeasuredStepTimes,
    pass_content,
)
from refrain.engines.latency.measured import FEW_ROWS

TRUE = np.array([3e-3, 3e-4, 8e-5, 1e-7, 1e-5, 2e-5, 1.5e-5])
DEAR = np.append(TRUE[:-1], 3e-5)
"""A machine whose draft tokens cost more than the least cost that the model assumes."""


def content(batch, context, prompts, drafts):
    few = min(batch, FEW_ROWS)
    drafting = np.count_nonzero(drafts)
    return np.array([1.0, few, batch - few, context, prompts, drafting, np.sum(drafts)])


def plain_s(truth, batch, context):
    return float(truth @ content(batch, context, 0.0, []))


def run(times, rng, num_steps, truth=TRUE, noise=0.05, *, drafts_now=True):
    now_s, drafting = 0.0, False
    for number in range(num_steps):
        # The first pass without drafts after passes with drafts teaches nothing. So change only
        # every fourth pass.
        drafting = rng.random() < 0.8 if number % 4 == 0 else drafting
        batch = int(rng.integers(1, rng.choice([16, 256])))
        context = batch * float(rng.integers(50, 300))
        drafts = rng.integers(0, 8, batch) * drafting * drafts_now
        times.pass_begins(now_s)
        held = content(batch, context, float(rng.integers(0, 500)), drafts)
        now_s += float(truth @ held) * (1 + noise * rng.standard_normal())
        times.pass_ended(now_s, held)


def predict(times, batch, context, rows, tokens):
    return float(times.step_s(batch, context, np.array([rows]), np.array([tokens]))[0])


def test_step_times_converge_to_the_machine():
    times = MeasuredStepTimes()
    run(times, np.random.default_rng(0), 800, truth=DEAR)
    for batch, rows, tokens in ((256, 0, 0), (256, 200, 900), (8, 8, 60), (1, 0, 0)):
        expected = plain_s(DEAR, batch, 100.0 * batch) + float(DEAR[5:] @ [rows, tokens])
        assert predict(times, batch, 100.0 * batch, rows, tokens) == pytest.approx(
            expected, rel=0.1
        )


def test_step_times_follow_a_slower_machine():
    times, rng = MeasuredStepTimes(), np.random.default_rng(1)
    run(times, rng, 300, truth=DEAR)
    run(times, rng, 1500, truth=2.0 * DEAR)
    expected = 2.0 * (plain_s(DEAR, 128, 12800.0) + float(DEAR[5:] @ [100, 300]))
    assert predict(times, 128, 12800.0, 100, 300) == pytest.approx(expected, rel=0.1)


def draft_always(times, rng, num_passes, truth, now_s=0.0):
    """Draft in every pass, except in those that are due without drafts. Return the share of time
    that the passes without drafts took."""
    began_s, plain_s = now_s, 0.0
    for _ in range(num_passes):
        batch = int(rng.choice([4, 16, 64, 200]))
        context = batch * float(rng.integers(50, 300))
        due = times.plain_is_due(now_s)
        drafting = rng.random(batch) < rng.uniform(0.3, 1.0)
        held = content(batch, context, 0.0, drafting * rng.integers(2, 8, batch) * (not due))
        seconds = float(truth @ held) * rng.choice([0.9, 1.1])
        times.pass_begins(now_s)
        times.pass_ended(now_s + seconds, held)
        now_s, plain_s = now_s + seconds, plain_s + due * seconds
    return plain_s / (now_s - began_s)


def test_passes_without_drafts_stay_measured():
    """The machine becomes a third slower while all passes draft. Passes that are due without drafts
    take a 16th of the time, and the model learns the slowdown from them. It also estimates its
    error."""
    times, rng = MeasuredStepTimes(plain_share=1 / 16), np.random.default_rng(5)
    run(times, rng, 300)
    slower = 4 / 3 * TRUE
    assert draft_always(times, rng, 3000, slower) == pytest.approx(1 / 16, rel=0.1)
    for batch in (8, 64, 200):
        expected = plain_s(slower, batch, 150.0 * batch)
        found = predict(times, batch, 150.0 * batch, 0, 0)
        assert found == pytest.approx(expected, rel=min(0.1, 3 * times.plain_error))


def test_an_epoch_beside_other_work_is_soon_outweighed():
    """The model first learns a machine at half speed, without drafts. It must then relearn from
    short stages in which all passes draft, at whatever time of the clock they run."""
    times, rng = MeasuredStepTimes(plain_share=1 / 16), np.random.default_rng(7)
    for _ in range(5):
        run(times, rng, 500, truth=np.append(2.0 * TRUE[:5], [0.0, 0.0]))
    for stage in range(10):
        draft_always(times, rng, 150, TRUE, now_s=8.0 * stage + 0.3)
    for batch in (8, 64, 200):
        found = predict(times, batch, 150.0 * batch, 0, 0)
        assert found == pytest.approx(plain_s(TRUE, batch, 150.0 * batch), rel=0.2)


def test_without_a_share_no_pass_is_due():
    times = MeasuredStepTimes()
    assert draft_always(times, np.random.default_rng(6), 200, TRUE) == 0.0


def test_step_times_state_is_restored():
    one, other = MeasuredStepTimes(), MeasuredStepTimes()
    run(one, np.random.default_rng(3), 200)
    other.restore(json.loads(json.dumps(one.state())))
    assert predict(other, 64, 6400.0, 60, 300) == predict(one, 64, 6400.0, 60, 300)
    with pytest.raises(ValueError, match="another version"):
        other.restore({"coefficients": [1.0], "covariance": [[1.0]]})


def least_s(times, context, tokens):
    full_s = predict(times, FULL_BATCH, FULL_BATCH * context, 0, 0)
    return LEAST_SHARE * full_s / FULL_BATCH * tokens


def test_unknown_costs_are_optimistic_and_known_ones_exact():
    fresh, learnt = MeasuredStepTimes(), MeasuredStepTimes()
    fresh_s = predict(fresh, 64, 6400.0, 60, 300) - predict(fresh, 64, 6400.0, 0, 0)
    assert least_s(fresh, 100.0, 300) <= fresh_s < 2 * least_s(fresh, 100.0, 300)
    # All requests draft the same number of tokens, so only the sum of both costs can be learnt.
    rng, now_s = np.random.default_rng(4), 0.0
    for _ in range(600):
        batch = int(rng.integers(1, 256))
        drafts = np.full(batch, 4) if rng.random() < 0.9 else np.zeros(batch)
        learnt.pass_begins(now_s)
        held = content(batch, 100.0 * batch, 0.0, drafts)
        now_s += float(DEAR @ held)
        learnt.pass_ended(now_s, held)
    drafts_s = predict(learnt, 128, 12800.0, 128, 512) - predict(learnt, 128, 12800.0, 0, 0)
    assert drafts_s == pytest.approx(float(DEAR[5:] @ [128, 512]), rel=0.25)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_a_first_guess_of_drafts_goes_with_the_machine(scale):
    """Passes without drafts show how fast the machine is, also for a model 30 times as large."""
    times = MeasuredStepTimes()
    run(times, np.random.default_rng(0), 40, truth=scale * TRUE, drafts_now=False)
    drafts_s = predict(times, 128, 12800.0, 100, 400) - predict(times, 128, 12800.0, 0, 0)
    row_s = least_s(times, 100.0, 400) / LEAST_SHARE
    assert 0.2 * row_s <= drafts_s <= 0.5 * row_s


def test_interrupted_steps_teach_nothing():
    times = MeasuredStepTimes()
    run(times, np.random.default_rng(2), 100)
    before, num_learnt = times.coefficients, times.num_learnt
    times.pass_begins(0.0)
    times.pass_ended(60.0, content(2, 100.0, 0.0, [2, 0]))  # interrupted for a minute
    times.pass_begins(0.0)
    times.pass_ended(0.01, content(0, 0.0, 500.0, []))  # prompts only: the engine was maybe idle
    times.pass_ended(0.01, content(2, 100.0, 0.0, [2, 0]))  # no pass had begun
    assert (times.coefficients == before).all()
    assert times.num_learnt == num_learnt


def test_a_slowdown_that_lasts_is_learnt():
    times, rng = MeasuredStepTimes(), np.random.default_rng(1)
    run(times, rng, 300)
    run(times, rng, 2500, truth=10.0 * TRUE)
    expected = 10.0 * (plain_s(TRUE, 128, 12800.0) + float(TRUE[5:] @ [100, 300]))
    assert predict(times, 128, 12800.0, 100, 300) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("drafts", [[], [2, 0]])
def test_interruptions_between_usual_passes_teach_nothing_however_many(drafts):
    times = MeasuredStepTimes()
    run(times, np.random.default_rng(2), 100)
    held = content(2, 100.0, 0.0, drafts)
    before_s, usual_s = predict(times, 2, 100.0, *held[5:]), float(TRUE @ held)
    for seconds in ([60.0] * (LASTING - 1) + [usual_s]) * 4:
        times.pass_begins(0.0)
        times.pass_ended(seconds, held)
    assert predict(times, 2, 100.0, *held[5:]) == pytest.approx(before_s, rel=0.2)


@pytest.mark.parametrize("batch", [1, 8, 200])
def test_drafts_are_never_taken_to_be_free(batch):
    """Drafts keep a least cost, even if errors make their learnt costs negative."""
    times = MeasuredStepTimes()
    coefficients = [1e-3, 1e-5, 1e-5, 1e-8, 1e-5, -1e-5, -1e-6]
    times.restore(times.state() | {"coefficients": coefficients, "drafts": [9, 0.01]})
    drafts_s = predict(times, batch, 100.0 * batch, batch, 64)
    drafts_s -= predict(times, batch, 100.0 * batch, 0, 0)
    assert drafts_s == pytest.approx(least_s(times, 100.0, 64))
    assert drafts_s > 0.0


def test_costs_are_reported_once_learnt():
    times, rng = MeasuredStepTimes(), np.random.default_rng(0)
    run(times, rng, WARM_UP_STEPS - 1)
    assert times.costs == ()
    run(times, rng, 1000)
    assert times.costs[:4] == pytest.approx(TRUE[:4], rel=0.3, abs=1e-5)
    # Drafting rows always have draft tokens, so only the sum of both costs can be learnt.
    assert np.dot(times.costs[4:], [100, 350]) == pytest.approx(TRUE[5:] @ [100, 350], rel=0.3)
    times.coefficients[3] = -1.0
    assert times.costs[3] == 0.0
    told = (*times.costs, times.plain_error, *times.take().values())
    assert {type(value) for value in told} == {float}, (
        "vLLM cannot send numpy values between processes"
    )


def test_passes_are_distinguished_and_prompt_costs_excluded():
    times = MeasuredStepTimes()
    times.coefficients = np.array([1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 1.0])
    for began_s, ended_s, *held in (
        (10.0, 11.0, 8, 80.0, 0.0, []),
        (11.5, 13.5, 8, 80.0, 0.0, [1]),
        (14.0, 99.0, 0, 0.0, 10.0, []),
        (99.0, 103.0, 8, 80.0, 4.0, [1]),
    ):
        times.pass_begins(began_s)
        times.pass_ended(ended_s, content(*held))
        times.coefficients = np.array([1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 1.0])
    assert times.take() == {"decode_s": 1.0, "verify_s": 4.0}
    assert times.take() == {"decode_s": 0.0, "verify_s": 0.0}


def test_a_pass_is_read_from_the_tokens_of_its_requests():
    """Two requests decode, one of them with three drafts. One is half through its prompt, and one
    is new."""
    held = pass_content(
        np.array([1, 4, 30, 16]), np.array([25, 40, 32, 0]), np.array([20, 20, 64, 16])
    )
    assert held.tolist() == [1.0, 2.0, 0.0, 65.0, 46.0, 1.0, 3.0]


def test_pass_after_drafts_is_not_counted_as_draftless():
    """It takes longer, because it also handles the tokens of the pass before."""
    times, rng, now_s = MeasuredStepTimes(plain_share=1 / 128), np.random.default_rng(7), 0.0
    run(times, rng, 300)
    after_drafts = False
    for _ in range(3000):
        drafts = np.full(64, 4) * (not times.plain_is_due(now_s))
        held = content(64, 6400.0, 0.0, drafts)
        times.pass_begins(now_s)
        now_s += float(TRUE @ held) * (1.5 if after_drafts else 1.0)
        times.pass_ended(now_s, held)
        after_drafts = bool(drafts.any())
    expected = plain_s(TRUE, 64, 6400.0)
    assert predict(times, 64, 6400.0, 0, 0) == pytest.approx(expected, rel=0.1)


def test_few_rows_cost_what_they_do():
    """On two cores, the first rows of a small model's pass cost more than the further ones."""
    rows = np.array([1, 3, 6, 12, 24, 48, 80, 110, 200])
    passes_s = 1e-3 * np.array([4.3, 4.7, 5.9, 7.0, 8.2, 11.0, 15.0, 18.7, 25.4])
    times, rng, now_s = MeasuredStepTimes(), np.random.default_rng(8), 0.0
    for _ in range(600):
        batch = int(200 ** rng.random())
        times.pass_begins(now_s)
        now_s += float(np.interp(batch, rows, passes_s)) * (1 + 0.05 * rng.standard_normal())
        times.pass_ended(now_s, content(batch, 0.0, 0.0, []))
    found = [predict(times, int(batch), 0.0, 0, 0) for batch in rows]
    assert found == pytest.approx(passes_s, rel=0.1)
