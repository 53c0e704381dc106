"""Scenes of PAT and SpecActor for all techniques together, and what is assumed in them.

PAT: the points of its evaluation (`benchmarks.papers.pat`), from a base of TP 2 as in the paper.
Drafting from history is assumed beside it, with RhymeRL's windows and gate: 72 % of draft tokens
are right, the middle of the 65 to 79 % that are printed (7.2.2), in half of the requests between 61
and 80 % (a spread of 0.5 on the scale of logits, as for SpecActor's), and looking one up takes what
is printed for that (7.4).

SpecActor: its cluster of 256 GPUs and its plan of one drafter GPU for four that verify. Two
verifiers share a node of 8, so that they may become one of TP 8, with the drafter GPUs elsewhere;
their latency follows from that at TP 4 (`benchmarks.papers.sharded`). What waking takes and the way
to host memory are those of PAT's H100.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from scipy.special import expit, logit

from benchmarks.papers.generate import TraceSpec, generate
from benchmarks.papers.joint import HistoryDrafts, JointRow, Scene, rows_of, run_technique
from benchmarks.papers.pat import (
    CONTROL_S,
    GROUP_SIZE,
    LINK_BYTES_PER_S,
    Point,
    lengths,
    machine,
)
from benchmarks.papers.real_run import ALL, NOTHING, bare_plan, run_config
from benchmarks.papers.script import known_before
from benchmarks.papers.settings import SPECACTOR_32B_TP4
from benchmarks.papers.sharded import ShardedLatency, reshard
from benchmarks.papers.specactor import LATENCY, Case
from benchmarks.papers.windows import Aimd
from engines.control.techniques import StepFacts
from engines.latency.analytic import LOOKUP_S, AnalyticLatency
from engines.latency.hardware import HARDWARE
from engines.latency.model_shape import SHAPES
from engines.pat.costs import SwitchCosts
from engines.pat.layouts import plan_pools
from engines.simulate.cluster import step_requests
from engines.specactor.planner import ExecutionPlan
from schemas.drafting import HISTORY
from schemas.layout import Pool
from schemas.rollout import RequestId
from schemas.simulate import ClusterLayout

BASE_TP, HIGHER_TP = 2, (4, 8)
ACCEPTANCE, ACCEPTANCE_SPREAD = 0.72, 0.5
Progress = Callable[[str], None]


def pat_rows(
    points: Sequence[Point], steps: Sequence[int], seed: int, progress: Progress
) -> Iterator[JointRow]:
    """Seconds are the mean of the steps."""
    for point in points:
        progress(point.name)
        scenes = [pat_scene(point, step, seed) for step in steps]
        names = (NOTHING, *scenes[0].techniques, ALL)
        seconds = {
            name: fmean(run_technique(scene, name).step_s for scene in scenes) for name in names
        }
        yield from rows_of(point.name, seconds)


def specactor_rows(
    spec: TraceSpec, layout: ClusterLayout, step: int, seed: int, progress: Progress
) -> Iterator[JointRow]:
    scene = specactor_scene(spec, layout, step, seed)
    seconds = {}
    for name in (NOTHING, *scene.techniques, ALL):
        progress(f"{spec.name}, {name}")
        seconds[name] = run_technique(scene, name).step_s
    yield from rows_of(spec.name, seconds)


def pat_scene(point: Point, step: int, seed: int) -> Scene:
    trace = generate(lengths(point), seed, range(1, step + 1))
    rows = trace.step(step)
    requests, of_request = step_requests(rows, step)
    latency = AnalyticLatency(point.shape, HARDWARE[point.hardware], {HISTORY: LOOKUP_S})
    num_engines = point.num_gpus // BASE_TP
    pools, specs = plan_pools(num_engines, BASE_TP, HIGHER_TP, 8)
    of_point = machine(point)
    return Scene(
        config=run_config(
            point.max_tokens,
            rollout={"num_engines": num_engines, "tp_degree": BASE_TP, "group_size": GROUP_SIZE},
            pat={"tp_degrees": HIGHER_TP},
        ),
        rows=rows,
        latency=latency,
        tp_degrees={spec.engine: spec.tp_degree for spec in specs},
        pools=pools,
        costs=replace(of_point.costs(), latency=latency),
        lengths=known_before(trace, step, requests),
        facts=StepFacts(plan=bare_plan(step, list(requests), GROUP_SIZE)),
        drafts=_history_drafts(list(of_request), seed),
        kv_capacity_tokens={t: of_point.kv_capacity_tokens(t) for t in (BASE_TP, *HIGHER_TP)},
    )


def _history_drafts(ids: Sequence[RequestId], seed: int) -> HistoryDrafts:
    rng = np.random.default_rng([seed, 5])
    spread = ACCEPTANCE_SPREAD * rng.standard_normal(len(ids))
    rates = expit(logit(ACCEPTANCE) + spread).round(3).tolist()
    replays = {id: Aimd(rate).passes for id, rate in zip(ids, rates, strict=True)}
    return HistoryDrafts(Aimd(ACCEPTANCE), replays)


def specactor_scene(spec: TraceSpec, layout: ClusterLayout, step: int, seed: int) -> Scene:
    case = Case.draw(spec, layout, step, seed)
    plan = case.plan()
    num_engines = case.num_gpus // (plan.drafter_gpus + plan.verifier_gpus)
    pools, tp_degrees = _pairs(num_engines, plan.verifier_gpus)
    latency, shape = _verifiers(plan), SHAPES["Qwen2.5-32B"]
    epoch = spec.steps_per_epoch
    first = (step - 1) // epoch * epoch + 1 - epoch
    trace = generate(spec, seed, [*range(max(1, first), max(1, first + epoch)), step])
    requests, _ = step_requests(case.rows, step)
    rollout = {
        "num_engines": num_engines,
        "tp_degree": plan.verifier_gpus,
        "group_size": spec.group_size,
        "max_num_seqs": len(case.rows),
    }
    return Scene(
        config=case.config(plan, rollout=rollout, pat={"tp_degrees": (2 * plan.verifier_gpus,)}),
        rows=case.rows,
        latency=latency,
        tp_degrees=tp_degrees,
        pools=pools,
        costs=SwitchCosts(
            latency=latency,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            num_kv_heads=shape.num_kv_heads,
            link_bytes_per_s=LINK_BYTES_PER_S["H100"],
            wake_s=CONTROL_S,
        ),
        lengths=known_before(trace, step, requests),
        facts=case.facts(plan),
        acceptances=case.acceptances,
        report_s=5.0,
    )


def _pairs(num_engines: int, tp_degree: int) -> tuple[tuple[Pool, ...], dict[int, int]]:
    """Two engines each, which may become one; an odd one stays alone."""
    tp_degrees = dict.fromkeys(range(num_engines), tp_degree)
    pools = []
    for pair in range(num_engines // 2):
        both, one = (2 * pair, 2 * pair + 1), num_engines + pair
        tp_degrees[one] = 2 * tp_degree
        pools.append(Pool(pair, {tp_degree: both, 2 * tp_degree: (one,)}))
    return tuple(pools), tp_degrees


def _verifiers(plan: ExecutionPlan) -> ShardedLatency:
    """Verifiers at the printed TP degree and twice that."""
    tp, shape = plan.verifier_gpus, SHAPES["Qwen2.5-32B"]
    weights_s = shape.weight_bytes / (tp * 3.35e12)
    double = reshard(
        replace(SPECACTOR_32B_TP4, verifies=True),
        tp,
        2 * tp,
        weights_s=weights_s,
        num_layers=shape.num_layers,
    )
    own = replace(LATENCY, drafter_gpus=plan.drafter_gpus)
    return ShardedLatency({tp: own, 2 * tp: replace(own, verifier=double)})
