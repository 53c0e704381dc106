"""Divisions of GPUs between engines and trainer: times computed by hand, comparisons between
divisions, and the choice of the fastest."""

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.latency.hardware import H100
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.reports.divisions import recommend
from refrain.engines.simulate import placements
from refrain.engines.simulate.cluster import PLACEMENTS, PolicySet
from refrain.engines.simulate.handover import (
    MFU,
    SLEEP_S,
    WAKE_S,
    Handover,
    estimate_handover,
    gpu_seconds_of_token,
)
from refrain.engines.simulate.placements import (
    DividedScene,
    divisions,
    fastest,
    simulate_division,
    simulate_divisions,
)
from refrain.engines.simulate.trace import Trace
from refrain.schemas.simulate import ClusterLayout, DividedRun, Division
from tests.simulate.latencies import LinearLatency
from tests.simulate.test_trace import changed

QWEN = SHAPES["Qwen3-8B"]
EVEN, RANKED = PolicySet("even"), PolicySet("ranked", PLACEMENTS["ranked"])
NO_COST = Handover()
COSTS = Handover(
    weights_out_s=0.25, weights_in_s=0.5, sleep_s=1.0, wake_s=2.0, leave_s=4.0, enter_s=8.0
)
SHARED, SPLIT, PIPELINED = divisions(2, 1)


def scene(trace: Trace | None = None, **changes: Any) -> DividedScene:
    """Return a scene with one-second steps of any size, and two rollouts in each trace step."""
    given: dict[str, Any] = {
        "trace": trace or Trace(changed(), "t"),
        "steps": (2,),
        "num_gpus": 2,
        "layout": ClusterLayout(num_engines=1, max_context_tokens=10_000),
        "latency": LinearLatency(1.0, prefill_step_s=1.0),
        "hardware": H100,
        "shape": QWEN,
        "gpu_s_per_token": 0.5,
        "handover": COSTS,
    }
    return DividedScene(**given | changes)


def equal_rollouts(num: int) -> Trace:
    """Return a trace in which each prompt has one token and its response three."""
    columns = {"prompt_tokens": [1] * num, "response_tokens": [3] * num}
    names = {"prompt_key": [f"p{i}" for i in range(num)], "sample_index": [0] * num}
    return Trace(pa.table({"step": [1] * num, "epoch": [0] * num, **names, **columns}), "equal")


def scaling(num_gpus: int, **changes: Any) -> DividedScene:
    """Return a scene whose step times are proportional to its sequences. Up to six engines get
    equal shares of the 60."""
    latency = LinearLatency(0.0, sequence_s=0.01, prefill_step_s=0.0, prefill_token_s=0.01)
    given = {"handover": NO_COST, "gpu_s_per_token": 0.004, "shape": SHAPES["Qwen3-0.6B"]}
    return scene(
        equal_rollouts(60), steps=(1,), num_gpus=num_gpus, latency=latency, **given | changes
    )


def test_shared_by_hand() -> None:
    """One of two engines generates for 9 s. Two GPUs train on 13 tokens of half a second each."""
    run = simulate_division(scene(), EVEN, SHARED)
    assert run.rollout_s == 9.0
    assert run.train_s == 13 * 0.5 / 2 + 0.25
    assert run.between_s == pytest.approx(1.0 + 8.0 + 4.0 + 2.0 + 0.5)
    assert run.step_s == pytest.approx(9.0 + 3.5 + 15.5)
    assert run.idle_share == pytest.approx(1 - (9.0 + 2 * 3.5) / (2 * 28.0))


def test_split_by_hand() -> None:
    """Here the handover only moves weights, out of the trainer and into the engines."""
    run = simulate_division(scene(), EVEN, SPLIT)
    assert (run.rollout_s, run.train_s) == (9.0, 6.75)
    assert run.between_s == pytest.approx(0.5)
    assert run.step_s == pytest.approx(16.25)
    assert run.idle_share == pytest.approx(1 - (9.0 + 6.75) / (2 * 16.25))


def test_pipelined_by_hand() -> None:
    """The slower of generation and training sets the step time."""
    generating = simulate_division(scene(), EVEN, PIPELINED)
    assert generating.step_s == pytest.approx(9.5)
    training = simulate_division(scene(gpu_s_per_token=2.0), EVEN, PIPELINED)
    assert training.step_s == pytest.approx(26.25)


def test_steps_are_added_up() -> None:
    """The steps generate for 7 and 9 seconds and train on 16 and 13 tokens."""
    run = simulate_division(scene(steps=(1, 2), handover=NO_COST), EVEN, SPLIT)
    assert run.seconds == pytest.approx(7 + 9 + (16 + 13) * 0.5)
    assert (run.num_steps, run.num_rollouts) == (2, 4)


def test_all_divisions_are_tried() -> None:
    ways = divisions(8, 2)
    assert ways[0] == Division(mode="sync", placement="shared", engine_gpus=8, trainer_gpus=8)
    for mode in ("sync", "pipelined"):
        split = [w for w in ways if (w.mode, w.placement) == (mode, "split")]
        assert [(w.engine_gpus, w.trainer_gpus) for w in split] == [(2, 6), (4, 4), (6, 2)]
    assert divisions(7, 2)[0].trainer_gpus == 6
    (alone,) = divisions(1, 1)
    assert alone.placement == "shared"
    with pytest.raises(ValueError, match="2 GPUs are too few for an engine of TP 4"):
        divisions(2, 4)


@settings(max_examples=12, deadline=None)
@given(num_gpus=st.integers(2, 6), token_s=st.floats(1e-4, 1.0))
def test_perfect_scaling_is_fastest_in_turns(num_gpus: int, token_s: float) -> None:
    """(G + T) / N is less than G / e + T / (N - e) for every e: generation takes G GPU seconds,
    training takes T, and e of N GPUs run engines."""
    of = scaling(num_gpus, gpu_s_per_token=token_s)
    shared, *others = simulate_divisions(of, RANKED)
    assert shared.step_s == pytest.approx((60 * 0.03 + 240 * token_s) / num_gpus)
    for run in others:
        if run.division.mode == "sync":
            assert run.step_s > shared.step_s


def test_no_part_of_a_hand_over_makes_it_faster() -> None:
    """Each part adds its own seconds. When they add up to enough, a split placement is faster."""
    for part in fields(Handover):
        costs = [replace(NO_COST, **{part.name: seconds}) for seconds in (0.0, 0.01, 1.0, 100.0)]
        steps = [simulate_division(scaling(2, handover=c), EVEN, SHARED).step_s for c in costs]
        assert [b - a for a, b in pairwise(steps)] == pytest.approx([0.01, 0.99, 99.0])
    for seconds, placement in ((0.0, "shared"), (100.0, "split")):
        costly = scaling(2, handover=replace(NO_COST, leave_s=seconds))
        best = fastest(simulate_divisions(costly, EVEN), "sync")
        assert best is not None
        assert best.division.placement == placement


@settings(max_examples=10, deadline=None)
@given(token_s=st.floats(1e-4, 1.0), factor=st.floats(1.0, 50.0))
def test_slower_training_makes_nothing_faster(token_s: float, factor: float) -> None:
    runs, slower = (
        list(simulate_divisions(scaling(3, gpu_s_per_token=s), RANKED))
        for s in (token_s, token_s * factor)
    )
    for before, after in zip(runs, slower, strict=True):
        assert after.step_s >= before.step_s * (1 - 1e-9)


def test_engines_idle_while_the_trainer_has_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where they share GPUs: a pipelined run generates and trains at once."""
    seen: list[tuple[Any, Any]] = []
    run_course = placements.run_course

    def noted(steps: Any, engines: Any, *args: Any, **named: Any) -> Any:
        times = run_course(steps, engines, *args, **named)
        seen.append((engines, times))
        return times

    monkeypatch.setattr(placements, "run_course", noted)
    for division in (SHARED, PIPELINED):
        simulate_division(scene(steps=(1, 2)), EVEN, division)
    at_once = [
        sum(
            max(0.0, min(interval.end_s, end_s) - max(interval.start_s, start_s))
            for engine in engines
            for interval in engine.intervals
            for start_s, end_s in times.training_s
        )
        for engines, times in seen
    ]
    assert at_once[0] == 0.0
    assert at_once[1] > 5.0


@st.composite
def some_runs(draw: st.DrawFn) -> list[DividedRun]:
    return [
        DividedRun(
            policy_set="even",
            division=division,
            num_gpus=4,
            num_steps=2,
            num_rollouts=8,
            seconds=draw(st.floats(0.1, 1e4)),
            rollout_s=draw(st.floats(0.0, 10.0)),
            train_s=draw(st.floats(0.0, 10.0)),
            idle_share=draw(st.floats(0.0, 1.0)),
            lacks=draw(st.sampled_from(("", "", "too small"))),
        )
        for division in divisions(4, 1)
    ]


@given(some_runs())
def test_recommendation_is_the_fastest_that_fits(runs: list[DividedRun]) -> None:
    for mode in (None, "sync", "pipelined"):
        rows = [r for r in runs if not r.lacks and (mode is None or r.division.mode == mode)]
        best = fastest(runs, mode)
        assert (best is None) == (not rows)
        if best:
            assert best in rows
            assert best.seconds == min(row.seconds for row in rows)
    said = recommend(runs, 1)
    if best := fastest(runs):
        division = best.division
        assert (
            f"staleness={int(division.mode == 'pipelined')} placement={division.placement} "
            in said[0]
        )
        assert f"num_engines={division.engine_gpus} " in said[0]
        assert said[0].endswith(f"num_processes={division.trainer_gpus}")
    else:
        assert said == ["no division fits: use more GPUs, or larger ones"]


def test_costs_by_hand() -> None:
    gpu = H100.model_copy(
        update={"host_bytes_per_s": 10e9, "link_bytes_per_s": 100e9, "link_share": 0.5}
    )
    weights, params = QWEN.weight_bytes, QWEN.num_params
    training = placements._training(scene(), SHARED)
    shared = estimate_handover(QWEN, gpu, training, 2, shared=True, state_leaves=True)
    assert shared == Handover(
        weights_out_s=pytest.approx(weights / 50e9 + weights / 10e9),
        weights_in_s=pytest.approx(weights / 2 / 10e9),
        sleep_s=SLEEP_S,
        wake_s=WAKE_S,
        leave_s=pytest.approx(12 * params / 2 / 10e9),
        enter_s=pytest.approx(12 * params / 2 / 10e9),
    )
    split = estimate_handover(QWEN, gpu, training, 2, shared=False, state_leaves=True)
    assert (split.sleep_s, split.wake_s, split.leave_s, split.enter_s) == (0.0,) * 4
    alone = estimate_handover(
        QWEN, gpu, replace(training, num_ranks=1), 2, shared=False, state_leaves=False
    )
    assert alone.weights_out_s == pytest.approx(weights / 10e9)
    multiplied = params - QWEN.head_params
    assert gpu_seconds_of_token(QWEN, H100) == pytest.approx(6 * multiplied / (989e12 * MFU))


def test_the_trainers_state_leaves_where_both_do_not_fit() -> None:
    """The trainer's state stays on the GPU if the KV cache is small enough."""
    eight = Division(mode="sync", placement="shared", engine_gpus=8, trainer_gpus=8)
    small, large = (
        scene(layout=ClusterLayout(num_engines=1, max_context_tokens=tokens), num_gpus=8)
        for tokens in (10_000, 350_000)
    )
    assert not placements._shared_gpu(small, eight).state_leaves
    assert placements._shared_gpu(large, eight).state_leaves
    here, away = (
        simulate_division(replace(s, handover=None), EVEN, eight).between_s for s in (small, large)
    )
    copied_s = 12 * QWEN.num_params / 8 / H100.host_bytes_per_s
    assert away - here == pytest.approx(2 * copied_s)


def test_divisions_too_large_for_gpus_are_not_recommended() -> None:
    runs = list(simulate_divisions(scene(num_gpus=4), EVEN))
    for run in runs:
        assert bool(run.lacks) == (run.division.trainer_gpus < 3), run
    assert runs[1].division.trainer_gpus == 3
    best = fastest(runs)
    assert best is not None
    assert best.division.trainer_gpus >= 3
