"""Seconds saved, checked by hand on rollouts in which a decoding step takes a second."""

from dataclasses import dataclass, replace

import pytest

from refrain.engines.accounting.rollout_replay import EngineCosts
from refrain.engines.accounting.savings import (
    engine_costs,
    measured_s,
    saving_metrics,
    saving_words,
    step_savings,
)
from refrain.engines.accounting.step_requests import DEFERRED, Stay, StepRequest
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.step import EngineShare
from refrain.schemas.timeline import MoveKind, MoveRecord, Saving, Savings, Technique


@dataclass(frozen=True)
class Constant:
    """A decoding step takes a second for any batch, and half of it on two GPUs."""

    prefills_s: float = 0.0

    def decode_s(self, tp_degree, batch, context_tokens):
        del batch, context_tokens
        return 1.0 / tp_degree

    def verify_s(self, tp_degree, batch, context_tokens, window):
        return self.decode_s(tp_degree, batch, context_tokens) * (1.0 + window / 10)

    def prefill_s(self, tp_degree, batch, rms_tokens):
        del tp_degree, batch, rms_tokens
        return self.prefills_s

    def draft_s(self, drafter, batch, window):
        del drafter, batch, window
        raise AssertionError("it is measured")


class ByBatch(Constant):
    """A decoding step takes a second for each request of the batch."""

    def decode_s(self, tp_degree, batch, context_tokens):
        del tp_degree, context_tokens
        return float(batch)


ALIKE = {engine: EngineCosts(Constant()) for engine in range(3)}


def named(name: str) -> RequestId:
    return RequestId(Split.TRAIN, 1, name, 0)


def request(name: str, tokens: int, *stays: Stay, drafted: int = 0, accepted: int = 0):
    return StepRequest(named(name), stays, "stop", tokens, tokens, 5, drafted, accepted)


def move(name: str, kind: MoveKind, at_s: float, origin: int = 0, target: int = 1) -> MoveRecord:
    return MoveRecord(named(name), origin, target, kind, at_s, 1)


def saved(requests, moves=(), costs=ALIKE) -> dict[Technique, Saving]:
    found = step_savings(requests, moves, costs, "by hand")
    return {saving.technique: saving for saving in found.each} if found else {}


def about(saving: Saving) -> tuple:
    return pytest.approx((saving.saved_s, saving.uncertainty_s), abs=1e-6)


def test_unused_techniques_have_no_saving():
    assert step_savings([request("a", 10, Stay(0, 0.0, 10.0))], (), ALIKE, "") is None
    drafted = request("a", 10, Stay(0, 0.0, 10.0), drafted=4)
    assert set(saved([drafted])) == {Technique.DRAFTING}


def test_drafting_saves_the_passes_that_it_saved():
    """20 tokens took 10 passes of 1.1 s with a draft token each: 11 s. Without drafts: 20 s."""
    drafted = request("a", 20, Stay(0, 3.0, 14.0), drafted=10, accepted=10)
    assert about(saved([drafted])[Technique.DRAFTING]) == (9.0, 0.0)


def test_the_models_own_error_is_the_uncertainty():
    """The model predicts 11 s, but the rollout took 13 s. Without drafts it is scaled up alike."""
    drafted = request("a", 20, Stay(0, 0.0, 13.0), drafted=10, accepted=10)
    assert about(saved([drafted])[Technique.DRAFTING]) == (13 * (20 / 11 - 1), 2.0)


def test_drafting_takes_time_too():
    costs = {0: EngineCosts(Constant(), draft_s=0.4, rest_s=2.0)}
    drafted = request("a", 20, Stay(0, 0.0, 17.0), drafted=10, accepted=10)
    assert about(saved([drafted], costs=costs)[Technique.DRAFTING]) == (5.0, 0.0)


def test_migration_saves_what_a_crowded_engine_would_have_taken_longer():
    """A step takes one second for each request. Two requests of 10 tokens take 20 s on one engine.
    After 4 s each has 2 tokens. Then `b` moves, and both finish alone in 8 s."""
    costs = {engine: EngineCosts(ByBatch()) for engine in range(2)}
    both = [
        request("a", 10, Stay(0, 0.0, 12.0)),
        request("b", 10, Stay(0, 0.0, 4.0), Stay(1, 4.0, 12.0)),
    ]
    found = saved(both, [move("b", MoveKind.MIGRATED, 4.0)], costs)
    assert list(found) == [Technique.MIGRATION]
    assert about(found[Technique.MIGRATION]) == (8.0, 0.0)


def test_a_race_saves_what_the_overtaken_copy_had_left():
    """On engine 0, `b` gained 1 token a pass, as `a` did. From 10 s on, a copy gained 30 / 8 a pass
    with free drafts and overtook it. Without the race, `b` takes 30 s."""
    both = [
        request("a", 12, Stay(0, 0.0, 12.0)),
        request("b", 30, Stay(0, 0.0, 15.0, lost=True), Stay(1, 10.0, 15.0), accepted=22),
    ]
    found = saved(both, [move("b", MoveKind.RACED, 10.0)])
    predicted_s = 10 + 20 / 3.75
    assert (15 * (30 / predicted_s - 1), predicted_s - 15) == about(found[Technique.RACING])


def test_a_copy_that_came_second_is_not_waited_for():
    """The model predicts that `b` ends after 10 + 20 / 3.75 s. Its slow copy would end after 30
    s."""
    both = [
        request("a", 12, Stay(0, 0.0, 12.0)),
        request("b", 30, Stay(0, 0.0, 40.0, lost=True), Stay(1, 10.0, 40.0), accepted=22),
    ]
    found = step_savings(both, [move("b", MoveKind.RACED, 10.0)], ALIKE, "")
    assert found is not None
    assert found.predicted_s == pytest.approx(10 + 20 / 3.75)


def test_a_race_that_the_origin_won_saved_nothing():
    both = [
        request("a", 12, Stay(0, 0.0, 12.0)),
        request("b", 30, Stay(1, 10.0, 30.0, lost=True), Stay(0, 0.0, 30.0)),
    ]
    found = saved(both, [move("b", MoveKind.RACED, 10.0)])
    assert about(found[Technique.RACING]) == (0.0, 0.0)


def test_a_switch_saves_what_one_gpu_would_have_taken_longer():
    """After 4 of 10 s, two GPUs finish the rest in 3 s."""
    costs = {0: EngineCosts(Constant()), 1: EngineCosts(Constant(), tp_degree=2)}
    switched = request("a", 10, Stay(0, 0.0, 4.0), Stay(1, 4.0, 7.0))
    found = saved([switched], [move("a", MoveKind.RESHAPED, 4.0)], costs)
    assert about(found[Technique.SWITCHING]) == (3.0, 0.0)


def test_deferred_request_occupies_its_engine_until_it_leaves():
    costs = {0: EngineCosts(ByBatch())}
    both = [
        request("a", 10, Stay(0, 0.0, 14.0), drafted=1),
        replace(request("b", 4, Stay(0, 0.0, 8.0)), finish_reason=DEFERRED, prompt_tokens=None),
    ]
    deferred = [move("b", MoveKind.DEFERRED, 8.0)]
    found = step_savings(both, deferred, costs, "")
    assert found is not None
    assert found.predicted_s == pytest.approx(14.0, rel=0.02)
    assert [saving.technique for saving in found.each] == [Technique.DRAFTING]


def test_engines_begin_when_they_began():
    both = [
        request("a", 10, Stay(0, 0.0, 10.0), drafted=1),
        request("b", 10, Stay(1, 7.0, 17.0)),
    ]
    assert measured_s(both) == 17.0
    assert saved(both)[Technique.DRAFTING].uncertainty_s == pytest.approx(0.0, abs=0.1)


def test_saving_within_its_error_is_not_clear():
    assert Saving(Technique.DRAFTING, 5.0, 2.0).clear
    assert Saving(Technique.DRAFTING, -5.0, 2.0).clear
    assert not Saving(Technique.DRAFTING, 1.0, 2.0).clear


def test_words_and_metrics():
    each = (
        Saving(Technique.DRAFTING, 5.0, 2.0),
        Saving(Technique.MIGRATION, -0.001, 2.0),
        Saving(Technique.RACING, -5.0, 2.0),
    )
    clear, unclear, cost = saving_words(Savings(10.0, 8.0, "x", each))
    assert "drafting: saved 5.00 ± 2.00 s" in clear
    assert "15.00 s are predicted without" in clear
    assert "migration: not distinguishable from none (+0.00 ± 2.00 s)" in unclear
    assert "racing: cost 5.00 ± 2.00 s" in cost
    assert saving_words(Savings(1.0, unknown="why not")) == ["why not"]
    metrics = saving_metrics(Savings(10.0, 8.0, "x", each[:1]))
    assert metrics == {"saved_s/drafting": 5.0, "saved_s/drafting_uncertainty": 2.0}
    assert saving_metrics(None) == saving_metrics(Savings(1.0, unknown="why not")) == {}


def share(engine: int, **changes) -> EngineShare:
    return EngineShare(engine=engine, num_rollouts=1, num_tokens=1, **{"busy_s": 10.0} | changes)


def test_step_costs_are_those_that_engines_measured():
    shares = [
        share(
            0,
            drafting=DraftingCounts(
                decode_s=3.0,
                verify_s=4.0,
                draft_s=1.0,
                num_steps=10,
                step_costs=(1, 2, 0.5, 3, 4, 5),
            ),
        ),
        share(1),
    ]
    some = [request("a", 10, Stay(0, 0.0, 10.0)), request("b", 10, Stay(1, 0.0, 10.0))]
    costs = engine_costs(some, shares, {}, None)
    assert (costs[0].rest_s, costs[0].draft_s) == (2.0, 0.1)
    assert costs[0].latency.decode_s(1, 10, 100.0) == 1 + 20 + 300
    assert costs[0].latency.decode_s(1, 20, 100.0) == 1 + 32 + 2 + 300
    assert costs[0].latency.verify_s(1, 10, 100.0, 2) == 321 + 10 * (4 + 2 * 5)
    assert costs[1].latency.decode_s(1, 10, 100.0) == 321, "must use an engine of its kind"
    with pytest.raises(ValueError, match="engine 1 has not measured"):
        engine_costs(some, shares, {1: 2}, None)


def test_a_profile_goes_first_and_knows_what_prefill_takes():
    some = [request("a", 10, Stay(0, 0.0, 10.0))]
    profile = Constant(prefills_s=0.5)
    costs = engine_costs(
        some, [share(0, drafting=DraftingCounts(step_costs=(1, 2, 2, 3, 4, 5)))], {0: 2}, profile
    )
    assert costs == {0: EngineCosts(profile, 2, 0.0, 0.5)}
