"""PAT's machines and models (5.1, 5.2): what the paper prints of them, and what is assumed.

    8 A40     LLaMA3.1-8B               Fig. 10a
    16 A40    LLaMA3.1-8B, Qwen3-14B    Fig. 10b, 10c: two nodes, each a pool of its own
    8 H100    LLaMA3.1-8B, Qwen3-14B    Fig. 11

Printed and used: tokens of a step on H100 (throughput times seconds), seconds of an iteration
outside generation, the share of generation on A40 (2.3), the distribution of lengths (Fig. 3b), 128
responses a step (2.3), and that each measured step has a response of the maximum length (5.1).

Assumed: 16 prompts of 8 samples, and about half of the variance of log lengths between prompts. The
rest of an iteration takes time by its tokens; on A40 also by parameters over GPUs. Latencies are
`AnalyticLatency` with `FITTED` figures in place of the assumptions of `engines.latency.hardware`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from refrain.benchmarks.papers.generate import K, TraceSpec, cut_mean, fit_shares
from refrain.engines.latency.analytic import LOOKUP_S, AnalyticLatency
from refrain.engines.latency.hardware import A40, H100, HARDWARE
from refrain.engines.latency.interface import Latency
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from refrain.engines.pat.costs import SwitchCosts
from refrain.schemas.drafting import HISTORY

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
"""Figures of a GPU and its host: least squares over the eight times that the paper prints, four of
tokens (Fig. 4) and four of generations (Fig. 11c). All are within 7 %."""
STEPS = (6, 7, 8, 9, 10)
"""Five, as in 5.1. The five before them are the epoch from which lengths are estimated."""
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


BEST = Point(LLAMA, "H100", 8, 24, speedup=1.37, static_s=134.3, pat_s=87.9)
"""Point with PAT's largest gain."""
POINTS = (
    Point(LLAMA, "A40", 8, 6, speedup=1.05),
    Point(LLAMA, "A40", 8, 16, speedup=1.27),
    Point(LLAMA, "A40", 16, 16, speedup=1.19),
    Point(QWEN, "A40", 16, 6, speedup=1.05),
    Point(QWEN, "A40", 16, 16, speedup=1.18),
    BEST,
    Point(QWEN, "H100", 8, 16, speedup=1.29, static_s=133.9, pat_s=91.1),
)
"""Points whose speed-up the paper prints."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A point's GPUs by the latency model."""

    point: Point
    latency: AnalyticLatency

    def fits(self, tp_degree: int) -> bool:
        """Whether the longest response fits beside the weights."""
        return self.latency.kv_capacity_tokens(tp_degree) >= self.point.max_tokens + K

    def costs(self) -> SwitchCosts:
        return switch_costs(self.latency, self.point.shape, self.point.hardware)


def machine(point: Point, hardware: Mapping[str, float] | None = None) -> Machine:
    """Return a point's machine. `hardware` replaces fitted figures, by field."""
    fitted = {**FITTED[point.hardware], **(hardware or {})}
    preset = HARDWARE[point.hardware].model_copy(update=fitted)
    return Machine(point, AnalyticLatency(point.shape, preset, {HISTORY: LOOKUP_S}))


def switch_costs(latency: Latency, shape: ModelShape, hardware: str) -> SwitchCosts:
    return SwitchCosts(
        latency=latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_kv_heads=shape.num_kv_heads,
        link_bytes_per_s=LINK_BYTES_PER_S[hardware],
        wake_s=CONTROL_S[hardware],
    )


def lengths(point: Point) -> TraceSpec:
    """Return log-normal lengths with the spread of Fig. 3b, and one response of the maximum.

    The mean is that of Fig. 3b on A40, else it follows from the printed tokens of a step. Another
    maximum cuts the same responses elsewhere.
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
