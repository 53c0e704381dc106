"""The gate keeps the drafts that give the most tokens per second, compared with all possible
choices. It keeps nothing where nothing pays."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.histospec.gate import (
    FIRST_TOKENS,
    LEAST_GAIN,
    LONGEST_BREAK,
    LOOKS,
    Gate,
    ProfiledStepTimes,
)
from tests.latency.machines import AffineMachine

SHARES = st.sampled_from([0.05, 0.2, 0.5, 0.8, 0.95, 1.0])


class Linear:
    """Step times with a fixed cost per step, request, drafting request and draft token."""

    def __init__(self, row=1.0, drafting=0.0, token=0.1, step=1.0):
        self.row, self.drafting, self.token, self.step = row, drafting, token, step

    def step_s(self, batch, context_tokens, num_rows, num_tokens):
        del context_tokens
        return self.step + self.row * batch + self.drafting * num_rows + self.token * num_tokens


def tokens_per_s(times, probabilities, kept):
    rows = np.array([np.count_nonzero(kept)])
    gained = sum(p[:n].sum() for p, n in zip(probabilities, kept, strict=True))
    seconds = times.step_s(len(kept), 0.0, rows, np.array([sum(kept)]))
    return float((len(kept) + gained) / seconds[0])


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(SHARES, max_size=3), min_size=1, max_size=4),
    token=st.sampled_from([0.0, 0.05, 0.3, 2.0]),
    drafting=st.sampled_from([0.0, 0.2]),
)
def test_no_other_choice_is_faster(rows, token, drafting):
    times = Linear(token=token, drafting=drafting)
    lengths = np.array([len(row) for row in rows], np.int32)
    probabilities = np.zeros((len(rows), 3))
    for row, shares in zip(probabilities, rows, strict=True):
        row[: len(shares)] = np.cumprod(shares)
    kept = Gate(times).keep(probabilities, lengths, 100.0, 1e6)
    assert (kept <= lengths).all()
    chosen = tokens_per_s(times, probabilities, kept.tolist())
    choices = product(*(range(n + 1) for n in lengths))
    if drafting == 0.0:
        best = max(tokens_per_s(times, probabilities, choice) for choice in choices)
    else:
        # With a cost per drafting request the gate is greedy, but never worse than no drafts.
        best = tokens_per_s(times, probabilities, [0] * len(rows))
    # The gate ignores gains below LEAST_GAIN.
    assert chosen >= best / LEAST_GAIN * (1 - 1e-9)
    assert chosen == tokens_per_s(times, probabilities, [0] * len(rows)) or chosen >= best * (
        1 - 1e-9
    )


def keep(gate, num_rows=8, share=0.5):
    return gate.keep(np.full((num_rows, 1), share), np.ones(num_rows, np.int32), 100.0, 1e6)


def test_off_costs_less_and_less_and_the_gate_reopens():
    times = Linear(token=9.0)
    gate = Gate(times)
    looked = []
    for step in range(600):
        if gate.looks(8):
            looked.append(step)
            assert not keep(gate).any()
    assert looked[:LOOKS] == list(range(LOOKS))
    gaps = np.diff(looked)
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] == LONGEST_BREAK
    # When drafting pays again, the next look notices it. From then on every step looks.
    times.token = 0.01
    opened = next(step for step in range(LONGEST_BREAK + 1) if gate.looks(8))
    assert opened <= LONGEST_BREAK
    assert keep(gate).all()
    assert all(gate.looks(8) for _ in range(20))


def test_a_shrunken_batch_is_looked_at_at_once():
    gate = Gate(Linear(token=9.0))
    for _ in range(40):
        if gate.looks(100):
            keep(gate, 100)
    assert gate.looks(50)


def test_restored_gate_continues_where_it_was():
    times = Linear(token=9.0)
    gate, other = Gate(times), Gate(times)
    for _ in range(40):
        if gate.looks(100):
            keep(gate, 100)
    other.restore(gate.state())
    looked = [[each.looks(100) for _ in range(80)] for each in (gate, other, Gate(times))]
    assert looked[0] == looked[1] != looked[2]
    state = gate.state()
    closed = {"breaks": state["breaks"] | {"num_closed": "1"}}
    looked = {"look_times": state["look_times"] | {"more": 1.0}}
    for strange in ({}, state | {"more": 1}, state | closed, state | looked):
        with pytest.raises(ValueError, match="another version"):
            other.restore(strange)


def test_a_step_tries_no_more_than_was_tried_before():
    """Unknown drafts look good in every row, but one step need not try them in all rows."""
    times = Linear(row=0.0, token=0.0)
    drafted, chances = np.full(100, 4, np.int32), np.full((100, 4), 0.9)
    tried = [int(Gate(times).keep(chances, drafted, 1.0, known).sum()) for known in (0, 50, 1e4)]
    assert tried == [FIRST_TOKENS, FIRST_TOKENS + 50, 400]


def test_without_step_times_everything_is_kept():
    gate = Gate(None)
    drafted = np.array([3, 0, 2], np.int32)
    assert gate.keep(np.full((3, 3), 0.01), drafted, 1.0, 0.0) is drafted
    assert gate.looks(10**6)


def test_profiled_times_are_linear_between_windows():
    machine = AffineMachine()
    times = ProfiledStepTimes(machine, 1)
    context = 2.0**10
    got = times.step_s(4, context, np.zeros(3), np.array([0, 6, 8]))
    one, two = (machine.verify_s(1, 4, context, w) for w in (1, 2))
    assert got == pytest.approx([machine.decode_s(1, 4, context), (one + two) / 2, two])
