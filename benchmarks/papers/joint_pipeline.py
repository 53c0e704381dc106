"""RhymeRL's overlapping steps, GPUs that may change their TP degree, all techniques together.

A quarter of its cluster, with a quarter of the prompts of a step: 16 engines of TP 2 on 4 nodes of
8 GPUs, which may become engines of TP 4 and 8 (`benchmarks.papers.sharded`). Placement is
HistoPipe's (two-tier), without HistoPipe veRL's. Where it is drafted from history, 72 % of the
tokens are right (`benchmarks.papers.windows.ACCEPTANCE`). What is compared is GPU time: an engine
that has nothing left begins the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.papers.pat import switch_costs
from benchmarks.papers.pipeline import Configuration, simulate_pipeline
from benchmarks.papers.real_run import ALL, HISTOPIPE, asked_seldom, only, switched_on
from benchmarks.papers.rhymerl import REPORT_S, dealt, in_turn, two_tier
from benchmarks.papers.script import Script, read_script
from benchmarks.papers.settings import RHYMERL_14B_TP2, Overlap, Setting
from benchmarks.papers.sharded import ShardedLatency, reshard
from benchmarks.papers.windows import TYPICAL, GatedHistory, TokenLatency
from engines.control.techniques import MoveModel, StepInputs, expected_lengths, plan_policies
from engines.latency.analytic import LOOKUP_S
from engines.latency.model_shape import SHAPES
from engines.pat.costs import SwitchCosts
from engines.pat.layouts import plan_pools
from engines.rollout.moves import Policy
from engines.simulate.run_config import run_config
from schemas.config import TrainConfig
from schemas.drafting import HISTORY
from schemas.layout import Pool
from schemas.simulate import ClusterLayout
from schemas.step import StepPlan

QUARTER = 4
NUM_SAMPLES = 1000
"""Samples whose seconds are compared."""


@dataclass(frozen=True)
class PipelineScene:
    """Steps on a cluster, and everything that a run may know of them."""

    config: TrainConfig
    """Config of a real run with all techniques."""
    script: Script
    layout: ClusterLayout
    latency: ShardedLatency
    pools: tuple[Pool, ...]
    costs: SwitchCosts
    sync_s: float

    @property
    def techniques(self) -> tuple[str, ...]:
        return switched_on(self.config)

    def seconds(self, technique: str) -> float:
        """Seconds of so many samples with nothing, one technique, or all of them."""
        latency, layout, config = self.latency, self.layout, only(self.config, technique)
        ranked = technique in (HISTOPIPE, ALL)
        gate = GatedHistory(latency, layout.tp_degree, (TYPICAL.passes,))
        times = two_tier(layout, TokenLatency(gate) if config.drafting.enabled else latency)
        configuration = Configuration(
            name=technique,
            plan=in_turn(config.histopipe, times) if ranked else dealt("even"),
            policies=partial(self._policies, config),
            report_s=REPORT_S,
            oversample=config.histopipe.oversample,
            drafting=gate if config.drafting.enabled else None,
            pools=self.pools,
            costs=self.costs,
        )
        run = simulate_pipeline(self.script, layout, latency, configuration, sync_s=self.sync_s)
        return NUM_SAMPLES / run.samples_per_s

    def _policies(self, config: TrainConfig, plan: StepPlan) -> Sequence[Policy]:
        (step,) = (step for step in self.script.steps if step.step == plan.step)
        model = MoveModel(
            latency=self.latency,
            costs=self.costs,
            pools=self.pools,
            remaining=expected_lengths(config, step.history),
            # Of all steps: a deferred request is of the one before.
            prompt_tokens={
                key: len(group[0].prompt_token_ids)
                for step in self.script.steps
                for key, group in step.requests.items()
            },
            speculation=TYPICAL.speculation if config.drafting.enabled else (1.0, 0),
        )
        policies = plan_policies(config, StepInputs(plan=plan, move_model=model))
        return asked_seldom(policies, REPORT_S / 2)


def pipeline_scene(setting: Setting, overlap: Overlap, seed: int) -> PipelineScene:
    spec, layout, steps = setting.spec, setting.layout, overlap.joint_steps
    changes = {
        "max_response_tokens": overlap.maxima[-1],
        "prompts_per_step": spec.prompts_per_step // QUARTER,
        "num_prompts": spec.num_prompts // QUARTER,
    }
    smaller = replace(setting, spec=spec.model_copy(update=changes))
    num_engines = layout.num_engines // QUARTER
    shape, tp = SHAPES["Qwen3-14B"], layout.tp_degree
    degrees = (tp, 2 * tp, 4 * tp)
    latency = ShardedLatency(
        {to: reshard(RHYMERL_14B_TP2, shape, tp, to) for to in degrees}, {HISTORY: LOOKUP_S}
    )
    pools, _ = plan_pools(num_engines, tp, degrees[1:], layout.gpus_per_node)
    script = read_script(smaller.trace(seed, steps, num_epochs=2), steps)
    return PipelineScene(
        config=run_config(
            overlap.maxima[-1],
            mode="pipelined",
            rollout={
                "num_engines": num_engines,
                "tp_degree": tp,
                "group_size": script.steps[0].group_size,
                "max_num_seqs": layout.max_num_seqs,
            },
            pat={"tp_degrees": degrees[1:]},
        ),
        script=script,
        layout=layout.model_copy(update={"num_engines": num_engines, "num_gpus": num_engines * tp}),
        latency=latency,
        pools=pools,
        costs=switch_costs(latency, shape, "H100"),
        sync_s=overlap.sync_s,
    )
