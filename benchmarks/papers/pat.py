"""Machines and models on which PAT is measured (sections 5.1 and 5.2), what is printed of it, and
what is assumed.

    8 A40     LLaMA3.1-8B   6K to 16K   Fig. 10a
    16 A40    LLaMA3.1-8B, Qwen3-14B    Fig. 10b, 10c: two nodes, each a pool of its own
    8 H100    LLaMA3.1-8B to 24K, Qwen3-14B to 16K   Fig. 11

Printed of the baseline and used: tokens of a step (throughput times seconds of a step) on H100,
seconds of an iteration outside generation, the share of generation on A40 (2.3), the distribution
of lengths (Fig. 3b), 128 responses a step (2.3), and that each measured step has a response of the
maximum length (5.1).

Assumed: 16 prompts of 8 samples, about half of the variance of log lengths between prompts; maxima
of Fig. 11 between those named; what an iteration takes outside generation goes with its tokens,
and on A40 with parameters over GPUs. Latencies are `AnalyticLatency` with the presets of
`engines.latency.hardware`, and in place of what those assume beside data sheets what is fitted to
all printed seconds together (`benchmarks.papers.pat_printed`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.papers.generate import K, TraceSpec, cut_mean, fit_shares
from engines.latency.analytic import LOOKUP_S, AnalyticLatency
from engines.latency.hardware import A40, H100, HARDWARE
from engines.latency.interface import Latency
from engines.latency.model_shape import SHAPES, ModelShape
from engines.pat.costs import SwitchCosts
from schemas.drafting import HISTORY

Kv = Literal["auto", "move", "recompute"]
LLAMA, QWEN = "LLaMA3.1-8B", "Qwen3-14B"
STEP_TOKENS = {LLAMA: (24 * K, 2570.6 * 172.5), QWEN: (16 * K, 1780.0 * 191.4)}
"""(maximum, tokens of a step) on 8 H100 (5.2, 5.3). Qwen's seconds of a step follow from 1780.0 and
2292.6 tokens/s and the 42.8 s that its generation is shorter."""
REST_S = {LLAMA: 172.5 - 134.3, QWEN: 191.4 - 133.9}
"""Seconds of such a step outside generation."""
A40_REST_S_PER_TOKEN = 1.6e-4
"""LLaMA3.1-8B on 8 A40: with static TP 2 generation is then 81.7 % of an iteration at 16K, as
printed (2.3). At 6K it is 68 %; 64.22 % are printed."""
SIGMA_PROMPTS = 0.6
NUM_RESPONSES, GROUP_SIZE = 128, 8
_FITTED_ALL = {
    "memory_share": 0.84,
    "step_overhead_s": 0.17e-3,
    "layer_s": 37e-6,
    "request_s": 56e-6,
}
FITTED: Mapping[str, Mapping[str, float]] = {
    "A40": _FITTED_ALL | {"hop_s": 5.5e-6, "link_share": 0.55},
    "H100": _FITTED_ALL | {"hop_s": 0.41e-6, "collective_s": 5.8e-6},
}
"""Figures of a GPU and its host by `pat_printed.fit`, to two digits."""
STEPS = (6, 7, 8, 9, 10)
"""Five, as in 5.1; those before them are the epoch that lengths are estimated from."""
TP_DEGREES = (1, 2, 4, 8)
"""TP degrees that are profiled (4.2)."""
_RESHARDED_S = 1.03
CONTROL_S = {
    "A40": 5.52 - 2.36,
    # Weights go by NVLink: as much less as that is faster.
    "H100": 5.52 - 2.36 - _RESHARDED_S * (1 - A40.link_bytes_per_s / H100.link_bytes_per_s),
}
"""Seconds of a switch beside keys and values. On A40 those of Fig. 12: resharding 1.03 s, graphs
0.73 s, the rest; for H100 nothing is printed."""
_MOVED_TOKENS = 12 * K * (math.ceil(9 / 4) / 2 + 9 / 8)
"""Tokens that one rank moves in Fig. 12, TP 2 to 8 with 9 samples of 12K: written by one rank and
read by one."""
LINK_BYTES_PER_S = {
    "A40": _MOVED_TOKENS * SHAPES[LLAMA].kv_bytes_per_token / 2.36,
    # PCIe 5.0 in place of 4.0.
    "H100": 2 * _MOVED_TOKENS * SHAPES[LLAMA].kv_bytes_per_token / 2.36,
}
"""One way, of one rank, to host memory: so that Fig. 12's migration takes its 2.36 s, where nothing
is saved ahead. As in a run most is, so that a switch waits for less."""


@dataclass(frozen=True, slots=True)
class Point:
    """A model on GPUs with a maximum response length, and what is printed of it."""

    model: str
    hardware: str
    num_gpus: int
    max_k: int
    speedup: float | None = None
    """Speed-up of an iteration."""
    static_s: float | None = None
    """Generation with the best static TP degree."""
    pat_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.num_gpus} {self.hardware}, {self.max_k}K"

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.model]

    @property
    def max_tokens(self) -> int:
        """Longest response, in tokens."""
        return self.max_k * K

    def rest_s(self, num_tokens: float) -> float:
        """An iteration with so many tokens, outside generation."""
        if self.hardware == "H100":
            return REST_S[self.model] * num_tokens / STEP_TOKENS[self.model][1]
        share = self.shape.num_params / SHAPES[LLAMA].num_params * 8 / self.num_gpus
        return A40_REST_S_PER_TOKEN * share * num_tokens


def _points(
    model: str, hardware: str, num_gpus: int, **printed: Mapping[str, float]
) -> tuple[Point, ...]:
    return tuple(
        Point(model, hardware, num_gpus, int(max_k[1:]), **of) for max_k, of in printed.items()
    )


BEST = Point(LLAMA, "H100", 8, 24, speedup=1.37, static_s=134.3, pat_s=87.9)
"""Point at which PAT brings the most."""
POINTS = (
    *_points(LLAMA, "A40", 8, _6={"speedup": 1.05}, _8={}, _12={}, _16={"speedup": 1.27}),
    *_points(LLAMA, "A40", 16, _6={}, _8={}, _12={}, _16={"speedup": 1.19}),
    *_points(QWEN, "A40", 16, _6={"speedup": 1.05}, _8={}, _12={}, _16={"speedup": 1.18}),
    *_points(LLAMA, "H100", 8, _6={}, _8={}, _12={}, _16={}),
    BEST,
    *_points(QWEN, "H100", 8, _6={}, _8={}, _12={}),
    Point(QWEN, "H100", 8, 16, speedup=1.29, static_s=133.9, pat_s=91.1),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """A point's GPUs by the latency model, and by what else is assumed of them."""

    point: Point
    latency: AnalyticLatency
    control_s: float

    def fits(self, tp_degree: int) -> bool:
        """The longest response there may be, beside the weights."""
        return self.latency.kv_capacity_tokens(tp_degree) >= self.point.max_tokens + K

    def costs(self, kv: Kv = "auto") -> SwitchCosts:
        point = self.point
        return switch_costs(self.latency, point.shape, point.hardware, self.control_s, kv)


def machine(
    point: Point,
    hardware: Mapping[str, float] | None = None,
    control_s: float | None = None,
) -> Machine:
    """`hardware`: other figures than fitted, by field; `control_s`: than of its GPUs."""
    fitted = {**FITTED[point.hardware], **(hardware or {})}
    latency = AnalyticLatency(
        point.shape,
        HARDWARE[point.hardware].model_copy(update=fitted),
        {HISTORY: LOOKUP_S},
    )
    return Machine(point, latency, CONTROL_S[point.hardware] if control_s is None else control_s)


def switch_costs(
    latency: Latency,
    shape: ModelShape,
    hardware: str,
    wake_s: float | None = None,
    kv: Kv = "auto",
) -> SwitchCosts:
    """`wake_s`: None for what a switch takes there."""
    return SwitchCosts(
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_kv_heads=shape.num_kv_heads,
        link_bytes_per_s=LINK_BYTES_PER_S[hardware],
        wake_s=CONTROL_S[hardware] if wake_s is None else wake_s,
        kv=kv,
    )


def lengths(point: Point) -> TraceSpec:
    """Log-normal with the spread of Fig. 3b, and one response that runs to the maximum.

    On A40 the mean is that of Fig. 3b, otherwise as the printed tokens of a step say; with another
    maximum the same responses are cut elsewhere.
    """
    mu, sigma = fit_shares((8 * K, 0.1085), (16 * K, 0.0218))
    mean_cut, mean = 32 * K, cut_mean(mu, sigma, 32 * K)
    if point.hardware == "H100" or point.model != LLAMA:
        mean_cut, num_tokens = STEP_TOKENS[point.model]
        mean = (num_tokens - mean_cut) / (NUM_RESPONSES - 1)
    num_prompts = NUM_RESPONSES // GROUP_SIZE
    return TraceSpec(
        name="pat_switching",
        num_steps=2 * len(STEPS),
        prompts_per_step=num_prompts,
        group_size=GROUP_SIZE,
        num_prompts=num_prompts * len(STEPS),
        max_response_tokens=point.max_tokens,
        first_mean_tokens=mean,
        last_mean_tokens=mean,
        mean_cut_tokens=mean_cut,
        runaways_per_step=1,
        sigma_prompts=SIGMA_PROMPTS,
        sigma_samples=math.sqrt(sigma**2 - SIGMA_PROMPTS**2),
        staying_rho=0.98,
    )


def uniform(point: Point) -> TraceSpec:
    """Trace with as many tokens, in responses that are all of one length."""
    spec = lengths(point)
    return spec.model_copy(
        update={"sigma_prompts": 0.0, "sigma_samples": 1e-6, "runaways_per_step": 0}
    )
