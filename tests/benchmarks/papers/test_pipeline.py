"""Steps that overlap: when each begins and ends, and which samples count."""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from refrain.benchmarks.papers import pipeline
from refrain.benchmarks.papers.generate import generate, rhymerl
from refrain.benchmarks.papers.pipeline import Configuration, simulate_pipeline
from refrain.benchmarks.papers.rhymerl import (
    REPORT_S,
    dealt,
    in_turn,
    migrating,
    on_policy,
    variants,
)
from refrain.benchmarks.papers.script import read_script
from refrain.benchmarks.papers.windows import GatedHistory
from refrain.engines.rollout.moves import Defer, Migrate
from refrain.engines.simulate.run_config import run_config
from refrain.engines.simulate.trace import Trace
from refrain.schemas.rollout import LengthHistory, Split
from refrain.schemas.scheduling import HistoPipeConfig
from refrain.schemas.simulate import ClusterLayout
from refrain.schemas.step import PromptGroup, StepPlan
from tests.simulate.latencies import LinearLatency

STEPWISE = LinearLatency(1.0, prefill_step_s=1.0)
"""Every token takes a second."""
LATENCY = LinearLatency(0.01, 1e-4, 1e-7)
SMALL = rhymerl().model_copy(update={"num_prompts": 64, "prompts_per_step": 16, "group_size": 4})
CONFIG = HistoPipeConfig()
NUM_GROUPS = 4
EIGHT = ClusterLayout(num_engines=8)
TWO = ClusterLayout(num_engines=2)


def trace_of(lengths):
    """[{prompt: response tokens of its only sample}] of the steps from 1."""
    rows = [(s, key, n) for s, step in enumerate(lengths, 1) for key, n in step.items()]
    steps, keys, tokens = (list(column) for column in zip(*rows, strict=True))
    columns = {"step": steps, "epoch": [0] * len(rows), "prompt_key": keys}
    columns |= {"sample_index": [0] * len(rows), "prompt_tokens": [1] * len(rows)}
    return Trace(pa.table({**columns, "response_tokens": tokens}), "t")


def script_of(lengths):
    return read_script(trace_of(lengths), range(1, len(lengths) + 1))


def small_script(seed, num_steps=7):
    """Read a script that begins with the third epoch."""
    steps = range(9, 9 + num_steps)
    return read_script(generate(SMALL, seed, range(1, steps[-1] + 1)), steps)


def by_name(step, num_engines):
    """Plan prompt "a" on engine 0 and prompt "b" on engine 1."""
    del num_engines
    groups = tuple(
        PromptGroup(prompt_key=key, engine="ab".index(key), expected_tokens=None)
        for key in step.requests
    )
    return StepPlan(
        split=Split.TRAIN,
        step=step.step,
        epoch=step.epoch,
        policy_version=0,
        created_s=0.0,
        group_size=1,
        groups=groups,
    )


IN_TURN = [{"a": 9, "b": 1}, {"a": 1, "b": 9}] * 4


@pytest.mark.parametrize(("barrier", "seconds"), [(True, 4 * 9.0), (False, 2 * 10.0)])
def test_long_and_short_in_turn_fill_the_engines(barrier, seconds):
    """With a barrier every step takes 9 s. Without it two steps take 10 s and no engine idles."""
    found = simulate_pipeline(
        script_of(IN_TURN), TWO, STEPWISE, Configuration(name="x", plan=by_name, barrier=barrier)
    )
    assert found.measured == (3, 4, 5, 6)
    assert found.seconds == pytest.approx(seconds)
    assert found.samples_per_s == pytest.approx(8 / seconds)
    assert found.idle_share == pytest.approx(1 - 20 / seconds)


def test_a_step_waits_for_the_version_of_the_step_before_the_last():
    """Training takes 3 s, so version 1 exists at 9 + 3 s and version 2 at 15 s."""
    found = simulate_pipeline(
        script_of(IN_TURN), TWO, STEPWISE, Configuration(name="x", plan=by_name), train_s=3.0
    )
    assert [step.called_s for step in found.steps[:4]] == pytest.approx([0.0, 0.0, 12.0, 15.0])
    assert [step.finished_s for step in found.steps[:4]] == pytest.approx([9.0, 10.0, 21.0, 24.0])


def test_weights_take_their_time_on_every_engine():
    found = simulate_pipeline(
        script_of(IN_TURN), TWO, STEPWISE, Configuration(name="x", plan=by_name), sync_s=0.5
    )
    # Steps 1 and 2 use the same version. Steps 3 and 4 need a weight sync each.
    assert [step.finished_s for step in found.steps[:4]] == pytest.approx([9.5, 10.5, 20.0, 21.5])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plan", [dealt, in_turn(CONFIG)])
@pytest.mark.parametrize("train_s", [0.0, 20.0])
def test_overlapping_is_never_slower_than_a_barrier(seed, plan, train_s):
    script, ends = small_script(seed), []
    for barrier in (True, False):
        configuration = Configuration(name="x", plan=plan, barrier=barrier)
        found = simulate_pipeline(script, EIGHT, LATENCY, configuration, train_s=train_s)
        ends.append([step.finished_s for step in found.steps])
    waiting, overlapping = np.array(ends)
    assert (overlapping <= waiting + 1e-6).all()
    assert overlapping[-1] < waiting[-1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("apart", [False, True])
def test_one_step_off_hides_training_and_no_more(seed, apart):
    """Both have the same rollouts. One step off is never later than on-policy. It is never earlier
    by more than the training that it overlaps."""
    script, train_s = small_script(seed), 5.0
    off = Configuration(name="x", plan=dealt, barrier=True, apart=apart)
    ends = [
        [s.finished_s for s in simulate_pipeline(script, EIGHT, LATENCY, x, train_s=train_s).steps]
        for x in (on_policy(apart=apart), off)
    ]
    waited = np.subtract(*ends)
    assert (waited >= -1e-6).all()
    assert (waited <= train_s * np.arange(len(waited)) + 1e-6).all()
    assert waited[-1] > 0.0


def test_on_policy_nothing_is_old():
    found = simulate_pipeline(small_script(0), EIGHT, LATENCY, on_policy(), train_s=5.0)
    assert (found.largest_staleness, found.mean_staleness) == (0, 0.0)


def test_samples_apart_fill_the_engines():
    """Each prompt's samples are spread evenly: engines differ by at most one of them."""
    together, apart = (
        simulate_pipeline(
            small_script(0),
            EIGHT,
            LATENCY,
            Configuration(name="x", plan=dealt, barrier=True, apart=apart),
        )
        for apart in (False, True)
    )
    assert apart.idle_share < together.idle_share
    assert apart.samples_per_s > together.samples_per_s


def histopipe(config=CONFIG, oversample=0.05):
    run = run_config(8192, staleness=1, histopipe=config, rollout={"placement": "histopipe"})
    return Configuration(
        name="histopipe",
        plan=in_turn(config, num_groups=NUM_GROUPS),
        policies=partial(migrating, run),
        report_s=REPORT_S,
        oversample=oversample,
    )


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_older_than_one_step_but_what_was_deferred(seed):
    found = simulate_pipeline(small_script(seed), EIGHT, LATENCY, histopipe())
    assert [step.staleness for step in found.steps] == [0, 1, 1, 1, 1, 1, 1]
    assert all(step.deferred_staleness <= 2 for step in found.steps)


def test_staleness_above_the_bound_is_detected(monkeypatch):
    monkeypatch.setattr(pipeline, "version_of", lambda place, lag: max(0, place - lag - 1))
    with pytest.raises(AssertionError, match="place 3 trains on what is 2 old"):
        simulate_pipeline(small_script(0), EIGHT, LATENCY, histopipe())


def test_same_seed_same_result():
    once, again = (
        simulate_pipeline(small_script(1), EIGHT, LATENCY, histopipe()).model_dump_json()
        for _ in range(2)
    )
    assert once == again
    other = simulate_pipeline(small_script(2), EIGHT, LATENCY, histopipe()).model_dump_json()
    assert other != once


class Once:
    """Makes one move in one step, once its "a" has 5 tokens."""

    def __init__(self, kind, step=1):
        self.kind, self.step, self.made = kind, step, False

    def decide(self, view):
        for engine in view.engines:
            for id, tokens in engine.progress.items():
                if id.step == self.step and id.prompt_key == "a" and tokens >= 5 and not self.made:
                    self.made = True
                    return [self.kind(id, 1)]
        return []


TOGETHER = [{"a": 50, "b": 60}, {"a": 3, "b": 40}, *[{"a": 3, "b": 4}] * 5]


def moved_once(kind, step=1, lengths=TOGETHER, **options):
    once = [Once(kind, step)]
    configuration = Configuration(
        name="x",
        plan=by_name,
        policies=lambda plan: once if plan.step == step else [],
        report_s=1.0,
        **options,
    )
    return simulate_pipeline(script_of(lengths), TWO, STEPWISE, configuration)


def test_a_deferred_sample_finishes_once_with_its_length():
    """The sample goes to engine 1 with 5 or 6 of its 50 tokens. That engine runs "b" of the first
    step until then. Every run checks that all samples have the lengths of the trace."""
    found = moved_once(Defer, oversample=1.0)
    first, second, *others = found.steps
    assert (first.num_rollouts, first.num_deferred, second.num_rollouts) == (1, 1, 3)
    assert second.num_tokens == 50 + 3 + 40
    assert second.deferred_staleness == 1
    assert second.num_migrated == first.num_migrated == 0
    assert sum(step.num_rollouts for step in found.steps) == 2 * len(TOGETHER)
    assert all(step.num_rollouts == 2 for step in others)


def test_staleness_is_of_every_sample():
    """Step 2 defers a sample that began with version 0. It is one of step 3's three, and 2 old."""
    lengths = [{"a": 3, "b": 4}, *TOGETHER]
    _, second, third, *_ = moved_once(Defer, step=2, lengths=lengths, oversample=1.0).steps
    assert (second.num_deferred, second.mean_staleness) == (1, 1.0)
    assert (third.staleness, third.deferred_staleness) == (1, 2)
    assert third.mean_staleness == pytest.approx(4 / 3)


def test_nothing_is_deferred_without_oversampling():
    for oversample in (None, 0.0):
        found = moved_once(Defer, oversample=oversample)
        assert [step.num_deferred for step in found.steps] == [0] * 7


def test_a_migrated_sample_stays_in_its_step():
    first, *others = moved_once(Migrate).steps
    assert (first.num_rollouts, first.num_migrated, first.num_deferred) == (2, 1, 0)
    assert [step.num_migrated for step in others] == [0] * 6


def test_a_plan_knows_nothing_of_the_step_under_way():
    """Step 3 is planned before step 2 has finished."""
    script = script_of([{"a": 10}, {"a": 20}, {"a": 40}, {"a": 80}, {"b": 1}])
    histories = [step.history for step in script.steps]
    assert histories[0] == histories[1] == histories[4] == {}
    assert histories[2] == {"a": LengthHistory(10.0, 10, None)}
    assert histories[3] == {"a": LengthHistory(20.0, 20, 10.0)}


def test_few_steps_and_gaps_are_refused():
    with pytest.raises(ValueError, match="4 steps are too few"):
        simulate_pipeline(
            script_of(IN_TURN[:4]), TWO, STEPWISE, Configuration(name="x", plan=by_name)
        )
    with pytest.raises(ValueError, match="do not follow each other"):
        read_script(trace_of(IN_TURN), [1, 3])


def test_ranking_groups_alternate():
    """The engines with the longest group in an odd step have the shortest in an even step."""
    plans = [in_turn(CONFIG, num_groups=NUM_GROUPS)(step, 8) for step in small_script(0).steps[:2]]
    shortest, longest = ([plan.ranking_groups[at].engines for plan in plans] for at in (0, -1))
    assert shortest == longest[::-1]
    assert shortest[0] != shortest[1]


def test_every_variant_is_compared_with_one_before_it():
    rows = variants(EIGHT, LATENCY, 4, GatedHistory(LATENCY, 1, ()))
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for at, row in enumerate(rows):
        assert (row.over is None) == (at == 0)
        assert row.over is None or row.over in names[:at]
