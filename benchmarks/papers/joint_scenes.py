"""Scenes of PAT and SpecActor for the joint controller, and what is assumed in them.

PAT: the points of its evaluation (`benchmarks.papers.pat`), from a base of TP 2 as in the paper. It
drafts nothing; where a drafter is assumed, it is one from history by RhymeRL: 72 % of its draft
tokens are right, the middle of the 65 to 79 % that are printed (7.2.2), in half of the requests
between 61 and 80 % (a spread of 0.5 on the scale of logits, as for SpecActor's), and looking one up
takes what is printed for that (7.4).

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

from benchmarks.papers.drafters import DRAFTERS, SMALL
from benchmarks.papers.generate import TraceSpec, generate
from benchmarks.papers.joint import (
    JOINT,
    NOTHING,
    RESHAPE,
    SPREAD,
    TECHNIQUES,
    Drafters,
    JointRow,
    Scene,
    rows_of,
    run_policies,
    run_technique,
)
from benchmarks.papers.pat import (
    CONTROL_S,
    GROUP_SIZE,
    LINK_BYTES_PER_S,
    Point,
    lengths,
    machine,
)
from benchmarks.papers.script import known_before
from benchmarks.papers.settings import SPECACTOR_32B_TP4
from benchmarks.papers.sharded import ShardedLatency, reshard
from benchmarks.papers.specactor import LATENCY, Case, racing, reconfiguring, request_model
from engines.latency.analytic import LOOKUP_S, AnalyticLatency
from engines.latency.hardware import HARDWARE
from engines.latency.model_shape import SHAPES
from engines.pat.costs import SwitchCosts
from engines.pat.layouts import plan_pools
from engines.pat.remaining import FromHistory
from engines.pat.switch import Stage, Switching
from engines.rollout.moves import Policy
from engines.simulate.cluster import step_requests
from engines.specactor.planner import ExecutionPlan
from schemas.layout import Pool
from schemas.rollout import DraftSetting
from schemas.simulate import ClusterLayout

BASE_TP = 2
ACCEPTANCE, ACCEPTANCE_SPREAD = 0.72, 0.5
LOOKUP = "lookup"
"""The assumed drafter's name: `histospec` is replayed from token ids, which these traces lack."""
RACED_WINDOW = 4
PAT, SPECACTOR = "PAT", "SpecActor"
"""Each paper's own policies, beside the controller's techniques."""
Progress = Callable[[str], None]


def pat_rows(
    points: Sequence[Point], steps: Sequence[int], seed: int, progress: Progress
) -> Iterator[JointRow]:
    """Each point without a drafter and with the assumed one; seconds are the mean of the steps."""
    for point in points:
        for drafts in (True, False):
            name = f"{point.name}, {'with a drafter' if drafts else 'no drafter'}"
            progress(name)
            scenes = [pat_scene(point, step, seed, drafts=drafts) for step in steps]
            singles = [t for t in TECHNIQUES if drafts or t in (RESHAPE, SPREAD)]
            seconds = {
                technique: fmean(run_technique(scene, technique).step_s for scene in scenes)
                for technique in (NOTHING, *singles, JOINT)
            }
            own = [run_policies(scene, PAT, (switching(scene),)).step_s for scene in scenes]
            yield from rows_of(name, {**seconds, PAT: fmean(own)})


def specactor_rows(
    spec: TraceSpec, layout: ClusterLayout, step: int, seed: int, progress: Progress
) -> Iterator[JointRow]:
    scene, own = specactor_scene(spec, layout, step, seed)
    seconds = {}
    for technique in (NOTHING, *TECHNIQUES, JOINT):
        progress(f"{spec.name}, {technique}")
        seconds[technique] = run_technique(scene, technique).step_s
    progress(f"{spec.name}, {SPECACTOR}")
    seconds[SPECACTOR] = run_policies(scene, SPECACTOR, own).step_s
    yield from rows_of(spec.name, seconds)


def switching(scene: Scene) -> Switching:
    """PAT's own policy."""
    stage = Stage(
        scene.latency,
        scene.costs,
        scene.remaining,
        scene.prompt_tokens,
        dict.fromkeys(scene.tp_degrees.values(), scene.max_num_seqs),
    )
    return Switching(stage, scene.pools)


def pat_scene(point: Point, step: int, seed: int, *, drafts: bool) -> Scene:
    """`drafts`: with the assumed drafter."""
    trace = generate(lengths(point), seed, range(1, step + 1))
    rows = trace.step(step)
    requests, of_request = step_requests(rows, step)
    latency = AnalyticLatency(point.shape, HARDWARE[point.hardware], {LOOKUP: LOOKUP_S})
    higher = tuple(degree for degree in (4, 8) if degree > BASE_TP)
    num_engines = point.num_gpus // BASE_TP
    pools, specs = plan_pools(num_engines, BASE_TP, higher, 8)
    of_point = machine(point)
    history = known_before(trace, step, requests)
    return Scene(
        rows=rows,
        latency=latency,
        num_engines=num_engines,
        tp_degrees={spec.engine: spec.tp_degree for spec in specs},
        pools=pools,
        costs=replace(of_point.costs(), latency=latency),
        remaining=FromHistory(history, point.max_tokens, group_size=GROUP_SIZE, steady=True),
        drafters=_lookup([*of_request], seed) if drafts else None,
        kv_capacity_tokens={t: of_point.kv_capacity_tokens(t) for t in (BASE_TP, *higher)},
    )


def _lookup(ids: Sequence, seed: int) -> Drafters:
    rng = np.random.default_rng([seed, 5])
    rates = (
        expit(logit(ACCEPTANCE) + ACCEPTANCE_SPREAD * rng.standard_normal(len(ids)))
        .round(3)
        .tolist()
    )
    return Drafters(
        acceptances={id: {LOOKUP: rate} for id, rate in zip(ids, rates, strict=True)},
        expected={LOOKUP: ACCEPTANCE},
        methods=(DraftSetting(LOOKUP, RACED_WINDOW),),
    )


def specactor_scene(
    spec: TraceSpec, layout: ClusterLayout, step: int, seed: int
) -> tuple[Scene, Sequence[Policy]]:
    """The scene, and SpecActor's own policies."""
    case = Case.draw(spec, layout, step, seed)
    plan = case.plan()
    num_engines = case.num_gpus // (plan.drafter_gpus + plan.verifier_gpus)
    pools, tp_degrees = _pairs(num_engines, plan.verifier_gpus)
    latency = _verifiers(plan)
    epoch = spec.steps_per_epoch
    first = (step - 1) // epoch * epoch + 1 - epoch
    trace = generate(spec, seed, [*range(max(1, first), max(1, first + epoch)), step])
    requests, _ = step_requests(case.rows, step)
    history = known_before(trace, step, requests)
    scene = Scene(
        rows=case.rows,
        latency=latency,
        num_engines=num_engines,
        tp_degrees=tp_degrees,
        pools=pools,
        costs=SwitchCosts(
            latency=latency,
            kv_bytes_per_token=SHAPES["Qwen2.5-32B"].kv_bytes_per_token,
            num_kv_heads=SHAPES["Qwen2.5-32B"].num_kv_heads,
            link_bytes_per_s=LINK_BYTES_PER_S["H100"],
            wake_s=CONTROL_S,
        ),
        remaining=FromHistory(
            history, spec.max_response_tokens, group_size=spec.group_size, steady=True
        ),
        drafters=_ladder(case, plan),
        max_num_seqs=len(case.rows),
        report_s=5.0,
        every_s=5.0,
        least_s=2.5,
        max_batch=512,
    )
    return scene, (reconfiguring(plan), racing(case, plan))


def _ladder(case: Case, plan: ExecutionPlan) -> Drafters:
    means = {name: case.mean_acceptance(name) for name in DRAFTERS}
    model = request_model(plan)
    return Drafters(
        acceptances=case.acceptances,
        expected=means,
        methods=[model.best_setting(name, mean) for name, mean in means.items()],
        modes=(True,) if plan.coupled else (True, False),
        initial=DraftSetting(SMALL, plan.window, coupled=plan.coupled),
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
    """At the printed TP degree and twice that."""
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
