"""Simulate rollout stages on virtual clusters with the real coordinator and policies."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from refrain.engines.control.techniques import StepInputs, plan_policies
from refrain.engines.histopipe.passes import fit_passes
from refrain.engines.histopipe.placement import deal_groups, place_prompts, time_rollouts
from refrain.engines.histospec.gate import ProfiledStepTimes
from refrain.engines.latency.interface import Latency
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import Policy
from refrain.engines.rollout.stage import Outcome
from refrain.engines.simulate.batching import ChooseDrafting
from refrain.engines.simulate.clock import run_virtual
from refrain.engines.simulate.engine import VirtualEngine
from refrain.engines.simulate.history import replay_step
from refrain.engines.simulate.lengths import TraceLengths
from refrain.engines.simulate.member import Acceptance, Passes
from refrain.engines.simulate.pace import Interval
from refrain.engines.simulate.run_config import run_config
from refrain.engines.simulate.trace import Trace
from refrain.engines.simulate.turns import recorded_turns
from refrain.schemas.drafting import HISTORY, DraftingConfig
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import (
    DraftSetting,
    LengthHistory,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
)
from refrain.schemas.scheduling import HistoPipeConfig
from refrain.schemas.simulate import ClusterLayout, PolicySetSummary, SimulatedStep
from refrain.schemas.step import PromptGroup, StepPlan
from refrain.schemas.weights import PolicyWeights

Placement = Callable[[Sequence[str], Mapping[str, float], int], Sequence[PromptGroup]]
"""A function (prompt keys, median lengths in the previous epoch, number of engines) -> groups in
submission order."""


def even(
    prompt_keys: Sequence[str], median_lengths: Mapping[str, float], num_engines: int
) -> tuple[PromptGroup, ...]:
    """Place prompts round-robin in the given order, as data-parallel frameworks split a batch."""
    return tuple(
        PromptGroup(prompt_key=key, engine=i % num_engines, expected_tokens=median_lengths.get(key))
        for i, key in enumerate(prompt_keys)
    )


PLACEMENTS: dict[str, Placement] = {"even": even, "ranked": deal_groups}


@dataclass(frozen=True, slots=True)
class PolicySet:
    """A combination of placement, policies and drafting that a comparison simulates."""

    name: str = "baseline"
    placement: Placement = even
    """Assigns prompts to engines; ignored with `histopipe`."""
    policies: tuple[Policy, ...] = ()
    report_s: float | None = None
    """Interval at which policies run between finished rollouts; None: only when one finishes."""
    drafting: DraftSetting | None = None
    """Draft setting of every engine, with an assumed acceptance; None: no such drafting."""
    histospec: DraftingConfig | None = None
    """Settings of drafting from history (`engines.simulate.history`); None: no such drafting."""
    histopipe: HistoPipeConfig | None = None
    """Settings of a pipelined run, whose placement and policies are used; None: no such run."""
    choose_drafting: ChooseDrafting | None = None
    """Chooses the draft setting of an engine by its batch, instead of `drafting`."""
    apart: bool = False
    """Whether samples go to engines round-robin, one by one, and not with their prompt."""

    @property
    def setting(self) -> DraftSetting | None:
        """Draft setting of every engine. With history, the replay decides each request's windows,
        whatever the window here."""
        return DraftSetting(HISTORY, 1) if self.histospec else self.drafting


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step with the busy intervals of each engine."""

    step: SimulatedStep
    timelines: tuple[Sequence[Interval], ...]
    rollouts: tuple[Rollout, ...]
    """Rollouts in the order in which they finished."""
    outcome: Outcome


def simulate_step(
    rows: Trace,
    cluster: ClusterLayout,
    latency: Latency,
    policy_set: PolicySet | None = None,
    history: Mapping[str, float] | None = None,
    acceptance: float | Mapping[RequestId, Acceptance] | None = None,
    replays: Mapping[RequestId, Passes] | None = None,
    known: Mapping[str, LengthHistory] | None = None,
) -> Simulation:
    """Roll out one step of a trace on a virtual cluster, without weight sync, reward or training.

    `history`: median lengths of the previous epoch, for placements that rank prompts. `acceptance`:
    in [0, 1], for rollouts without one in their row (None: 0), or for all rollouts by request; see
    the deviations in `engines.simulate.member`. `replays`: from `replay_step`, for drafting from
    history. `known`: the prompts' length history, for a policy set with `histopipe`.

    The result is deterministic. Raise ValueError when `rows` has several steps, when the latency
    model lacks the TP degree or the drafter, and when a needed acceptance is unknown.
    """
    policy_set = policy_set or PolicySet()
    (step,) = rows.steps if len(rows.steps) == 1 else (None,)
    if step is None:
        raise ValueError(f"{rows.source} has {len(rows.steps)} steps: simulate one at a time")
    assert policy_set.histospec is None or replays is not None, "replay the step first"
    check_latency(latency, cluster.tp_degree, policy_set.setting)
    requests, lengths = step_requests(rows, step)
    acceptances = known_acceptances(rows, lengths, acceptance)
    turns = dict(zip(lengths, recorded_turns(rows.table), strict=True))
    if policy_set.drafting and not acceptances:
        raise ValueError(f"{rows.source} has no acceptance at step {step}: give --acceptance")
    engines = [
        VirtualEngine(
            index,
            cluster.tp_degree,
            latency,
            lengths,
            acceptances=acceptances,
            replays=replays,
            turns=turns,
            max_num_seqs=cluster.max_num_seqs,
            max_context_tokens=cluster.max_context_tokens,
            report_s=policy_set.report_s,
            choose_drafting=policy_set.choose_drafting,
        )
        for index in range(cluster.num_engines)
    ]
    about = (step, requests, history or {}, known or {})
    groups, policy_set = _decide(policy_set, cluster, latency, *about)
    placed = [(g.engine, request) for g in groups for request in requests[g.prompt_key]]
    if policy_set.apart:
        placed = [(i % cluster.num_engines, request) for i, (_, request) in enumerate(placed)]
    rollouts, outcome = run_virtual(roll_out(engines, policy_set, placed))
    ends_s = [rollout.finished_s for rollout in rollouts]
    return Simulation(
        step=_measure(policy_set.name, step, engines, ends_s, sum(lengths.values())),
        timelines=tuple(engine.intervals for engine in engines),
        rollouts=tuple(rollouts),
        outcome=outcome,
    )


def compare_step(
    trace: Trace,
    step: int,
    cluster: ClusterLayout,
    latency: Latency,
    policy_sets: Sequence[PolicySet],
    acceptance: float | None = None,
) -> list[Simulation]:
    """Simulate every policy set on one step of a trace, with the trace's earlier steps as history.

    Raise ValueError as `simulate_step` does, and when the trace lacks token ids for a policy set
    that drafts from history.
    """
    rows, history = trace.step(step), trace.history(step)
    known = None
    if any(policy_set.histopipe for policy_set in policy_sets):
        known = TraceLengths(trace).before(step, rows.table["prompt_key"].unique().to_pylist())
    times = ProfiledStepTimes(latency, cluster.tp_degree)
    num_parts = max(cluster.num_engines, -(-len(rows) // cluster.max_num_seqs))
    replays = {
        config: replay_step(rows, trace.before(step), config, times, num_parts)
        for config in {policy_set.histospec for policy_set in policy_sets}
        if config
    }
    return [
        simulate_step(
            rows, cluster, latency, one, history, acceptance, replays.get(one.histospec), known
        )
        for one in policy_sets
    ]


def _decide(
    policy_set: PolicySet,
    cluster: ClusterLayout,
    latency: Latency,
    step: int,
    requests: Mapping[str, Sequence[RolloutRequest]],
    history: Mapping[str, float],
    known: Mapping[str, LengthHistory],
) -> tuple[Sequence[PromptGroup], PolicySet]:
    """Return the placement of a step, and the set with its policies. With `histopipe`, call the
    functions that a run calls.

    Deviations: the gain of drafts from history in earlier steps is unknown, so a response takes a
    forward pass per token. Steps are simulated one by one, so no sample is deferred to the next.
    """
    if policy_set.histopipe is None:
        groups = policy_set.placement(list(requests), history, cluster.num_engines)
        return groups, policy_set
    group_size = max(map(len, requests.values()))
    config = run_config(
        max(request.max_response_tokens for group in requests.values() for request in group),
        staleness=1,
        histopipe=policy_set.histopipe,
        rollout={
            "num_engines": cluster.num_engines,
            "tp_degree": cluster.tp_degree,
            "max_num_seqs": cluster.max_num_seqs,
            "group_size": group_size,
            "placement": "histopipe",
        },
    )
    drafting = policy_set.drafting
    window, held = drafting.window if drafting else 0, cluster.max_context_tokens or math.inf
    rollout_time = time_rollouts(config, latency, window, held)
    about = (list(requests), known, step, cluster.num_engines, rollout_time, fit_passes(known))
    placement, growth = place_prompts(config, *about)
    plan = StepPlan(
        split=Split.TRAIN,
        step=step,
        epoch=0,
        policy_version=0,
        created_s=0.0,
        group_size=group_size,
        groups=placement.groups,
        ranking_groups=placement.ranking_groups,
        length_growth=growth,
        drafting=drafting,
    )
    policies = plan_policies(config, StepInputs(plan=plan))
    return plan.groups, replace(policy_set, policies=policies)


def summarise(results: Sequence[SimulatedStep]) -> list[PolicySetSummary]:
    """Return a summary for each policy set, in the order of first appearance."""
    by_set: dict[str, list[SimulatedStep]] = {}
    for result in results:
        by_set.setdefault(result.policy_set, []).append(result)
    first_s = sum(step.step_s for step in next(iter(by_set.values())))
    return [
        PolicySetSummary(policy_set=name, steps=tuple(steps), first_s=first_s)
        for name, steps in by_set.items()
    ]


def check_latency(latency: Latency, tp_degree: int, drafting: DraftSetting | None = None) -> None:
    """Raise ValueError when the latency model has no valid time for a step of one request, with and
    without drafting."""
    times_s = {
        "decoding": latency.decode_s(tp_degree, 1, 1.0),
        "prefill": latency.prefill_s(tp_degree, 1, 1.0),
    }
    if drafting:
        drafter, window = drafting.drafter, drafting.window
        verify_s = latency.verify_s(tp_degree, 1, 1.0, window)
        times_s[f"verifying {window} draft tokens of"] = verify_s
        # A drafter may take no time, but not negative time.
        draft_s = latency.draft_s(drafter, 1, window)
        times_s[f"drafting {window} tokens by {drafter!r} for"] = draft_s or verify_s
    for what, seconds in times_s.items():
        if not 0.0 < seconds < float("inf"):
            raise ValueError(
                f"the latency model gives {seconds} s for {what} one request at TP {tp_degree}: "
                "profile this first"
            )


def step_requests(
    rows: Trace, step: int
) -> tuple[dict[str, list[RolloutRequest]], dict[RequestId, int]]:
    """Return the requests by prompt key in order of appearance, and every response's length."""
    columns = ("prompt_key", "sample_index", "prompt_tokens", "response_tokens")
    values = [rows.table[name].to_pylist() for name in columns]
    limit = max(values[3])
    prompts = {tokens: (0,) * tokens for tokens in set(values[2])}
    groups: dict[str, list[RolloutRequest]] = {}
    lengths: dict[RequestId, int] = {}
    for key, sample, prompt_tokens, response_tokens in zip(*values, strict=True):
        id = RequestId(Split.TRAIN, step, key, sample)
        lengths[id] = response_tokens
        # One token more than the longest response, so that no response reaches the limit.
        request = RolloutRequest(id, prompts[prompt_tokens], 0, limit + 1)
        groups.setdefault(key, []).append(request)
    return groups, lengths


def known_acceptances(
    rows: Trace,
    ids: Iterable[RequestId],
    default: float | Mapping[RequestId, Acceptance] | None,
) -> Mapping[RequestId, Acceptance]:
    """Return the acceptance of every rollout that has one, from its row or from the default."""
    if isinstance(default, Mapping):
        return default
    if default is not None and not 0.0 <= default <= 1.0:
        raise ValueError(f"acceptance is a share of draft tokens, from 0 to 1, not {default}")
    shares = rows.table["acceptance"].to_pylist()
    known = (
        (id, default if share is None else share) for id, share in zip(ids, shares, strict=True)
    )
    return {id: share for id, share in known if share is not None}


async def roll_out(
    engines: Sequence[VirtualEngine],
    policy_set: PolicySet,
    placed: Sequence[tuple[int, RolloutRequest]],
    pools: Sequence[Pool] = (),
) -> tuple[list[Rollout], Outcome]:
    """Roll out on these engines. Return the rollouts in the order in which they finished, and the
    outcome of the stage."""
    finished: list[Rollout] = []

    async def note(rollouts: Sequence[Rollout]) -> None:
        finished.extend(rollouts)

    coordinator = Coordinator(engines, policy_set.policies, pools=pools)
    await coordinator.start()
    await coordinator.load_weights(PolicyWeights(0, b"", ()))
    if policy_set.choose_drafting is None:
        for engine in engines:
            await engine.set_drafting(policy_set.setting)
    outcome = await coordinator.roll_out(placed, note)
    await coordinator.shutdown()
    return sorted(finished, key=lambda rollout: rollout.finished_s), outcome


def _measure(
    name: str,
    step: int,
    engines: Sequence[VirtualEngine],
    finished_s: Sequence[float],
    num_tokens: int,
) -> SimulatedStep:
    step_s = finished_s[-1]
    alone_s = step_s - finished_s[-2] if len(finished_s) > 1 else step_s
    timelines = [engine.intervals for engine in engines]
    return SimulatedStep(
        policy_set=name,
        step=step,
        num_rollouts=len(finished_s),
        num_tokens=num_tokens,
        step_s=step_s,
        idle_shares=tuple(max(0.0, step_s - _seconds(own)) / step_s for own in timelines),
        one_left_shares=tuple(
            _seconds(i for i in own if i.batch + i.waiting == 1) / step_s for own in timelines
        ),
        last_alone_share=alone_s / step_s,
        num_migrated=sum(engine.num_withdrawn for engine in engines),
        num_preempted=sum(engine.num_preempted for engine in engines),
    )


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(i.end_s - i.start_s for i in intervals)
