"""SpecActor's techniques on a small cluster, with the real coordinator and policies."""

from dataclasses import replace

import pytest

from refrain.benchmarks.papers.drafters import DRAFTERS, SMALL
from refrain.benchmarks.papers.settings import SETTINGS
from refrain.benchmarks.papers.specactor import (
    BASELINE,
    COUPLED,
    ENDS,
    FAIR,
    HEADS,
    PARTS,
    WHOLE,
    simulate_speculation,
    variants,
)
from refrain.benchmarks.papers.speculation_case import Assumptions, Case
from refrain.schemas.rollout import DraftSetting
from refrain.schemas.simulate import ClusterLayout

(SETTING,) = SETTINGS["specactor"]
SPEC = SETTING.spec.model_copy(
    update={"num_prompts": 64, "prompts_per_step": 16, "group_size": 10, "num_steps": 8}
)
LAYOUT = ClusterLayout(num_engines=10, tp_degree=4)


@pytest.fixture(scope="module")
def case():
    return Case.draw(SPEC, LAYOUT, 8, 0)


@pytest.fixture(scope="module")
def simulated(case):
    return {variant.name: case.simulate(variant) for variant in variants(case)}


def test_every_variant_generates_the_same_tokens(case, simulated):
    lengths = sorted(case.rows.column("response_tokens").tolist())
    for simulation in simulated.values():
        rollouts = simulation.rollouts
        assert sorted(len(r.generated.token_ids) for r in rollouts) == lengths
        assert len({r.request.id for r in rollouts}) == len(rollouts)


def test_drafter_gpus_come_out_of_the_same(case):
    plan = case.plan()
    assert 4 * plan.num_engines + plan.num_drafters <= 40
    engines = {variant.name: variant.num_engines for variant in variants(case)}
    assert engines[BASELINE] == engines[FAIR] == engines[COUPLED] == 10
    assert {engines[part] for part in PARTS} == {plan.num_engines}
    assert engines[f"{BASELINE}, 2x GPUs"] == 20


def test_samples_dealt_one_by_one_end_sooner(simulated):
    engines = {r.request.id: r.engine for r in simulated[FAIR].rollouts}
    by_prompt: dict[str, set[int]] = {}
    for id, engine in engines.items():
        by_prompt.setdefault(id.prompt_key, set()).add(engine)
    assert {len(own) for own in by_prompt.values()} == {10}
    assert simulated[FAIR].step.step_s < simulated[BASELINE].step.step_s


def test_each_part_is_faster_than_the_one_before(simulated):
    times_s = [simulated[part].step.step_s for part in PARTS]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1]
    assert times_s[-1] < simulated[COUPLED].step.step_s < simulated["n-gram"].step.step_s


def test_only_best_of_n_races_with_another_drafter(simulated):
    raced = {name for name, simulation in simulated.items() if simulation.outcome.moves.num_raced}
    assert raced == {name for name in simulated if "best-of-N" in name}
    outcome = simulated[PARTS[-1]].outcome
    assert 0 < outcome.moves.num_races_won <= outcome.moves.num_raced
    won = [r for r in simulated[PARTS[-1]].rollouts if r.request.drafting]
    drafters = {r.request.drafting.drafter for r in won}
    assert drafters - {SMALL}
    assert drafters <= set(DRAFTERS)


def test_heads_draft_more_the_fewer_requests_run_and_only_where_it_pays(case, simulated):
    choose = case.head_drafting()
    windows = [choose(batch, 2048.0 * batch).window for batch in (256, 64, 16, 1)]
    assert windows == sorted(windows)
    assert windows[0] < windows[-1]
    assert simulated[HEADS].step.step_s < simulated[FAIR].step.step_s
    wrong = Case.draw(SPEC, LAYOUT, 8, 0, Assumptions(head=1e-9))
    assert wrong.head_drafting()(1, 2048.0) is None
    variant = next(v for v in variants(wrong) if v.name == HEADS)
    assert wrong.simulate(variant).step.step_s == simulated[FAIR].step.step_s


@pytest.mark.slow
def test_the_same_seed_gives_the_same_rows():
    setting = replace(SETTING, spec=SPEC, layout=LAYOUT)
    once, again = (simulate_speculation(setting, 8, 1, lambda _: None) for _ in range(2))
    assert [row.step_s for row in once.rows] == [row.step_s for row in again.rows]
    by_name = {row.variant.name: row for row in once.rows}
    assert by_name[BASELINE].speedup == by_name[COUPLED].over_coupled == 1.0
    assert by_name[FAIR].over_fair == 1.0
    whole, fair = by_name[WHOLE], by_name[FAIR]
    assert whole.over_fair == pytest.approx(whole.speedup / fair.speedup)
    product = 1.0
    for part in PARTS:
        product *= by_name[part].gain
    assert by_name[PARTS[-1]].over_coupled == pytest.approx(product)
    assert by_name[COUPLED].variant.drafting == DraftSetting(SMALL, 3)


def test_prompts_that_end_together_are_placed_by_the_epoch_before(case, simulated):
    assert set(case.prompt_keys) <= case.lengths.keys()

    def placed(simulation):
        return {r.request.id.prompt_key: r.engine for r in simulation.rollouts}

    assert placed(simulated[ENDS]) != placed(simulated[WHOLE])
    unknown = replace(case, lengths={})
    variant = next(v for v in variants(unknown) if v.name == ENDS)
    assert placed(unknown.simulate(variant)) != placed(simulated[ENDS])
