"""All techniques together on virtual engines: the same tokens as without, and faster than each."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.papers.joint import _scenes, rows_of, weigh
from benchmarks.papers.joint_pipeline import pipeline_scene
from benchmarks.papers.joint_scenes import pat_scene, specactor_scene
from benchmarks.papers.pat import BEST, STEPS
from benchmarks.papers.present.joint import joint_figures, shortfalls
from benchmarks.papers.real_run import (
    ALL,
    DRAFTS,
    HISTOPIPE,
    NOTHING,
    RESHAPE,
    SPECACTOR,
    only,
    switched_on,
)
from benchmarks.papers.scene import run_scene
from benchmarks.papers.settings import SETTINGS, SPECACTOR_32B_TP4, Speculation
from benchmarks.papers.sharded import ShardedLatency, reshard
from benchmarks.papers.speculation_case import Case
from engines.control.reshaping import MissedSavings
from engines.latency.model_shape import SHAPES
from engines.rollout.moves import Reshape
from engines.simulate.cluster import even
from schemas.simulate import ClusterLayout

STEP = STEPS[0]


@pytest.fixture(scope="module")
def scene():
    return pat_scene(BEST, STEP, 0)


@pytest.fixture(scope="module")
def runs(scene):
    scenes = {name: with_only(scene, name) for name in (NOTHING, *switched_on(scene.config), ALL)}
    return {name: run_scene(one, one.policies()) for name, one in scenes.items()}


def with_only(scene, technique):
    return replace(scene, config=only(scene.config, technique))


def test_every_technique_generates_the_same_tokens(scene, runs):
    lengths = sorted(scene.rows.column("response_tokens").tolist())
    for run in runs.values():
        assert sorted(len(r.generated.token_ids) for r in run.rollouts) == lengths


def test_all_together_are_faster_than_each(runs):
    best_s = min(run.step_s for name, run in runs.items() if name != ALL)
    assert runs[ALL].step_s < best_s / 1.1, "all together are not faster than the best alone"
    assert runs[ALL].outcome.moves.num_switches > 0


def test_a_single_technique_does_nothing_else(runs):
    assert {n for n, run in runs.items() if run.outcome.moves.num_switches} == {RESHAPE, ALL}
    drafted = {
        name
        for name, run in runs.items()
        if any(rollout.generated.num_draft_tokens for rollout in run.rollouts)
    }
    assert drafted == {DRAFTS, ALL}


def test_scene_makes_only_moves_of_its_config(scene):
    reshaping = with_only(scene, RESHAPE)
    (controller,) = reshaping.policies()
    moves = []

    class Watch:
        def decide(self, view):
            moves.extend(controller.decide(view))
            return []

    run_scene(reshaping, (Watch(),))
    assert {type(move) for move in moves} == {Reshape}
    assert with_only(scene, NOTHING).policies() == ()


def test_omitted_techniques_are_switched_off():
    (setting,) = SETTINGS["specactor"]
    small = {"num_prompts": 8, "prompts_per_step": 4, "group_size": 4, "num_steps": 2}
    spec = setting.spec.model_copy(update=small)
    case = Case.draw(spec, ClusterLayout(num_engines=10, tp_degree=4), 1, 0)
    config = case.config(
        case.plan(),
        mode="pipelined",
        pat={"tp_degrees": [8]},
        drafting={"enabled": True},
    )
    everything = (DRAFTS, RESHAPE, HISTOPIPE, SPECACTOR)
    assert switched_on(config) == everything
    assert only(config, ALL) == config
    assert switched_on(only(config, NOTHING)) == ()
    for name in everything:
        assert switched_on(only(config, name)) == (name,)


def test_a_scene_places_prompts_as_a_run_does():
    """If engines race, they are to end together. HistoPipe alone places prompts by rank."""
    (setting,) = SETTINGS["specactor"]
    small = {"num_prompts": 32, "prompts_per_step": 16, "group_size": 4, "num_steps": 4}
    spec = setting.spec.model_copy(update=small)
    scene = specactor_scene(spec, ClusterLayout(num_engines=5, tp_degree=4), 4, 0)
    assert scene.techniques == (RESHAPE, SPECACTOR, HISTOPIPE)
    (evenly,) = {len(own) for own in prompts_by_engine(replace(scene, placement=even)).values()}
    ranked = prompts_by_engine(replace(scene, config=only(scene.config, HISTOPIPE)))
    ending = prompts_by_engine(scene)
    assert sum(map(len, ranked.values())) == sum(map(len, ending.values())) == 16
    most = max(scene.lengths, key=lambda key: scene.lengths[key].median_tokens)
    (beside,) = (own for own in ending.values() if most in own)
    assert len(beside) < evenly, "the longest prompt has too many prompts on its engine"
    assert ranked != ending


def prompts_by_engine(scene):
    found = {}
    for engine, request in scene.placed():
        found.setdefault(engine, set()).add(request.id.prompt_key)
    return found


def test_prompts_of_a_scene_may_be_placed_by_their_lengths():
    (setting,) = SETTINGS["specactor"]
    small = {"num_prompts": 32, "prompts_per_step": 16, "group_size": 4, "num_steps": 4}
    spec = setting.spec.model_copy(update=small)
    speculation = Speculation((spec,), 4, joint=True)
    layout = ClusterLayout(num_engines=5, tp_degree=4)
    scenes = _scenes(replace(setting, layout=layout, speculation=speculation), 0)
    (_, (evenly,), _), (name, (ranked,), _) = scenes
    assert name.endswith("ranked")
    evenly = replace(evenly, placement=even)

    def longest(scene):
        """Return the expected tokens of the fullest engine."""
        tokens = Counter()
        for engine, request in scene.placed():
            tokens[engine] += scene.lengths[request.id.prompt_key].median_tokens
        return max(tokens.values())

    assert {engine for engine, _ in ranked.placed()} == {engine for engine, _ in evenly.placed()}
    assert longest(ranked) < longest(evenly)
    assert {r.id for _, r in ranked.placed()} == {r.id for _, r in evenly.placed()}


def test_rows_report_the_speedup():
    nothing, one, other, joint = rows_of("s", {NOTHING: 10.0, "a": 5.0, "b": 8.0, ALL: 4.0})
    assert (nothing.speedup, one.speedup, joint.speedup) == (1.0, 2.0, 2.5)
    assert (other.over_best_single, joint.over_best_single) == (None, 1.25)
    slow = rows_of("slow", {NOTHING: 10.0, "a": 5.0, ALL: 5.05})
    slower = rows_of("slower", {NOTHING: 10.0, "a": 5.0, ALL: 6.0})
    first, second = shortfalls([joint, *slow, *slower])
    assert "tolerance" not in first
    assert "beyond the tolerance" in second
    figures = joint_figures([joint, *slow])
    assert figures["joint_over_best_single"] == 1.25
    assert figures["joint_least_over_best_single"] == pytest.approx(5.0 / 5.05)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_rows(runs):
    once, again = (weigh("s", [pat_scene(BEST, STEP, 0)], lambda _: None) for _ in range(2))
    assert once == again
    seconds = {row.technique: row.seconds for row in once}
    for name, run in runs.items():
        # Each step begins in the layout in which the step before ended.
        if run.scene.config.pat.tp_degrees:
            settled = replace(run.scene, missed_savings=MissedSavings()).settled()
            run = run_scene(settled, settled.policies())
        assert seconds[name] == pytest.approx(run.step_s, rel=0.01)


def test_another_tp_degree_shares_what_can_be_shared():
    printed, shape = replace(SPECACTOR_32B_TP4, verifies=True), SHAPES["Qwen2.5-32B"]
    double = reshard(printed, shape, 4, 8)
    weights_s = shape.weight_bytes / (4 * 3.35e12)
    assert double.step_s == pytest.approx(printed.step_s - weights_s / 2 + 64 * 16 * 0.7e-6)
    assert double.token_s == printed.token_s / 2
    both = ShardedLatency({4: printed, 8: double}, {"lookup": 1e-6})
    assert both.decode_s(8, 2, 100.0) == double.decode_s(8, 2, 100.0)
    assert both.verify_s(4, 2, 100.0, 3) == printed.verify_s(4, 2, 100.0, 3)
    assert both.draft_s("lookup", 5, 4) == pytest.approx(20e-6)


def test_overlapping_steps_go_on_with_pools():
    """A small part of RhymeRL's setting. The simulation asserts that all samples are there."""
    (setting,) = SETTINGS["rhymerl"]
    changes = {"prompts_per_step": 64, "num_prompts": 512, "group_size": 8}
    small = replace(
        setting,
        spec=setting.spec.model_copy(update=changes),
        layout=setting.layout.model_copy(update={"num_engines": 32, "num_gpus": 64}),
    )
    overlap = replace(setting.overlap, joint_steps=tuple(range(41, 47)))
    scene = pipeline_scene(small, overlap, 0)
    assert scene.layout.num_engines == 8
    assert switched_on(scene.config) == (DRAFTS, RESHAPE, HISTOPIPE)
    seconds = {name: scene.seconds(name) for name in (HISTOPIPE, RESHAPE, ALL)}
    assert seconds[ALL] < seconds[HISTOPIPE]
    assert seconds[ALL] < seconds[RESHAPE]
