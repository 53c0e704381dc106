"""RhymeRL's overlapping steps with GPUs that may change their TP degree, and one controller.

A quarter of its cluster, with a quarter of the prompts of a step: 16 engines of TP 2 on 4 nodes of
8 GPUs, which may become engines of TP 4 and 8 (`benchmarks.papers.sharded`). Placement is
HistoPipe's (two-tier). Nobody is drafted for but as the controller says, by looking tokens up, of
which 72 % are right (`benchmarks.papers.rhymerl.ACCEPTANCE`). What is compared is GPU time: an
engine that has nothing left begins the next step. An engine with more than 64 unfinished requests
is not looked at.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.papers.joint import JOINT, NOTHING, REDRAFT, RESHAPE, JointRow, rows_of
from benchmarks.papers.joint_scenes import LOOKUP
from benchmarks.papers.pat import CONTROL_S, LINK_BYTES_PER_S
from benchmarks.papers.pipeline import Configuration, Pooled, simulate_pipeline
from benchmarks.papers.rhymerl import ACCEPTANCE, REPORT_S, in_turn, moving
from benchmarks.papers.script import Script, StepScript, read_script
from benchmarks.papers.settings import RHYMERL_14B_TP2, Overlap, Setting
from benchmarks.papers.sharded import ShardedLatency, reshard
from engines.control.controller import Controller
from engines.control.effects import Effects
from engines.control.moving import Outliers
from engines.control.objective import FewestGpuSeconds
from engines.control.outlook import Outlook
from engines.control.proposal import Technique
from engines.control.redrafting import Redrafting
from engines.control.reshaping import Reshaping
from engines.control.state import Forecaster
from engines.histopipe.estimate import estimate_rollout_s
from engines.histopipe.migration import Migration
from engines.latency.analytic import LOOKUP_S
from engines.latency.model_shape import SHAPES
from engines.pat.costs import SwitchCosts
from engines.pat.layouts import plan_pools
from engines.pat.remaining import FromHistory
from engines.rollout.moves import Policy
from schemas.config import HistoPipeConfig
from schemas.simulate import ClusterLayout, SimulatedPipeline
from schemas.step import StepPlan

HISTOPIPE, OUTLIERS = "HistoPipe's migration", "outliers"
QUARTER = 4
NUM_GROUPS = 4
NUM_SAMPLES = 1000
"""Whose seconds are compared."""
EVERY_S = 10.0
MAX_BATCH = 64


@dataclass(frozen=True)
class Course:
    """Steps on a cluster, and everything that a controller may know of them."""

    script: Script
    max_tokens: int
    layout: ClusterLayout
    latency: ShardedLatency
    pooled: Pooled
    sync_s: float
    config: HistoPipeConfig

    def run(self, name: str) -> SimulatedPipeline:
        latency, tp_degree = self.latency, self.layout.tp_degree
        rollout_time = partial(
            estimate_rollout_s, latency, tp_degree, max_num_seqs=self.layout.max_num_seqs
        )
        configuration = Configuration(
            name=name,
            plan=in_turn(self.config, rollout_time),
            policies=self._policies(name),
            report_s=REPORT_S,
            oversample=self.config.oversample,
            acceptance=ACCEPTANCE,
            pooled=self.pooled,
        )
        return simulate_pipeline(
            self.script, self.layout, latency, configuration, sync_s=self.sync_s
        )

    def _policies(self, name: str) -> Callable[[StepPlan], Sequence[Policy]]:
        if name == NOTHING:
            return lambda _: ()
        if name == HISTOPIPE:
            return partial(moving, self.config)
        names = (OUTLIERS, REDRAFT, RESHAPE) if name == JOINT else (name,)
        return lambda plan: (self._controller(plan, names),)

    def _controller(self, plan: StepPlan, names: Sequence[str]) -> Controller:
        objective, config = FewestGpuSeconds(), self.config
        migration = Migration(plan, last_share=config.last_share, defer_share=config.defer_share)
        redrafting = Redrafting(self.latency, drafters=(LOOKUP,))
        made: Mapping[str, Technique] = {
            OUTLIERS: Outliers(migration),
            REDRAFT: redrafting,
            RESHAPE: Reshaping(redrafting if REDRAFT in names else None, objective),
        }
        (step,) = (step for step in self.script.steps if step.step == plan.step)
        remaining = FromHistory(
            step.history, self.max_tokens, group_size=step.group_size, steady=True
        )
        return Controller(
            techniques=[made[name] for name in names],
            outlook=Outlook(
                Forecaster(self.latency, self.layout.max_num_seqs),
                remaining,
                _prompt_tokens(self.script.steps),
                expected_acceptance={LOOKUP: ACCEPTANCE},
            ),
            effects=Effects(
                self.latency,
                {pool.index: pool for pool in self.pooled.pools},
                self.pooled.costs,
            ),
            objective=objective,
            every_s=EVERY_S,
            least_s=REPORT_S,
            max_batch=MAX_BATCH,
            max_requests=math.inf,
        )


def rhymerl_rows(
    setting: Setting, overlap: Overlap, seed: int, progress: Callable[[str], None]
) -> Iterator[JointRow]:
    """With nothing, each technique and all of them, for each number of prompts."""
    for prompts in overlap.prompts_per_step:
        own = replace(setting, spec=setting.spec.model_copy(update={"prompts_per_step": prompts}))
        course = course_of(own, overlap, seed)
        runs = {}
        for name in (NOTHING, HISTOPIPE, OUTLIERS, REDRAFT, RESHAPE, JOINT):
            progress(f"{setting.name}, {prompts} prompts, {name}")
            runs[name] = course.run(name)
        yield from rows_of(
            f"{setting.name}, a quarter of {prompts} prompts",
            {name: NUM_SAMPLES / run.samples_per_s for name, run in runs.items()},
        )


def course_of(setting: Setting, overlap: Overlap, seed: int) -> Course:
    spec, layout, steps = setting.spec, setting.layout, overlap.joint_steps
    changes = {
        "max_response_tokens": overlap.maxima[-1],
        "prompts_per_step": spec.prompts_per_step // QUARTER,
        "num_prompts": spec.num_prompts // QUARTER,
    }
    smaller = replace(setting, spec=spec.model_copy(update=changes))
    num_engines = layout.num_engines // QUARTER
    shape, tp = SHAPES["Qwen3-14B"], layout.tp_degree
    weights_s = shape.weight_bytes / (tp * 3.35e12)
    latency = ShardedLatency(
        {
            to: reshard(RHYMERL_14B_TP2, tp, to, weights_s=weights_s, num_layers=shape.num_layers)
            for to in (tp, 2 * tp, 4 * tp)
        },
        {LOOKUP: LOOKUP_S},
    )
    pools, _ = plan_pools(num_engines, tp, (2 * tp, 4 * tp), layout.gpus_per_node)
    costs = SwitchCosts(
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_kv_heads=shape.num_kv_heads,
        link_bytes_per_s=LINK_BYTES_PER_S["H100"],
        wake_s=CONTROL_S,
    )
    return Course(
        script=read_script(smaller.trace(seed, steps, num_epochs=2), steps),
        max_tokens=overlap.maxima[-1],
        layout=layout.model_copy(update={"num_engines": num_engines, "num_gpus": num_engines * tp}),
        latency=latency,
        pooled=Pooled(pools, costs),
        sync_s=overlap.sync_s,
        config=HistoPipeConfig(num_ranking_groups=NUM_GROUPS),
    )


def _prompt_tokens(steps: Sequence[StepScript]) -> dict[str, int]:
    """Of all steps: a deferred request is of the one before."""
    return {
        key: len(group[0].prompt_token_ids)
        for step in steps
        for key, group in step.requests.items()
    }
