"""Policy sets on the steps of a trace, as `refrain simulate` has them."""

from collections.abc import Sequence

from engines.latency.interface import Latency
from engines.simulate.cluster import PolicySet, compare_step
from engines.simulate.trace import Trace
from schemas.simulate import ClusterLayout, SimulatedStep


def compare(
    trace: Trace,
    cluster: ClusterLayout,
    latency: Latency,
    policy_sets: Sequence[PolicySet],
    steps: Sequence[int] | None = None,
    acceptance: float | None = None,
) -> list[SimulatedStep]:
    """Every policy set on every step (all of the trace's when None), steps outermost."""
    return [
        simulation.step
        for step in (trace.steps if steps is None else steps)
        for simulation in compare_step(trace, step, cluster, latency, policy_sets, acceptance)
    ]
