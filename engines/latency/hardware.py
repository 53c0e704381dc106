"""GPUs by data sheet, with the share of each peak that a rollout engine reaches.

Peaks are the vendor's: dense bf16 tensor-core FLOPs, HBM or GDDR bandwidth, and the link of one GPU
in one direction (half of NVLink's bidirectional figure). Shares, hop time and step overhead are on
no data sheet. Those of the A40 are fitted by hand, to round values, to the four latencies of PAT
figure 4. The Hopper presets keep its memory share, compute share and step overhead. They assume
NVLink with small all-reduces of about 10 us among 8 GPUs, and large ones at 0.75 of the link.
"""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from refrain.schemas.base import Frozen

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Hardware(Frozen):
    """One node of identical GPUs."""

    name: str
    memory_bytes: PositiveFloat
    """Memory of one GPU."""
    memory_bytes_per_s: PositiveFloat
    """Peak bandwidth of one GPU's memory."""
    flops_per_s: PositiveFloat
    """Peak of one GPU: dense, 16-bit."""
    link_bytes_per_s: PositiveFloat
    """Peak bandwidth of one GPU to the others of its node, in one direction."""
    host_bytes_per_s: PositiveFloat = 50e9
    """Bandwidth between one GPU and page-locked host memory, in one direction. The default is
    assumed: PCIe 5.0 x16 reaches this of its 63 GB/s."""
    gpus_per_node: PositiveInt = 8
    """Largest TP degree, because TP stays inside a node (PAT 4.1)."""
    memory_share: Share = 0.85
    """Share of the peak memory bandwidth that decoding reaches."""
    flops_share: Share = 0.6
    """Share of the peak FLOPs that large matrix products reach."""
    link_share: Share = 0.75
    """Share of the peak link bandwidth that a large all-reduce reaches."""
    hop_s: NonNegativeFloat = 0.7e-6
    """Seconds of one of the 2 (n - 1) hops of an all-reduce among n GPUs."""
    step_overhead_s: NonNegativeFloat = 2e-3
    """Fixed seconds of every step: scheduling, launches, small kernels, sampling."""
    layer_s: NonNegativeFloat = 0.0
    """Further fixed seconds of a step for each layer: small kernels, launches."""
    request_s: NonNegativeFloat = 0.0
    """Seconds of the host for each request in a decoding step: scheduling, sampling, detokenizing.
    They depend on the engine, so a profile measures them, and all presets leave them at 0."""
    collective_s: NonNegativeFloat = 0.0
    """Least seconds of an all-reduce, however small."""


def _hopper(name: str, memory_gb: float, tb_per_s: float, link_gb_per_s: float) -> Hardware:
    return Hardware(
        name=name,
        memory_bytes=memory_gb * 1e9,
        memory_bytes_per_s=tb_per_s * 1e12,
        flops_per_s=989e12,
        link_bytes_per_s=link_gb_per_s * 1e9,
    )


A40 = Hardware(
    name="A40",
    memory_bytes=48e9,
    memory_bytes_per_s=696e9,
    flops_per_s=149.7e12,
    link_bytes_per_s=31.5e9,  # PCIe 4.0 x16, PAT's servers; not the optional NVLink bridge
    host_bytes_per_s=25e9,  # likewise
    link_share=0.28,
    hop_s=5e-6,
)
H100 = _hopper("H100", 80, 3.35, 450)
"""SXM5, as in PAT."""
H800 = _hopper("H800", 80, 3.35, 200)
"""SXM5 with NVLink of 400 GB/s: the "Hopper (80 GB)" of SpecActor 5.1."""
H200 = _hopper("H200", 141, 4.8, 450)
"""SXM5."""

HARDWARE = {hardware.name: hardware for hardware in (A40, H100, H800, H200)}
"""Presets by name."""
