"""The joint controller on virtual engines: the same tokens, no slower, and what it is made of."""

from dataclasses import replace

import pytest

from benchmarks.papers.joint import (
    JOINT,
    NOTHING,
    REDRAFT,
    RESHAPE,
    TECHNIQUES,
    control,
    rows_of,
    run_policies,
    run_technique,
    techniques,
)
from benchmarks.papers.joint_pipeline import HISTOPIPE, OUTLIERS, course_of
from benchmarks.papers.joint_scenes import pat_rows, pat_scene, switching
from benchmarks.papers.pat import BEST, STEPS
from benchmarks.papers.present.joint import joint_figures, shortfalls
from benchmarks.papers.settings import SETTINGS, SPECACTOR_32B_TP4
from benchmarks.papers.sharded import ShardedLatency, reshard
from engines.rollout.moves import Migrate, Race, Redraft, Reshape

STEP = STEPS[0]


@pytest.fixture(scope="module")
def scene():
    return pat_scene(BEST, STEP, 0, drafts=True)


@pytest.fixture(scope="module")
def runs(scene):
    return {name: run_technique(scene, name) for name in (NOTHING, *TECHNIQUES, JOINT)}


def test_every_technique_generates_the_same_tokens(scene, runs):
    lengths = sorted(scene.rows.column("response_tokens").tolist())
    for run in runs.values():
        assert sorted(len(r.generated.token_ids) for r in run.rollouts) == lengths


def test_the_joint_controller_is_no_slower_than_any_technique(runs):
    best_s = min(run.step_s for name, run in runs.items() if name != JOINT)
    assert runs[JOINT].step_s < best_s / 1.1, "it both reshapes and drafts"
    assert runs[JOINT].outcome.moves.num_switches > 0
    assert any(rollout.request.drafting for rollout in runs[JOINT].rollouts)


def test_a_single_technique_does_nothing_else(runs):
    outcomes = {name: run.outcome for name, run in runs.items()}
    assert {n for n, o in outcomes.items() if o.moves.num_switches} == {RESHAPE, JOINT}
    assert not any(outcome.moves.num_raced for name, outcome in outcomes.items() if name == REDRAFT)
    drafted = {n for n, run in runs.items() if any(r.request.drafting for r in run.rollouts)}
    assert drafted <= {REDRAFT, "race", JOINT}
    assert runs[NOTHING].decisions == ()


def test_reshaping_alone_is_about_pat_s_own_policy(scene, runs):
    own = run_policies(scene, "PAT", (switching(scene),))
    assert runs[RESHAPE].step_s == pytest.approx(own.step_s, rel=0.02)


def test_decisions_say_what_was_compared(runs):
    decisions = runs[JOINT].decisions
    assert all(decision.chosen <= decision.alone + 1e-9 for decision in decisions)
    assert any(option.taken for decision in decisions for option in decision.options)
    assert {o.technique for d in decisions for o in d.options} >= {RESHAPE, REDRAFT}


def test_a_scene_without_drafters_only_moves():
    bare = pat_scene(BEST, STEP, 0, drafts=False)
    controller = control(bare, techniques(bare, TECHNIQUES))
    moves = []

    class Watch:
        def decide(self, view):
            decided = controller.decide(view)
            moves.extend(decided)
            return decided

    run_policies(bare, JOINT, (Watch(),))
    assert {type(move) for move in moves} <= {Reshape, Migrate}
    assert not {type(move) for move in moves} & {Race, Redraft}


def test_rows_say_how_much_faster():
    nothing, one, other, joint = rows_of("s", {NOTHING: 10.0, "a": 5.0, "b": 8.0, JOINT: 4.0})
    assert (nothing.speedup, one.speedup, joint.speedup) == (1.0, 2.0, 2.5)
    assert (other.over_best_single, joint.over_best_single) == (None, 1.25)
    slow = rows_of("slow", {NOTHING: 10.0, "a": 5.0, JOINT: 5.05})
    slower = rows_of("slower", {NOTHING: 10.0, "a": 5.0, JOINT: 6.0})
    first, second = shortfalls([joint, *slow, *slower])
    assert "tolerance" not in first
    assert "beyond the tolerance" in second
    figures = joint_figures([joint, *slow])
    assert figures["joint_over_best_single"] == 1.25
    assert figures["joint_least_over_best_single"] == pytest.approx(5.0 / 5.05)


def test_the_same_seed_gives_the_same_rows():
    once, again = (list(pat_rows([BEST], [STEP], 3, lambda _: None)) for _ in range(2))
    assert once == again


def test_another_tp_degree_shares_what_can_be_shared():
    printed = replace(SPECACTOR_32B_TP4, verifies=True)
    double = reshard(printed, 4, 8, weights_s=4e-3, num_layers=64)
    assert double.step_s == pytest.approx(printed.step_s - 2e-3 + 64 * 16 * 0.7e-6)
    assert double.token_s == printed.token_s / 2
    both = ShardedLatency({4: printed, 8: double}, {"lookup": 1e-6})
    assert both.decode_s(8, 2, 100.0) == double.decode_s(8, 2, 100.0)
    assert both.verify_s(4, 2, 100.0, 3) == printed.verify_s(4, 2, 100.0, 3)
    assert both.draft_s("lookup", 5, 4) == pytest.approx(20e-6)


def test_overlapping_steps_go_on_with_pools():
    """A small cut of RhymeRL's: all samples are there, and nothing runs on a parked engine."""
    (setting,) = SETTINGS["rhymerl"]
    changes = {"prompts_per_step": 64, "num_prompts": 512, "group_size": 8}
    small = replace(
        setting,
        spec=setting.spec.model_copy(update=changes),
        layout=setting.layout.model_copy(update={"num_engines": 32, "num_gpus": 64}),
    )
    overlap = replace(setting.overlap, joint_steps=tuple(range(41, 47)))
    course = course_of(small, overlap, 0)
    assert course.layout.num_engines == 8
    rates = {name: course.run(name).samples_per_s for name in (HISTOPIPE, OUTLIERS, JOINT)}
    assert rates[JOINT] > rates[OUTLIERS]
