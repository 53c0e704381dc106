"""Scenes of PAT and SpecActor for all techniques together, and what is assumed in them.

PAT: the points of its evaluation (`benchmarks.papers.pat`), from a base of TP 2 as in the paper.
Drafting from history is assumed beside it, with RhymeRL's windows and gate: 72 % of draft tokens
are right, the middle of the 65 to 79 % that are printed (7.2.2), in half of the requests between 61
and 80 % (a spread of 0.5 on the scale of logits, as for SpecActor's), and looking one up takes what
is printed for that (7.4).

SpecActor: its cluster of 256 GPUs and its plan of one drafter GPU for four that verify. Two
verifiers share a node of 8, so that they may become one of TP 8, with the drafter GPUs elsewhere;
their latency follows from that at TP 4 (`benchmarks.papers.sharded`). What a switch takes and the
way to host memory are those of PAT's H100.
"""

from dataclasses import replace

import numpy as np
from scipy.special import expit, logit

from benchmarks.papers.drafters import LATENCY
from benchmarks.papers.generate import TraceSpec
from benchmarks.papers.pat import Point, lengths, machine, switch_costs
from benchmarks.papers.scene import Scene
from benchmarks.papers.sharded import ShardedLatency, reshard
from benchmarks.papers.speculation_case import REPORT_S, Case
from benchmarks.papers.switching import PRINTED_BASE, Steps
from benchmarks.papers.windows import ACCEPTANCE, Aimd
from engines.latency.model_shape import SHAPES
from engines.simulate.cluster import Placement, step_requests
from schemas.layout import Pool
from schemas.simulate import ClusterLayout

ACCEPTANCE_SPREAD = 0.5


def pat_scene(
    point: Point,
    step: int,
    seed: int,
    base: int = PRINTED_BASE,
    higher: tuple[int, ...] | None = None,
) -> Scene:
    """`higher`: TP degrees beside the base; None for all above."""
    steps = Steps.draw(machine(point), lengths(point), seed)
    scene = steps.scene(step, base, higher=higher)
    _, ids = step_requests(scene.rows, step)
    rng = np.random.default_rng([seed, 5])
    spread = ACCEPTANCE_SPREAD * rng.standard_normal(len(ids))
    rates = expit(logit(ACCEPTANCE) + spread).round(3).tolist()
    replays = {id: Aimd(rate).passes for id, rate in zip(ids, rates, strict=True)}
    return replace(scene, drafts=replays, report_s=1.0)


def specactor_scene(
    spec: TraceSpec,
    layout: ClusterLayout,
    step: int,
    seed: int,
    placement: Placement | None = None,
) -> Scene:
    """`placement`: as of `Scene`; None: it is one of the techniques."""
    case = Case.draw(spec, layout, step, seed)
    plan, shape = case.plan(), SHAPES["Qwen2.5-32B"]
    tp = plan.verifier_gpus
    num_engines = case.num_gpus // (plan.drafter_gpus + tp)
    pools, tp_degrees = _pairs(num_engines, tp)
    own = replace(LATENCY, drafter_gpus=plan.drafter_gpus)
    latency = ShardedLatency({to: reshard(own, shape, tp, to) for to in (tp, 2 * tp)})
    rollout = {
        "num_engines": num_engines,
        "tp_degree": tp,
        "group_size": spec.group_size,
        "max_num_seqs": len(case.rows),
    }
    return Scene(
        config=case.config(plan, rollout=rollout, pat={"tp_degrees": (2 * tp,)}),
        rows=case.rows,
        latency=latency,
        tp_degrees=tp_degrees,
        pools=pools,
        costs=switch_costs(latency, shape, "H100"),
        lengths=case.lengths,
        inputs=case.inputs(plan),
        acceptances=case.acceptances,
        report_s=REPORT_S,
        placement=placement,
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
