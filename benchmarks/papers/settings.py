"""The papers' settings, and the figures that they print of their baselines.

Latencies are straight lines through what a paper prints, or else weights and KV cache over memory
bandwidth. A baseline is the paper's own: equal engines of a fixed TP degree, prompts dealt evenly,
no moves. Drafting has a cost only where it follows from the same derivation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from refrain.benchmarks.papers.generate import K, TraceSpec, generate, pat, rhymerl, specactor
from refrain.benchmarks.papers.pat import POINTS, STEPS, Point
from refrain.engines.latency.interface import Latency
from refrain.engines.reports.simulation import Fact
from refrain.engines.simulate.trace import Trace
from refrain.schemas.drafting import HISTORY
from refrain.schemas.simulate import ClusterLayout

NO_DRAFTING = (
    "what drafting costs is not known in a paper's setting: leave the drafter out, or simulate a "
    "trace with a profile or hardware"
)


@dataclass(frozen=True)
class LinearLatency:
    """A decoding step takes `step_s + sequence_s * batch + token_s * context_tokens`.

    Where `verifies`, w draft tokens for each sequence are w times more computation and no more
    memory traffic (RhymeRL 2.2: "traversing the KV cache once"):
    `step_s + sequence_s * batch * (w + 1) + token_s * context_tokens`.
    """

    step_s: float
    sequence_s: float = 0.0
    token_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_step_s: float = 0.01
    """Assumed: no paper prints it."""
    verifies: bool = False
    """`sequence_s` is the computation of a token, so that the time of verifying follows."""
    lookup_s: float | None = None
    """Drafting for one sequence from history; None where it is not known."""

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        assert tp_degree > 0
        return self.step_s + self.sequence_s * batch + self.token_s * context_tokens

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        assert tp_degree > 0
        return self.prefill_step_s + self.prefill_token_s * batch * rms_tokens

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        if not self.verifies:
            raise ValueError(NO_DRAFTING)
        return self.decode_s(tp_degree, batch, context_tokens) + self.sequence_s * batch * window

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        assert window > 0
        if drafter != HISTORY or self.lookup_s is None:
            raise ValueError(NO_DRAFTING)
        return self.lookup_s * batch


@dataclass(frozen=True)
class Overlap:
    """Sizes of the simulation of overlapping steps (`benchmarks.papers.rhymerl`)."""

    maxima: tuple[int, ...]
    """Longest responses, in tokens. Each has a simulation of its own."""
    num_groups: int
    """Ranking groups."""
    steps: tuple[int, ...]
    """Consecutive steps, from 1."""
    more_steps: tuple[int, ...]
    """Steps after those, for AReaL, which never ends one."""
    sync_s: float
    train_share: float
    """Share of an on-policy step that is training. All systems train for the same seconds."""


@dataclass(frozen=True)
class Setting:
    """One baseline of a paper."""

    name: str
    spec: TraceSpec
    layout: ClusterLayout
    latency: Latency
    steps: tuple[int, ...]
    """Steps that are simulated by default, from 1."""
    facts: tuple[Fact, ...]
    overlap: Overlap | None = None
    speculation_step: int | None = None
    """Step in which drafting is simulated (`benchmarks.papers.specactor`)."""
    switching: tuple[Point, ...] = ()
    """Points at which TP switches are simulated (`benchmarks.papers.switching`)."""
    switching_steps: tuple[int, ...] = STEPS

    def trace(self, seed: int, steps: Sequence[int], num_epochs: int = 1) -> Trace:
        """Generate these steps and the whole epochs before each, for placements by history."""
        per_epoch = self.spec.steps_per_epoch
        needed = set(steps)
        for step in steps:
            first = (step - 1) // per_epoch * per_epoch + 1
            needed |= set(range(max(1, first - num_epochs * per_epoch), first))
        return generate(self.spec, seed, sorted(needed))


PAT_A40_TP2 = LinearLatency(
    # PAT section 3.1 and Fig. 4: LLaMA3.1-8B, TP 2 on A40: 15.37 ms for one sequence, 24.41 ms at
    # a global batch of 128, which is 32 on each of the 4 engines of 8 GPUs.
    step_s=15.37e-3 - (24.41e-3 - 15.37e-3) / 31,
    sequence_s=(24.41e-3 - 15.37e-3) / 31,
    # KV cache: 32 layers * 2 * 8 heads * 128 * 2 bytes over 2 GPUs of 696 GB/s.
    token_s=131072 / (2 * 696e9),
    # 2 * 8e9 FLOP a token over 2 GPUs at half of 150 TFLOP/s.
    prefill_token_s=2 * 8e9 / (2 * 75e12),
)
RHYMERL_14B_TP2 = LinearLatency(
    # Qwen3-14B (Table 3): 29.5 GB of weights over 2 Hopper GPUs of 3.35 TB/s, and as much again
    # for kernels and collectives.
    step_s=2 * 29.5e9 / (2 * 3.35e12),
    sequence_s=2 * 14.8e9 / (2 * 500e12),
    token_s=40 * 2 * 8 * 128 * 2 / (2 * 3.35e12),
    prefill_token_s=2 * 14.8e9 / (2 * 500e12),
    verifies=True,
    # "hundreds of CPU cycles" (7.4); assumed: 500 at 2 GHz.
    lookup_s=500 / 2e9,
)
RHYMERL_SYNC_S = 29.5e9 / 2 / 64e9
"""Assumed: each of 2 GPUs takes its half of the weights from host memory (4.2) by PCIe 5.0 x16 at
64 GB/s."""
SPECACTOR_32B_TP4 = LinearLatency(
    # SpecActor section 5.1: below 13 ms with one request per worker. Qwen2.5-32B, 64 layers, 8 KV
    # heads, on 4 Hopper GPUs of 3.35 TB/s.
    step_s=12.5e-3,
    sequence_s=2 * 32.5e9 / (4 * 500e12),
    token_s=64 * 2 * 8 * 128 * 2 / (4 * 3.35e12),
    prefill_token_s=2 * 32.5e9 / (4 * 500e12),
)


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "pat": (
        Setting(
            name="pat",
            spec=pat(16 * K),
            layout=ClusterLayout(num_engines=4, tp_degree=2, num_gpus=8),
            latency=PAT_A40_TP2,
            steps=tuple(range(1, 13)),
            facts=(
                Fact(
                    "baseline_last_alone_share",
                    "46.29 to 81.58 % (2.3; maxima of Fig. 3a)",
                    "does not follow from the printed lengths (Fig. 3b)",
                ),
            ),
            switching=POINTS,
        ),
    ),
    "rhymerl": (
        Setting(
            name="rhymerl",
            spec=rhymerl(16 * K),
            layout=ClusterLayout(num_engines=64, tp_degree=2, num_gpus=128),
            latency=RHYMERL_14B_TP2,
            # Within the 80 steps of its evaluation (section 7).
            steps=(20, 40, 60, 80),
            facts=(
                Fact("baseline_idle_share", "over 46 % (1)", "from printed means, assumed spreads"),
                Fact("baseline_largest_idle_share", "76 % (3.1, Fig. 3c)", "in one step; likewise"),
            ),
            overlap=Overlap(
                maxima=(8 * K, 16 * K),
                num_groups=16,
                # Of one epoch, late among the 80 steps.
                steps=tuple(range(67, 77)),
                more_steps=tuple(range(77, 81)),
                sync_s=RHYMERL_SYNC_S,
                # What 3.1 leaves beside the rollouts of math at 16K. Assumed at 8K too.
                train_share=0.09,
            ),
        ),
    ),
    "specactor": (
        Setting(
            name="specactor",
            spec=specactor(),
            layout=ClusterLayout(num_engines=64, tp_degree=4, num_gpus=256),
            latency=SPECACTOR_32B_TP4,
            steps=(1, 67, 133, 200),
            facts=(
                Fact(
                    "baseline_idle_share",
                    "averagely 50 % (2.2, Fig. 2a)",
                    "calibrated: means and spreads of the lengths were fitted to it",
                ),
            ),
            # The step of its Fig. 14.
            speculation_step=200,
        ),
    ),
}
"""Settings by paper."""
