"""Whole training steps around simulated rollouts (SpecActor 5.2), and how much of what follows a
rollout can be done while it lasts (RLHFuse, their baseline). Pure.

    in turn    rollout ─► prepare, learn                                veRL, SpecActor
    overlap    rollout
               └ engines that have nothing left prepare and learn from groups that are finished
                                                           ─► what is left, on all engines

What follows takes as long as in veRL, whose rollouts are `ROLLOUT_SHARE` of its steps.

Deviations: overlap is what nobody exceeds. Every engine has the trainer's memory beside its own and
takes that work up and lays it down at once; gradients add up, and the weights change at the end.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.papers.specactor import BASELINE, SpeculationRow
from engines.simulate.cluster import Simulation
from engines.simulate.pace import Interval

ROLLOUT_SHARE = 0.75
"""Share of a step of veRL: "70-80 %" (2.1)."""


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A variant's step with all that follows its rollout."""

    variant: str
    speedup: float
    """Over veRL, in turn."""
    overlapping_speedup: float
    """Over veRL in turn, where what can be is done while the rollout lasts."""


def whole_steps(rows: Sequence[SpeculationRow]) -> Iterator[WholeStep]:
    """Steps of every variant, beside veRL. `rows`: of one trace."""
    (rollout_s,) = (row.step_s for row in rows if row.variant.name == BASELINE)
    follows_s = rest_s(rollout_s)
    before_s = rollout_s + follows_s
    for row in rows:
        whole_s = row.step_s + follows_s
        overlapping_s = whole_s - overlapped_s(row.simulation, follows_s)
        yield WholeStep(row.variant.name, before_s / whole_s, before_s / overlapping_s)


def rest_s(rollout_s: float) -> float:
    """Seconds of preparing and learning, on all GPUs, after such a rollout of veRL's."""
    return rollout_s * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE


def overlapped_s(simulation: Simulation, rest_s: float) -> float:
    """Seconds by which the rest is shorter after this rollout, at most: what is done meanwhile."""
    num_engines = len(simulation.timelines)
    tokens_at = _finished_groups(simulation)
    num_tokens = sum(tokens_at.values())
    changes = _idle_changes(simulation.timelines)
    done = ready = last_s = 0.0
    idle = num_engines
    for at_s in sorted({*changes, *tokens_at, simulation.step.step_s}):
        done = min(ready, done + idle * (at_s - last_s))
        ready += num_engines * rest_s * tokens_at.get(at_s, 0) / num_tokens
        idle, last_s = idle + changes.get(at_s, 0), at_s
    return done / num_engines


def _finished_groups(simulation: Simulation) -> dict[float, int]:
    """Tokens of the groups that are finished at each moment: an advantage is one of a group."""
    ends_s: dict[str, float] = {}
    tokens: Counter[str] = Counter()
    for rollout in simulation.rollouts:
        key = rollout.id.prompt_key
        ends_s[key] = max(rollout.finished_s, ends_s.get(key, 0.0))
        tokens[key] += rollout.num_tokens
    found: dict[float, int] = defaultdict(int)
    for key, end_s in ends_s.items():
        found[end_s] += tokens[key]
    return found


def _idle_changes(timelines: Sequence[Sequence[Interval]]) -> dict[float, int]:
    """Changes in the number of engines that have nothing to do, by moment."""
    changes: dict[float, int] = defaultdict(int)
    for intervals in timelines:
        for at in intervals:
            changes[at.start_s] -= 1
            changes[at.end_s] += 1
    return changes
