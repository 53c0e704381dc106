"""Engines that are free during the rollout can do part of the rest of the step."""

from types import SimpleNamespace

import pytest

from benchmarks.papers.settings import Speculation
from benchmarks.papers.specactor import simulate_speculation, variants
from benchmarks.papers.speculation_case import Case
from benchmarks.papers.whole_step import ROLLOUT_SHARE, overlapped_s, rest_s, whole_steps
from engines.simulate.pace import Interval
from tests.benchmarks.papers.test_specactor import LAYOUT, SPEC


def rolled_out(*busy, rollouts):
    """Return a fake simulation. `busy`: intervals of each engine; `rollouts`: prompt, tokens and
    end."""
    return SimpleNamespace(
        step=SimpleNamespace(step_s=max(end for of in busy for _, end in of)),
        timelines=tuple(tuple(Interval(*at, 1, 0, False) for at in of) for of in busy),
        rollouts=tuple(
            SimpleNamespace(id=SimpleNamespace(prompt_key=key), num_tokens=num, finished_s=end)
            for key, num, end in rollouts
        ),
    )


def test_the_rest_is_what_is_no_rollout():
    assert rest_s(75.0) == pytest.approx(25.0)
    assert 75.0 / (75.0 + rest_s(75.0)) == pytest.approx(ROLLOUT_SHARE)


def test_free_engines_do_what_is_ready():
    # b's group ends at 4, when one of two engines becomes free; a's ends at 10, with the step.
    simulation = rolled_out(
        [(0, 10)], [(0, 4)], rollouts=[("b", 50, 4), ("a", 10, 3), ("a", 40, 10)]
    )
    assert overlapped_s(simulation, 2.0) == pytest.approx(1.0), "half of it is ready in time"
    assert overlapped_s(simulation, 20.0) == pytest.approx(3.0), "one of two engines is free 6 s"


def test_a_group_is_ready_with_its_last_response():
    split = rolled_out([(0, 10)], [(0, 4)], rollouts=[("a", 50, 4), ("a", 50, 10)])
    assert overlapped_s(split, 2.0) == 0.0


def test_engines_that_race_have_no_time():
    racing = rolled_out([(0, 10)], [(0, 4), (5, 10)], rollouts=[("b", 50, 4), ("a", 50, 10)])
    assert overlapped_s(racing, 20.0) == pytest.approx(0.5)
    assert overlapped_s(rolled_out([(0, 10)], rollouts=[("a", 9, 10)]), 5.0) == 0.0


@pytest.mark.parametrize("name", ["veRL", "best-of-N"])
def test_free_engines_do_no_more_than_remains(name):
    case = Case.draw(SPEC, LAYOUT, 8, 0)
    simulation = case.simulate(next(v for v in variants(case) if v.name == name))
    own_s = rest_s(simulation.step.step_s)
    done_s = overlapped_s(simulation, own_s)
    idle_s = simulation.step.idle_share * simulation.step.step_s
    assert 0.0 < done_s < min(own_s, 1.01 * idle_s)
    assert done_s <= overlapped_s(simulation, 2 * own_s)


@pytest.mark.slow
def test_whole_steps_are_shown_beside_overlapping_ones():
    speculation = Speculation(specs=(SPEC,), step=8)
    ablation = simulate_speculation(speculation, LAYOUT, 0, lambda _: None)
    found = {step.variant: step for step in whole_steps(ablation.rows)}
    baseline, whole = found["veRL"], found["best-of-N"]
    assert baseline.speedup == 1.0 < baseline.overlapping_speedup < 4 / 3
    rollout = next(row for row in ablation.rows if row.variant.name == "best-of-N")
    assert 1.0 < whole.speedup < rollout.speedup, "the rest of the step takes the same time"
    assert whole.speedup == pytest.approx(1 / (ROLLOUT_SHARE / rollout.speedup + 1 - ROLLOUT_SHARE))
    assert whole.overlapping_speedup > whole.speedup
