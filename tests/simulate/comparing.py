"""Helper that simulates the steps of a trace under policy sets, as `refrain simulate` does."""

from collections.abc import Sequence

from refrain.engines.latency.interface import Latency
from refrain.engines.simulate.cluster import PolicySet, compare_step
from refrain.engines.simulate.trace import Trace
from refrain.schemas.simulate import ClusterLayout, SimulatedStep


def compare(
    trace: Trace,
    cluster: ClusterLayout,
    latency: Latency,
    policy_sets: Sequence[PolicySet],
    steps: Sequence[int] | None = None,
    acceptance: float | None = None,
) -> list[SimulatedStep]:
    """Return each policy set's result on each step, grouped by step. None: all steps."""
    return [
        simulation.step
        for step in (trace.steps if steps is None else steps)
        for simulation in compare_step(trace, step, cluster, latency, policy_sets, acceptance)
    ]
