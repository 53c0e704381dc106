"""One queue of samples: an engine takes the next when it has room. Pure.

    waiting, longest expected first   | 16K 16K 9K ............... 300 200 |
    engine 0                            16K 16K               few at once: a token takes little time
    engine 1                                    9K 8K 8K ..
    engine 9                                                700 650 .. 200     as many as pay

An engine has room for a sample if, with it,

- its longest request still ends in the time that an engine should take (`step_end`),
- its KV cache holds the tokens that its requests will have, and
- it has a place for one more (`max_num_seqs`).

Expected lengths come from history and from siblings (`group_lengths`). A conversation that waits
for its environment counts as longer by the tokens that others gain meanwhile. Its context also has
the tokens that it observes, spread evenly over those that it samples. An empty engine takes
the longest waiting sample, then the longest that it has room for. It fills several places at once,
because a prefill holds up the whole batch.

A sample prefers the engine that has its prefix. The engine may take a sibling of its requests
before a longer sample if the prefill saved takes longer than the difference in length.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from refrain.engines.histopipe.engine_load import EngineLoad, StepLoad, WaitingSamples, peak_tokens
from refrain.engines.histopipe.group_lengths import GroupLengths
from refrain.engines.histopipe.step_end import StepPace, TokenTimes
from refrain.engines.latency.interface import Latency
from refrain.engines.rollout.moves import Close, EngineView, Migrate, RolloutView, Start
from refrain.schemas.rollout import RequestId, RolloutRequest

REFILL_SHARE = 1 / 16
"""Share of an engine's requests that must be free before it takes more."""
LATE_FACTOR = 1.25
"""An engine whose longest request is late runs so many beside it that a token takes so much longer
than alone."""
RELIEF_FACTOR = 2.0
"""A request moves to an empty engine if it gains so many times the prefill there."""
RELIEF_S = 1.0
"""Least seconds between two looks for such requests."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What engines can take."""

    latency: Latency
    times: TokenTimes
    tp_degree: int
    max_context_tokens: float
    """Tokens that an engine's KV cache holds."""


@dataclass(slots=True)
class _Known:
    """What a queue knows of its step."""

    lengths: GroupLengths
    number: int = -1
    """Number of the step. -1: not known yet."""
    prompts: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by key."""
    ends_s: dict[int, float] = field(default_factory=dict)
    """When each engine should have done its part."""

    def load(self, engine: int, before: "_Known | None") -> StepLoad:
        end_s = self.ends_s.get(engine, math.inf)
        carried = StepLoad(before.lengths, before.prompts, end_s) if before else None
        return StepLoad(self.lengths, self.prompts, end_s, carried)


class SampleQueue:
    """The policy of one step."""

    def __init__(
        self,
        lengths: GroupLengths,
        limits: EngineLimits,
        pace: StepPace,
        before: "SampleQueue | None" = None,
    ) -> None:
        """`before`: queue of the step before, some of whose samples may still run on engines that
        begin this step."""
        self._known = _Known(lengths)
        steps = [before._known, *before._earlier] if before and pace.staleness else []
        self._earlier = steps[: pace.staleness + 1]
        """The steps before, the last one first."""
        self._limits = limits
        self._pace = pace
        self._rollout_s: float | None = None
        self._tokens_per_s = 0.0
        """Tokens that a request gains in a second, with as many beside it as samples allow."""
        self._waiting: WaitingSamples | None = None
        self._num_waiting = 0
        self._num_finished = 0
        self._seen: dict[int, EngineView] = {}
        self._relieved_s = -math.inf

    def decide(self, view: RolloutView) -> Sequence[Start | Migrate | Close]:
        self._learn(view)
        num_unfinished = view.num_rollouts - view.num_finished
        if not view.waiting and 0 < num_unfinished <= view.num_deferrable:
            return [Close()]
        waiting = self._queue(view)
        changed = [e for e in view.engines if self._seen.get(e.engine) is not e]
        self._seen |= {engine.engine: engine for engine in changed}
        if not len(waiting):
            return self._relieve(view)
        loads = map(self._load, changed)
        moves: list[Start] = []
        # Those with the fewest requests take the longest samples.
        for load in sorted(loads, key=lambda load: (len(load), load.engine)):
            taken = self._take(load, waiting, view.now_s)
            moves += [Start(request.id, load.engine) for request in taken]
        self._num_waiting -= len(moves)
        return moves

    def _load(self, engine: EngineView) -> EngineLoad:
        index, before = engine.engine, [*self._earlier, None]
        earlier = {
            of.number: of.load(index, then)
            for of, then in (zip(self._earlier, before[1:], strict=True) if engine.earlier else ())
        }
        return EngineLoad(engine, self._known.load(index, before[0]), earlier)

    def _learn(self, view: RolloutView) -> None:
        """Take the lengths of finished siblings into account."""
        num_new = len(view.finished) - self._num_finished
        for id in islice(reversed(view.finished), num_new):
            if id.sample_index < 0:
                continue
            self._known.lengths.add(id.prompt_key, view.finished[id])
            if self._waiting:
                self._waiting.refresh(id.prompt_key)
        self._num_finished = len(view.finished)

    def _queue(self, view: RolloutView) -> WaitingSamples:
        """Return the waiting samples. Read them again if others were started, or came back."""
        if self._waiting is None or self._num_waiting != len(view.waiting):
            self._known.prompts |= {
                id.prompt_key: len(r.prompt_token_ids) for id, r in view.waiting.items()
            }
            if self._rollout_s is None:
                self._tokens_per_s = self._pace_of(view.waiting)
            lengths = self._known.lengths
            self._waiting = WaitingSamples(view.waiting, lengths, self._tokens_per_s)
            self._num_waiting = len(view.waiting)
        if self._rollout_s is None:
            self._known.number = max((id.step for id in view.waiting), default=-1)
            given = self._mean_given(view.waiting)
            rollout_s = self._pace.rollout_s(self._waiting.lengths(), given)
            self._rollout_s = rollout_s + self._waiting.longest_wait_s()
        return self._waiting

    def _mean_given(self, waiting: Mapping[RequestId, RolloutRequest]) -> float:
        """Return the mean tokens that a sample does not sample: its prompt, and what it has
        observed halfway to its end."""
        prompt = float(np.mean(list(self._known.prompts.values()) or [0.0]))
        observed = [self._known.lengths.observed_tokens(id.prompt_key) for id in waiting]
        return prompt + float(np.mean(observed or [0.0])) / 2

    def _pace_of(self, waiting: Mapping[RequestId, RolloutRequest]) -> float:
        """Return the tokens that a request gains in a second if the engines share the samples."""
        times, lengths = self._limits.times, self._known.lengths
        batch = min(times.max_num_seqs, len(waiting) / self._pace.num_engines)
        tokens = [lengths.tokens(id.prompt_key) for id in waiting]
        context = self._mean_given(waiting) + float(np.mean(tokens or [0.0])) / 2
        return 1.0 / times.token_s(batch, context)

    # Room

    def _take(
        self, load: EngineLoad, waiting: WaitingSamples, now_s: float
    ) -> list[RolloutRequest]:
        """Take what the engine has room for."""
        assert self._rollout_s is not None
        ends_s = self._known.ends_s
        if not len(load) or load.engine not in ends_s:
            load.step.end_s = ends_s[load.engine] = now_s + self._rollout_s
        taken: list[RolloutRequest] = []
        num_free = self._places(load, now_s) - len(load)
        if num_free < max(1.0, REFILL_SHARE * len(load)):
            return taken
        while len(waiting) and (key := self._next(load, waiting, now_s)):
            request = waiting.pop(key)
            load.add(request.id)
            taken.append(request)
        return taken

    def _places(self, load: EngineLoad, now_s: float) -> float:
        """Return how many requests the engine may have so that its longest ends in time."""
        times = self._limits.times
        if not load.longest:
            return times.max_num_seqs
        context = load.context_each()
        late_s = LATE_FACTOR * times.token_s(1, context)
        return times.batch_within(max(load.token_s(now_s), late_s), context)

    def _next(self, load: EngineLoad, waiting: WaitingSamples, now_s: float) -> str | None:
        """Return the group of the next sample, or None if there is no room."""
        longest = math.inf
        if len(load):
            if len(load) + 1 > self._places(load, now_s):
                return None
            token_s = self._limits.times.token_s(len(load) + 1, load.context_each())
            in_time = (self._known.ends_s[load.engine] - now_s) / token_s
            margin = self._known.lengths.margin
            waited = self._tokens_per_s * load.step.wait_s
            longest = max(load.step.longest / margin + waited, in_time / margin)
        found = waiting.longest(longest)
        if found is None:
            return None
        tokens, key = found
        key = self._sibling(load, waiting, tokens) or key
        return key if self._holds(load, key) else None

    def _sibling(self, load: EngineLoad, waiting: WaitingSamples, tokens: float) -> str | None:
        """Return a group whose prefix the engine has, if its samples are hardly shorter."""
        limits = self._limits
        token_s = limits.times.token_s(len(load) + 1, load.context_each())
        best, best_s = None, 0.0
        for key in load.groups:
            expected = waiting.expected(key)
            if expected is None or expected > tokens:
                continue
            prompt_tokens = self._known.prompts.get(key, 0)
            saved_s = limits.latency.prefill_s(limits.tp_degree, 1, prompt_tokens)
            gain_s = saved_s - (tokens - expected) * token_s
            if gain_s > best_s:
                best, best_s = key, gain_s
        return best

    def _holds(self, load: EngineLoad, prompt_key: str) -> bool:
        """Whether the KV cache holds one more sample of the group."""
        capacity = self._limits.max_context_tokens
        if capacity == math.inf or not len(load):
            return True
        lengths = self._known.lengths
        context = [*load.context, self._known.prompts[prompt_key]]
        remaining = [*load.remaining, lengths.tokens(prompt_key)]
        rates = [*load.rates, lengths.context_per_token(prompt_key)]
        return peak_tokens(context, remaining, rates) <= capacity

    # Empty engines

    def _relieve(self, view: RolloutView) -> list[Migrate]:
        """Return moves of the requests that would end last to engines that have none."""
        empty = [e.engine for e in view.engines if not (e.progress or e.earlier)]
        if not empty or view.now_s < self._relieved_s + RELIEF_S:
            return []
        self._relieved_s = view.now_s
        loads = [self._load(engine) for engine in view.engines if engine.progress]
        loads.sort(key=self._seconds, reverse=True)
        moved = [ids for load in loads if (ids := self._worth_moving(load))]
        pairs = zip(reversed(empty), moved, strict=False)
        return [Migrate(id, engine) for engine, ids in pairs for id in ids]

    def _seconds(self, load: EngineLoad) -> float:
        """Return the seconds until the engine's longest request ends, at most."""
        return load.longest * self._limits.times.token_s(len(load), load.context_each())

    def _worth_moving(self, load: EngineLoad) -> list[RequestId]:
        """Return the longest requests of an engine if they would end so much earlier on an empty
        one that a prefill pays."""
        num = sum(remaining > load.longest / 2 for remaining in load.remaining)
        num = min(num, len(load) // 2, len(load.ids))
        if not num:
            return []
        limits, context = self._limits, load.context_each()
        own = range(len(load.ids))
        longest = sorted(own, key=load.remaining.__getitem__, reverse=True)[:num]
        gain_s = limits.times.token_s(len(load), context) - limits.times.token_s(num, context)
        moved = float(np.mean([load.context[place] for place in longest]))
        prefill_s = limits.latency.prefill_s(limits.tp_degree, num, moved)
        pays = gain_s * load.longest >= RELIEF_FACTOR * prefill_s
        return [load.ids[place] for place in longest] if pays else []
