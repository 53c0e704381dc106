"""Layouts of several TP degrees at once, such as TP 4 + 2 + 2 on 8 GPUs: the most that they could
give. Pure.

Long responses are on high degrees and short ones on low ones: so many on each that all end alike.
In place of engines there is the latency model alone:

    known     every response's length is known; at each of many moments whatever is forecast to end
              the soonest is taken, layout and deal, and switches take no time
    history   the same by what a run knows of lengths (`engines.pat.remaining`)
    ranked    prompts by their expected lengths, the longest on the highest degree, and no switch;
              how many go there is the best in hindsight

each among layouts of one degree, and among all. Degrees are those that PAT switches among.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean

from benchmarks.papers.pat import TP_DEGREES
from benchmarks.papers.scene import Scene
from benchmarks.papers.switching import PRINTED_BASE, Steps
from benchmarks.papers.windows import TYPICAL
from engines.balance import longest_first
from engines.control.controller import SCENARIOS
from engines.latency.forecast import Unfinished, fields_of, finish_s, forecast
from engines.latency.interface import Latency
from engines.pat.remaining import Remaining
from engines.simulate.cluster import step_requests
from schemas.rollout import RequestId

NUM_STEPS = 3
"""Steps of a point that are looked at."""
NUM_MOMENTS = 40
"""Moments of a step at which layout and deal may change."""
Layout = tuple[int, ...]
"""TP degree of each engine, the highest first."""
Tokens = Mapping[RequestId, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedResponse(Unfinished):
    """A response that is told from others."""

    id: RequestId


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine with its responses."""

    tp_degree: int
    responses: tuple[NamedResponse, ...]

    def end_s(self, latency: Latency, remaining: Tokens | None = None) -> float:
        """Seconds until it has nothing left. `remaining`: tokens to come, other than they are."""
        own = self.responses
        if remaining:
            own = tuple(replace(one, remaining_tokens=remaining[one.id]) for one in own)
        return finish_s(latency, self.tp_degree, own)

    def after(self, latency: Latency, seconds: float) -> "Placed":
        if not self.responses:
            return self
        course = forecast(latency, self.tp_degree, fields_of(self.responses))
        return replace(self, responses=tuple(course.after(self.responses, seconds)))


@dataclass(frozen=True, slots=True)
class UnevenRow:
    """Layouts of one degree beside all, by what is known."""

    point: str
    drafts: bool
    """Whether responses are drafted for from history."""
    uneven: str
    even_s: float
    uneven_s: float

    @property
    def over_even(self) -> float:
        return self.even_s / self.uneven_s


def study_uneven(steps: Steps) -> Iterator[UnevenRow]:
    """A point's rows, on the first of its steps. Layouts are of one node."""
    point, latency = steps.machine.point, steps.machine.latency
    scenes = [steps.scene(step, PRINTED_BASE) for step in steps.steps[:NUM_STEPS]]
    found = list(layouts(8, [tp for tp in TP_DEGREES if tp >= PRINTED_BASE]))
    even = [layout for layout in found if len(set(layout)) == 1]
    for drafts in (False, True):
        known = [replace(scene, exact=True).remaining() for scene in scenes]
        history = [scene.remaining() for scene in scenes]
        begun = [list(_responses(scene, drafts)) for scene in scenes]
        for name, remaining in (("known", known), ("history", history)):
            pairs = list(zip(begun, remaining, strict=True))
            seconds = (fmean(play_s(latency, of, *p) for p in pairs) for of in (even, found))
            yield UnevenRow(point.name, drafts, name, *seconds)
        pairs = list(zip(begun, history, strict=True))
        uneven = [layout for layout in found if layout not in even]
        seconds = (fmean(ranked_s(latency, of, *p) for p in pairs) for of in (even, uneven))
        yield UnevenRow(point.name, drafts, "ranked", *seconds)


def layouts(num_gpus: int, degrees: Sequence[int]) -> Iterator[Layout]:
    """All that fill so many GPUs."""
    if not num_gpus:
        yield ()
    for degree in (degree for degree in degrees if degree <= num_gpus):
        lower = [other for other in degrees if other <= degree]
        yield from ((degree, *rest) for rest in layouts(num_gpus - degree, lower))


def deal_uneven(
    latency: Latency,
    layout: Layout,
    responses: Sequence[NamedResponse],
    rank: Tokens,
    remaining: Tokens | None = None,
) -> list[Placed]:
    """Responses by rank, so many to the highest degree that it ends when the others do, and so on;
    within a degree each to the engine with the least."""
    (degree, own), *others = [(tp, len(list(of))) for tp, of in groupby(layout)]
    ranked = sorted(responses, key=lambda one: rank[one.id], reverse=True)
    rest = layout[own:]

    def dealt(num: int) -> tuple[list[Placed], list[Placed]]:
        shares = longest_first(ranked[:num], lambda one: rank[one.id], own)
        high = [Placed(degree, tuple(share)) for share in shares]
        low = deal_uneven(latency, rest, ranked[num:], rank, remaining) if others else []
        return high, low

    if not others:
        return dealt(len(ranked))[0]
    fewest, most, best, best_s = 0, len(ranked), [], float("inf")
    while fewest <= most:
        num = (fewest + most) // 2
        high, low = dealt(num)
        high_s, low_s = (end_s(latency, of, remaining) for of in (high, low))
        if max(high_s, low_s) < best_s:
            best, best_s = [*high, *low], max(high_s, low_s)
        fewest, most = (num + 1, most) if high_s < low_s else (fewest, num - 1)
    return best


def end_s(latency: Latency, placed: Sequence[Placed], remaining: Tokens | None = None) -> float:
    return max(one.end_s(latency, remaining) for one in placed)


def play_s(
    latency: Latency,
    found: Sequence[Layout],
    responses: Sequence[NamedResponse],
    remaining: Remaining,
) -> float:
    """Seconds of a step whose layout and deal change as forecasts say, at no cost."""
    begun = {one.id: one.context_tokens for one in responses}

    def choose(left: Sequence[NamedResponse]) -> tuple[list[Placed], Sequence[Tokens]]:
        generated = {one.id: round(one.context_tokens - begun[one.id]) for one in left}
        estimates = [remaining.tokens(generated, at) for at in (0.0, *SCENARIOS)]
        rank = {id: fmean(of[id] for of in estimates) for id in generated}
        ways = [deal_uneven(latency, one, left, rank, estimates[0]) for one in found]
        best = min(ways, key=lambda way: fmean(end_s(latency, way, of) for of in estimates))
        return best, estimates

    placed, estimates = choose(responses)
    seconds, moment_s = 0.0, end_s(latency, placed, estimates[0]) / NUM_MOMENTS
    while (left_s := end_s(latency, placed)) > moment_s:
        seconds += moment_s
        placed = [one.after(latency, moment_s) for one in placed]
        other, estimates = choose([one for engine in placed for one in engine.responses])
        stays_s, other_s = (
            fmean(end_s(latency, way, of) for of in estimates) for way in (placed, other)
        )
        placed = other if other_s < stays_s else placed
    return seconds + left_s


def ranked_s(
    latency: Latency,
    found: Sequence[Layout],
    responses: Sequence[NamedResponse],
    remaining: Remaining,
) -> float:
    """Seconds of a step in the best of these layouts, with prompts ranked, split in hindsight."""
    generated = {one.id: 0 for one in responses}
    estimates = [remaining.tokens(generated, at) for at in (0.0, *SCENARIOS)]
    by_prompt: dict[str, list[float]] = {}
    for of in estimates:
        for id, tokens in of.items():
            by_prompt.setdefault(id.prompt_key, []).append(tokens)
    rank = {id: fmean(by_prompt[id.prompt_key]) for id in generated}
    return min(end_s(latency, deal_uneven(latency, one, responses, rank)) for one in found)


def _responses(scene: Scene, drafts: bool) -> Iterator[NamedResponse]:
    requests, lengths = step_requests(scene.rows, scene.rows.steps[0])
    tokens_per_pass, window = TYPICAL.speculation if drafts else (1.0, 0)
    for request in (request for group in requests.values() for request in group):
        yield NamedResponse(
            len(request.prompt_token_ids),
            lengths[request.id],
            tokens_per_pass,
            window,
            id=request.id,
        )
