"""Latencies printed in the papers, to compare models with. Data only.

This leaves out curves in figures, and ratios without a time.
"""

from enum import StrEnum

from pydantic import PositiveFloat, PositiveInt

from refrain.schemas.base import Frozen


class Measured(StrEnum):
    """Kind of a printed time."""

    DECODE_STEP = "decode_step"
    PREFILL = "prefill"
    """Recomputing the KV cache of unfinished samples."""
    GENERATION = "generation"
    """The generation stage of one RL step."""
    RL_STEP = "rl_step"
    SWITCH = "switch"
    """A change of the TP degree during generation, or one part of it."""


class Printed(Frozen):
    """One printed time. A field is None if the source does not give it."""

    source: str
    """Paper and section or figure."""
    what: Measured
    model: str
    hardware: str
    seconds: PositiveFloat
    num_gpus: PositiveInt = 8
    tp_degree: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    """Sequences on all GPUs together."""
    context_tokens_each: PositiveInt | None = None
    max_response_tokens: PositiveInt | None = None
    is_upper_bound: bool = False
    note: str = ""


def _figure_4(tp_degree: int, global_batch: int, milliseconds: float) -> Printed:
    return Printed(
        source="PAT 3.1, figure 4",
        what=Measured.DECODE_STEP,
        model="LLaMA3.1-8B",
        hardware="A40",
        seconds=milliseconds * 1e-3,
        tp_degree=tp_degree,
        global_batch=global_batch,
        note="hardware not stated; that of 2.3 is assumed, as 15 ms exclude an H100",
    )


def _step(model: str, max_response_k: int, what: Measured, seconds: float, note: str) -> Printed:
    return Printed(
        source="PAT 5.3, figure 11c",
        what=what,
        model=model,
        hardware="H100",
        seconds=seconds,
        max_response_tokens=max_response_k * 1024,
        note=note,
    )


def _switch(what: str, seconds: float, *, recompute: bool = False) -> Printed:
    return Printed(
        source="PAT 5.4, figure 12",
        what=Measured.PREFILL if recompute else Measured.SWITCH,
        model="LLaMA3.1-8B",
        hardware="A40",
        seconds=seconds,
        tp_degree=8,
        global_batch=9,
        context_tokens_each=12 * 1024,
        note=f"TP 2 to 8: {what}",
    )


_BASELINE = "static TP, the best of the feasible ones"
PRINTED = (
    _figure_4(2, 1, 15.37),
    _figure_4(8, 1, 9.64),
    _figure_4(2, 128, 24.41),
    _figure_4(8, 128, 30.87),
    _switch("full KV recomputation, naive restart", 19.01, recompute=True),
    _switch("KV migration", 2.36),
    _switch("weight resharding", 1.03),
    _switch("weight reloading, naive restart", 7.47),
    _switch("CUDA graphs of small batches", 0.73),
    _switch("all CUDA graphs, naive restart", 3.59),
    _switch("everything", 5.52),
    _switch("everything, naive restart", 58.98),
    _step("LLaMA3.1-8B", 24, Measured.GENERATION, 134.3, _BASELINE),
    _step("LLaMA3.1-8B", 24, Measured.GENERATION, 87.9, "PAT"),
    _step("LLaMA3.1-8B", 24, Measured.RL_STEP, 172.5, _BASELINE),
    _step("LLaMA3.1-8B", 24, Measured.RL_STEP, 125.6, "PAT"),
    _step("Qwen3-14B", 16, Measured.GENERATION, 133.9, _BASELINE),
    _step("Qwen3-14B", 16, Measured.GENERATION, 91.1, "PAT"),
    Printed(
        source="SpecActor 5.1, Baselines",
        what=Measured.DECODE_STEP,
        model="Qwen2.5-32B",
        hardware="H800",
        seconds=13e-3,
        num_gpus=4,
        tp_degree=4,
        global_batch=1,
        is_upper_bound=True,
        note='hardware: "Hopper (80 GB)" with 400 GB/s NVLink',
    ),
)

PRINTED_TFLOPS_PER_GPU = {"aligned": 13.71, "tail": 0.11}
"""PAT 2.3: LLaMA3.1-8B, 8 A40, batch 128, responses up to 16K. "aligned": all samples run. "tail":
one sample runs."""
