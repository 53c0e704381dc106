"""Time one decision on TP switches, with many engines in the middle of a step.

    64 engines of 32 requests    wanted: below 50 ms
    512 engines of 8             within the time between two looks at an engine's events

The controller is a run's: tensor parallelism of 2, 4 and 8 on nodes of 8 GPUs, beside races with
two draft models, expected lengths from history with their scenarios. Requests are made up, one
engine in 16 is idle, and latencies are those of SpecActor's setting. No engine runs. A round looks
at every pool, in as many decisions as that takes. It decides on moves but does not make them. The
bench times a decision by the clock and by CPU time of its thread, without garbage collection of
imported modules. The first round of each size fills caches and does not count.
"""

import gc
import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from refrain.benchmarks.laps import Measured, Row, check_counts, rows_with
from refrain.benchmarks.papers.drafters import BYTES_PER_S, DRAFTERS, LARGE, LATENCY, SMALL
from refrain.benchmarks.papers.pat import switch_costs
from refrain.benchmarks.papers.real_run import bare_plan
from refrain.benchmarks.papers.settings import LinearLatency
from refrain.engines.control.controller import Controller
from refrain.engines.control.outlook import Outlook
from refrain.engines.control.state import StepState
from refrain.engines.control.techniques import (
    MoveModel,
    StepInputs,
    expected_lengths,
    plan_policies,
    tokens_to_come,
)
from refrain.engines.inference.engine.vllm_engine import POLL_S
from refrain.engines.latency.hardware import H100
from refrain.engines.latency.interface import Latency
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from refrain.engines.pat.layouts import plan_pools
from refrain.engines.pat.remaining import Remaining
from refrain.engines.reports.tables import plain_table
from refrain.engines.rollout.moves import EngineView, Policy, RolloutView
from refrain.engines.simulate.run_config import run_config
from refrain.schemas.bench import BenchReport
from refrain.schemas.rollout import DraftProgress, DraftSetting, LengthHistory, RequestId, Split

PACKAGES = ("refrain", "numpy", "scipy")
SIZES = ((64, 32), (512, 8))
"""Engines, and requests of each."""
DEGREES, NODE_GPUS = (2, 4, 8), 8
GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 8, 512, 16_384
MEDIAN_TOKENS, SPREAD = 3_000, 0.9
"""Median and spread of response lengths, which are log-normal."""
FREE_EVERY = 16
_SETTING = DraftSetting(SMALL, 3, coupled=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="rounds for each size [default: 5]"
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "rounds")
    rows: list[Row] = []
    # A garbage collection over all imported modules takes 130 ms and would distort a decision.
    gc.collect()
    gc.freeze()
    for num_engines, each in SIZES:
        console.print(f"{num_engines} engines of {each} requests")
        size = {"num_engines": num_engines, "num_requests": num_engines * each}
        for number in range(args.rounds + 1):
            taken = [size | {"round": number} | row for row in _round(num_engines, each, number)]
            rows += taken if number else []
    gc.unfreeze()
    figures: dict[str, int | float] = {"poll_ms": 1e3 * POLL_S}
    for num_engines, _ in SIZES:
        own = rows_with(rows, num_engines=num_engines)
        figures |= {
            f"decision_ms_{num_engines}": median(row["ms"] for row in own),
            f"decision_cpu_ms_{num_engines}": median(row["cpu_ms"] for row in own),
            f"longest_cpu_ms_{num_engines}": max(row["cpu_ms"] for row in own),
            f"moves_{num_engines}": sum(row["moves"] for row in own) / args.rounds,
        }
    return figures, rows


def show(report: BenchReport, console: Console) -> None:
    names = ("engines", "decisions of a round", "median, ms", "of the CPU, ms", "longest, ms")
    table = plain_table(*names, text=())
    for num_engines, _ in SIZES:
        figures = report.figures
        names = ("decision_ms", "decision_cpu_ms", "longest_cpu_ms")
        values = [f"{figures[f'{name}_{num_engines}']:.1f}" for name in names]
        own = rows_with(report.rows, num_engines=num_engines)
        rounds = len({row["round"] for row in own})
        table.add_row(str(num_engines), f"{len(own) / rounds:.0f}", *values)
    console.print(table)
    console.print(
        f"the driver looks at an engine's events every {report.figures['poll_ms']:.0f} ms"
    )


@dataclass(frozen=True)
class _ShardedLatency:
    """A latency model for each TP degree. Implements `Latency`."""

    by_tp: Mapping[int, Latency]

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        return self.by_tp[tp_degree].decode_s(tp_degree, batch, context_tokens)

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self.by_tp[tp_degree].prefill_s(tp_degree, batch, rms_tokens)

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        return self.by_tp[tp_degree].verify_s(tp_degree, batch, context_tokens, window)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        return self.by_tp[min(self.by_tp)].draft_s(drafter, batch, window)


def _reshard(
    printed: LinearLatency, shape: ModelShape, tp_degree: int, to_tp: int
) -> LinearLatency:
    """Return `printed`, which is of `tp_degree`, at another degree. GPUs share weights, computation
    and KV cache. An all-reduce takes 2 hops more for each further GPU."""
    share = tp_degree / to_tp
    weights_s = shape.weight_bytes / (tp_degree * BYTES_PER_S)
    hops_s = shape.num_layers * 2 * 2 * (to_tp - tp_degree) * H100.hop_s
    return replace(
        printed,
        step_s=printed.step_s - weights_s * (1 - share) + hops_s,
        sequence_s=printed.sequence_s * share,
        token_s=printed.token_s * share,
        prefill_token_s=printed.prefill_token_s * share,
    )


@dataclass
class _Seen:
    """An outlook that notes which engines the controller looks at."""

    outlook: Outlook
    engines: set[int] = field(default_factory=set)

    @property
    def remaining(self) -> Remaining:
        return self.outlook.remaining

    def forecast(self, view: RolloutView, scenario: float = 0.0) -> StepState:
        self.engines |= {engine.engine for engine in view.engines}
        return self.outlook.forecast(view, scenario)


def _round(num_engines: int, each: int, seed: int) -> Iterator[Row]:
    view, history = _stage(num_engines, each, seed)
    policies = _policies(num_engines, history)
    (controller,) = (policy for policy in policies if isinstance(policy, Controller))
    seen: Any = _Seen(controller.outlook)
    controller.outlook = seen
    at_work = {engine.engine for engine in view.engines if engine.progress}
    while not at_work <= seen.engines:
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        moves = controller.decide(view)
        yield {
            "ms": 1e3 * (time.perf_counter() - began_s),
            "cpu_ms": 1e3 * (time.thread_time() - cpu_s),
            "moves": len(moves),
        }


def _stage(num_engines: int, each: int, seed: int) -> tuple[RolloutView, dict[str, LengthHistory]]:
    """Return the middle of a step, and the length history of its prompts."""
    rng = np.random.default_rng([seed, num_engines])
    keys = [f"prompt-{i}" for i in range(num_engines * each // GROUP_SIZE)]
    medians = rng.lognormal(math.log(MEDIAN_TOKENS), SPREAD, len(keys)).clip(64, MAX_TOKENS / 2)
    history = {
        key: LengthHistory(tokens, round(1.8 * tokens), tokens)
        for key, tokens in zip(keys, medians.tolist(), strict=True)
    }
    ids = [RequestId(Split.TRAIN, 1, key, i) for key in keys for i in range(GROUP_SIZE)]
    done = rng.uniform(0.2, 0.9, len(ids)) * medians.repeat(GROUP_SIZE)
    told = [
        DraftProgress(_SETTING, 1500, accepted, 1000 - accepted)
        for accepted in rng.integers(500, 900, len(ids)).tolist()
    ]
    engines = []
    for engine in range(num_engines):
        own = [] if engine % FREE_EVERY == 0 else range(engine, len(ids), num_engines)
        progress = {ids[i]: int(done[i]) for i in own}
        drafting = {ids[i]: told[i] for i in own}
        engines.append(EngineView(engine, progress, drafting, DEGREES[0]))
    return RolloutView(60.0, tuple(engines), len(ids) // 2, 2 * len(ids)), history


def _policies(num_engines: int, history: Mapping[str, LengthHistory]) -> tuple[Policy, ...]:
    """Return the policies that a run would have."""
    shape, lowest = SHAPES["Qwen2.5-32B"], DEGREES[0]
    latency = _ShardedLatency({tp: _reshard(LATENCY, shape, 4, tp) for tp in DEGREES})
    pools, _ = plan_pools(num_engines, lowest, DEGREES[1:], NODE_GPUS)
    config = run_config(
        MAX_TOKENS,
        rollout={"num_engines": num_engines, "tp_degree": lowest, "group_size": GROUP_SIZE},
        drafting={"enabled": False},
        specactor={
            "draft_models": [{"name": name, "path": "of-the-bench"} for name in (SMALL, LARGE)],
            "drafter": SMALL,
        },
        pat={"tp_degrees": DEGREES[1:]},
    )
    model = MoveModel(
        latency=latency,
        costs=switch_costs(latency, shape, "H100"),
        pools=pools,
        remaining=expected_lengths(config, history),
        prompt_tokens=dict.fromkeys(history, PROMPT_TOKENS),
    )
    inputs = StepInputs(
        plan=bare_plan(1, list(history), GROUP_SIZE, _SETTING),
        acceptances={name: one.mean_acceptance for name, one in DRAFTERS.items()},
        to_come=tokens_to_come(config, history),
        move_model=model,
    )
    return plan_policies(config, inputs)
