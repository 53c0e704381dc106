"""Rollouts on machines with known times: drafting never makes them much slower."""

from dataclasses import dataclass

import numpy as np
import pytest

from refrain.engines.histospec.gate import LOOK_ROWS, DraftTimes, Gate
from refrain.engines.histospec.step_times import MeasuredStepTimes
from tests.histospec.test_step_times import content

WINDOW = 4


@dataclass(frozen=True)
class Machine:
    """A pass takes 5 ms, and 0.2 ms for each row."""

    token_s: float
    """Seconds that a draft token adds to a pass."""
    look_row_s: float
    """Seconds to draft for a row. A look costs 50 rows more."""
    accepted: float
    """Probability that a draft token is accepted after those before it."""
    slowness: float = 1.0
    """Factor of the time of a pass."""

    def pass_s(self, held):
        _, few, beyond, _, _, _, num_drafts = held
        return self.slowness * (5e-3 + 2e-4 * (few + beyond) + self.token_s * num_drafts)

    def look_s(self, batch):
        return self.look_row_s * (50 + batch)


def roll_out(machine, left, rng, gate, times, now_s, *, drafts):
    """Return the time at which the stage ends, and the number of its looks. `left`: tokens of each
    request."""
    num_looks = 0
    while len(left):
        batch, num = len(left), np.zeros(len(left), np.int32)
        if drafts and not times.plain_is_due(now_s) and gate.looks(batch):
            drafted = np.minimum(left - 1, WINDOW).astype(np.int32)
            chances = np.cumprod(np.full((batch, WINDOW), machine.accepted), axis=1)
            chances *= np.arange(WINDOW) < drafted[:, None]
            num = gate.keep(chances, drafted, 100.0 * batch, 1e6)
            gate.proposed(batch, machine.look_s(batch))
            now_s += machine.look_s(batch)
            num_looks += 1
        held = content(batch, 100.0 * batch, 0.0, num)
        times.pass_begins(now_s)
        now_s += machine.pass_s(held) * rng.uniform(0.9, 1.1)
        times.pass_ended(now_s, held)
        right = np.cumprod(rng.random((batch, WINDOW)) < machine.accepted, axis=1).sum(axis=1)
        left = left - np.minimum(right, num) - 1
        left = left[left > 0]
    return now_s, num_looks


def seconds(machine, num_stages, *, drafts, num_tokens=None):
    """Return seconds and number of looks of each stage. Each stage starts with the gate's state of
    the last one. `num_tokens`: of each request of a stage."""
    gate, times, rng = Gate(None), MeasuredStepTimes(plain_share=1 / 16), np.random.default_rng(0)
    found, looks, now_s = [], [], 0.0
    drawn = np.random.default_rng(1).geometric(1 / 60, (num_stages, 128))
    for lengths in drawn if num_tokens is None else [num_tokens] * num_stages:
        learnt = gate.state()
        gate = Gate(times)
        gate.restore(learnt)
        ends_s, num_looks = roll_out(machine, lengths, rng, gate, times, now_s, drafts=drafts)
        found.append(ends_s - now_s)
        looks.append(num_looks)
        now_s = ends_s
    return np.array(found), np.array(looks)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Machine(token_s=1e-5, look_row_s=4e-5, accepted=0.1), id="dear to draft"),
        pytest.param(Machine(token_s=2e-4, look_row_s=4e-6, accepted=0.3), id="dear to verify"),
        pytest.param(Machine(token_s=1e-4, look_row_s=2e-5, accepted=0.02), id="never right"),
    ],
)
def test_drafts_that_do_not_pay_cost_little(machine):
    """The first stage may cost a little more, because the gate knows nothing yet."""
    off, _ = seconds(machine, 6, drafts=False)
    on, _ = seconds(machine, 6, drafts=True)
    assert on[0] <= 1.06 * off[0]
    assert on[1:].sum() <= 1.03 * off[1:].sum()


@pytest.mark.parametrize("slowness", [1.0, 9.0, 30.0])
@pytest.mark.parametrize(
    ("token_s", "accepted", "first", "later"),
    [
        pytest.param(2.85e-4, 0.58, 1.1, 1.02, id="dear to verify"),
        pytest.param(1e-4, 0.58, 0.95, 0.92, id="cheap to verify"),
    ],
)
def test_slow_passes_teach_as_much(slowness, token_s, accepted, first, later):
    """A stage of 36 passes takes 0.4 to 12 seconds."""
    machine, num_tokens = Machine(token_s, 4e-6, accepted, slowness), np.full(32, 36)
    off, _ = seconds(machine, 8, drafts=False, num_tokens=num_tokens)
    on, _ = seconds(machine, 8, drafts=True, num_tokens=num_tokens)
    assert on[0] <= first * off[0]
    assert on[1:].sum() <= later * off[1:].sum()


def test_drafts_that_pay_are_made():
    machine = Machine(token_s=1e-5, look_row_s=4e-6, accepted=0.7)
    off, _ = seconds(machine, 4, drafts=False)
    on, looks = seconds(machine, 4, drafts=True)
    assert on.sum() < 0.6 * off.sum()
    assert looks.min() > 50


def test_where_drafting_is_dear_few_steps_draft():
    machine = Machine(token_s=1e-5, look_row_s=4e-5, accepted=0.1)
    _, looks = seconds(machine, 4, drafts=True)
    assert looks[1:].max() < 60


def test_draft_times_ignore_compilation_and_interruptions():
    times = DraftTimes()
    assert times.of(128) == 0.0
    times.learn(128, 2.0)
    for batch in (128, 64, 128):
        times.learn(batch, 1e-5 * (batch + LOOK_ROWS))
        times.learn(batch, 1e-5 * (batch + LOOK_ROWS))
        times.learn(batch, 0.5)
        assert times.of(256) == pytest.approx(1e-5 * (256 + LOOK_ROWS))
