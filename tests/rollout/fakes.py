"""A fake engine in memory, and helpers that run stages on a coordinator with such engines."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.interface import EngineDied, EngineEvents, EngineGone, WeightSyncError
from refrain.schemas.counts import DraftingCounts, KVCounts
from refrain.schemas.rollout import (
    DraftProgress,
    DraftSetting,
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    SavedKV,
    Split,
    VersionSpan,
)
from refrain.schemas.weights import PolicyWeights


def request(name: str, num_tokens: int, sample_index: int = 0, step: int = 1) -> RolloutRequest:
    """Return a request whose response will have `num_tokens` tokens."""
    id = RequestId(Split.TRAIN, step, name, sample_index)
    return RolloutRequest(id, (1, 2, 3), sample_key=hash(name), max_response_tokens=num_tokens)


def weights(version: int = 0) -> PolicyWeights:
    return PolicyWeights(version, b"", ())


SPEEDS = {"fast": 3, "slow": 1}
"""Tokens per tick, by drafter."""
PLACE_S = 0.005
"""Seconds until a restart fails because there is no place for the engine."""
FAST, SLOW = DraftSetting("fast", 3), DraftSetting("slow", 1)


def token_at(r: RolloutRequest, position: int, version: int | str) -> int:
    """Return the token that an engine with this policy version samples at `position`."""
    text = f"{r.sample_key}/{position}/{version}".encode()
    return hashlib.blake2b(text, digest_size=2).digest()[0]


class FakeEngine:
    """Generates a token per running request and tick, or more with a drafter.

    Each token is a hash of (sample key, position, policy version, salt). Withdrawn requests come
    back without their drafting setting.

    `die_at_tick`: kills the engine once. `dies_in`: the first call of this method finds the engine
    dead. `wrong`: weight syncs fail. `late`: a request that is to be withdrawn has just finished.
    `copy_s`, `submit_s`: seconds to copy requests or to save them ahead, and to take requests.

    A parked engine can only load weights, and not even that if it `loses_weights`. It may wake
    only when all engines `on_same_gpus` have released their memory. A sleeping engine has neither
    memory nor weights. The path of saved keys and values names the request and its tokens.
    """

    def __init__(
        self,
        index: int,
        die_at_tick: int | None = None,
        wrong: bool = False,
        dies_in: str | None = None,
        late: bool = False,
        salt: str = "",
        sync_s: float = 0.0,
        tp_degree: int = 1,
        wake_s: float = 0.0,
        loses_weights: bool = False,
        node_id: str | None = None,
        copy_s: float = 0.0,
        submit_s: float = 0.0,
    ) -> None:
        self.index = index
        self.node_id = node_id
        self.tp_degree = tp_degree
        self.wake_s = wake_s
        self.loses_weights = loses_weights
        self.on_same_gpus: Sequence[FakeEngine] = ()
        self.parked = False
        self.calls: list[str] = []
        self.dies_in = dies_in
        self.die_at_tick = die_at_tick
        self.always_dies = False
        self.wrong = wrong
        self.late = late
        self.has_place = True
        """Whether the engine can be restarted."""
        self.num_refused = 0
        self.salt = salt
        self.sync_s = sync_s
        self.num_starts = 0
        self.holds_memory = False
        """Whether processes of the engine, dead or alive, hold memory of their GPUs."""
        self.running: dict[RequestId, tuple[RolloutRequest, list[int]]] = {}
        self.settings: dict[RequestId, DraftSetting | None] = {}
        self.finished: list[Rollout] = []
        self.version: int | None = None
        self.tick = 0
        self.submitted: list[RolloutRequest] = []
        self.redrafted: list[dict[RequestId, DraftSetting]] = []
        self.withdrawn: list[RolloutRequest] = []
        self.kv_counts = KVCounts()
        self.copy_s, self.submit_s = copy_s, submit_s
        self.saved_ahead: list[RequestId] = []
        self.expected: list[str] = []
        """Paths of the saved keys and values that this engine is prepared to load."""

    async def start(self) -> None:
        if not self.has_place:
            self.num_refused += 1
            await asyncio.sleep(PLACE_S)
            raise EngineGone(self.index, "no room")
        assert not self.holds_memory, "processes of the dead engine still hold memory"
        self._take_memory()
        self.num_starts += 1
        self.dies_in = None if self.dies_in == "dead" else self.dies_in
        self.running, self.finished, self.version, self.tick = {}, [], None, 0
        self.parked = False

    def _meet_death(self, method: str) -> None:
        if self.dies_in in (method, "dead"):
            self.die()
            raise EngineDied(self.index, f"killed in {method}")

    def die(self) -> None:
        """Fail every call from now on, until a restart. The processes keep their memory."""
        self.dies_in, self.running = "dead", {}

    async def kill(self) -> None:
        self.dies_in, self.running = "dead", {}
        await asyncio.sleep(self.wake_s)
        self.holds_memory = False

    def _take_memory(self) -> None:
        holders = [other.index for other in self.on_same_gpus if other.holds_memory]
        assert not holders, f"engine {self.index} takes GPUs that {holders} still hold"
        self.holds_memory = True

    def lose_node(self) -> None:
        self.die()
        self.has_place = False

    def _call(self, method: str) -> None:
        self._meet_death(method)
        parked = ("load_weights", "wake", "sleep", "expect_kv")
        assert not self.parked or method in parked, f"{method} while parked"
        self.calls.append(method)

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._call("submit")
        assert self.version is not None
        await self._spend(self.submit_s / 2)
        for r in requests:
            assert r.id not in self.running
            assert r.kv is None or r.kv.path == self._kv_of(r).path
            self.submitted.append(r)
            self.running[r.id] = (r, list(r.generated.token_ids) if r.generated else [])
            self.settings[r.id] = r.drafting
        await self._spend(self.submit_s / 2)

    async def _spend(self, seconds: float) -> None:
        """Take this time, in which the engine may die."""
        if seconds:
            await asyncio.sleep(seconds)
            self._meet_death("after")

    async def withdraw(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        self._call("withdraw")
        for id in ids:
            self._grow(id)  # The step in progress still completes.
            while self.late and id in self.running:
                self._grow(id)
        given = self._given(ids)
        for r in given:
            del self.running[r.id]
        if keep_kv:
            given = [replace(r, kv=self._kv_of(r)) for r in given]
        self.withdrawn += given
        return given

    async def precopy(self, ids: Sequence[RequestId]) -> SavedKV | None:
        self._call("precopy")
        await asyncio.sleep(self.copy_s)
        self._meet_death("after")
        here = [self.running[id] for id in ids if id in self.running]
        self.saved_ahead += [r.id for r, tokens in here if tokens]
        num_tokens = sum(len(r.prompt_token_ids) + len(tokens) for r, tokens in here)
        return SavedKV(f"{self.index}", num_tokens, self.tp_degree) if here else None

    async def expect_kv(self, saved: Sequence[SavedKV]) -> None:
        self._call("expect_kv")
        assert self.parked
        self.expected += [one.path for one in saved]

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        self._call("copy")
        await self._spend(self.copy_s / 2)
        given = self._given(ids)
        await self._spend(self.copy_s / 2)
        return [replace(r, kv=self._kv_of(r)) for r in given] if keep_kv else given

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        self._call("redraft")
        self.redrafted.append(dict(settings))
        self.settings |= {id: s for id, s in settings.items() if id in self.running}

    async def load_weights(self, new: PolicyWeights) -> float:
        self._call("load_weights")
        assert not self.running
        assert not (self.parked and self.loses_weights)
        if self.wrong:
            raise WeightSyncError(f"engine {self.index} differs")
        await asyncio.sleep(self.sync_s)
        self._meet_death("after")
        self.version = new.policy_version
        return 0.0

    async def park(self) -> None:
        self._call("park")
        assert not self.running
        await asyncio.sleep(self.wake_s)
        self._meet_death("after")
        self.parked, self.holds_memory = True, False
        if self.loses_weights:
            self.version = None

    async def sleep(self) -> None:
        self._call("sleep")
        assert not self.running
        await asyncio.sleep(self.wake_s)
        self._meet_death("after")
        self.parked, self.holds_memory, self.version = True, False, None

    async def wake(self) -> bool:
        self._call("wake")
        assert self.parked
        self._take_memory()
        await asyncio.sleep(self.wake_s)
        self._meet_death("after")
        self.parked = False
        return self.version is not None

    async def next_events(self) -> EngineEvents:
        """Return the next events. Wait while there are no requests."""
        await self._next_tick()
        while not (self.running or self.finished):
            await self._next_tick()
        for id in list(self.running):
            self._grow(id)
        finished, self.finished = self.finished, []
        progress = {id: len(tokens) for id, (_, tokens) in self.running.items()}
        return EngineEvents(tuple(finished), progress, self._drafting())

    async def _next_tick(self) -> None:
        await asyncio.sleep(0.001)
        self._meet_death("next_events")
        self.tick += 1
        if self.die_at_tick == self.tick and (self.num_starts == 1 or self.always_dies):
            self.die()
            raise EngineDied(self.index, "killed by the test")

    async def take_drafting_counts(self) -> DraftingCounts:
        self._meet_death("take_drafting_counts")
        assert not self.parked
        return DraftingCounts(num_steps=self.tick, draft_s=0.5)

    async def take_kv_counts(self) -> KVCounts:
        self._meet_death("take_kv_counts")
        counts, self.kv_counts = self.kv_counts, KVCounts()
        return counts

    async def shutdown(self) -> None:
        self.running = {}

    def _given(self, ids: Sequence[RequestId]) -> list[RolloutRequest]:
        found = [self.running[id] for id in ids if id in self.running]
        return [replace(r, generated=self._generated(r, t), drafting=None) for r, t in found]

    def _kv_of(self, r: RolloutRequest) -> SavedKV:
        assert r.generated is not None
        num_tokens = len(r.prompt_token_ids) + len(r.generated.token_ids) - 1
        return SavedKV(f"{r.id}/{num_tokens}/{self.version}", num_tokens, self.tp_degree)

    def _grow(self, id: RequestId) -> None:
        """Generate the tokens of one tick."""
        if id not in self.running:
            return
        r, tokens = self.running[id]
        setting = self.settings[id]
        for _ in range(SPEEDS[setting.drafter] if setting else 1):
            tokens.append(token_at(r, len(tokens), f"{self.version}{self.salt}"))
            if len(tokens) == r.max_response_tokens:
                del self.running[id]
                generated = self._generated(r, tokens)
                rollout = Rollout(r, generated, FinishReason.STOP, self.index, 0.0, 1.0)
                self.finished.append(rollout)
                return

    def _drafting(self) -> dict[RequestId, DraftProgress]:
        """Return the progress of every request that ever drafted here, more than the caller needs:
        the coordinator must drop the rest."""
        return {id: DraftProgress(s) for id, s in self.settings.items() if s}

    def _generated(self, r: RolloutRequest, tokens: list[int]) -> Generated:
        assert self.version is not None
        before = r.generated.spans if r.generated else ()
        new = len(tokens) - sum(span.num_tokens for span in before)
        spans = (*before, VersionSpan(self.version, new)) if new else before
        return Generated(list(tokens), [-1.0] * len(tokens), spans)


class Recorder:
    """Runs stages on a coordinator and records which rollouts finish in each."""

    def __init__(self, engines, max_restarts=3, lost=(), **pools):
        """`lost`: indexes of deliveries that are lost, because their engine dies before the store
        fetches them."""
        self.said = []
        self.coordinator = Coordinator(
            engines, max_restarts=max_restarts, log=self.said.append, **pools
        )
        self.finished = {}
        self.order = []
        self.engines = {engine.index: engine for engine in engines}
        self.lost = lost
        self.num_deliveries = 0

    def roll_out(self, step, assignments, **options):
        self.finished[step] = []

        async def keep(rollouts):
            self.num_deliveries += 1
            if self.num_deliveries - 1 in self.lost:
                self.engines[rollouts[0].engine].die()
                raise EngineDied(rollouts[0].engine, "its rollouts were lost")
            self.finished[step].extend(rollouts)

        future = self.coordinator.roll_out(
            assignments, keep, weights=weights(step - 1), label=f"train/{step}", **options
        )
        future.add_done_callback(lambda _: self.order.append(step))
        return future

    async def roll_out_all(self, works, policies, min_rollouts, **options):
        """Queue these stages at once and return their outcomes."""
        stages = [
            self.roll_out(step, own, policies=policies, min_rollouts=min_rollouts, **options)
            for step, own in enumerate(works, 1)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*stages), 20)
        self.timeline = self.coordinator.timeline(-1.0, 20.0)
        return outcomes

    def finished_once(self, works):
        """Return all finished rollouts. Assert that each request finished once."""
        finished = [r for rollouts in self.finished.values() for r in rollouts]
        assert Counter((r.request.origin_step, r.request.id.prompt_key) for r in finished) == {
            (step, r.id.prompt_key): 1 for step, own in enumerate(works, 1) for _, r in own
        }
        return finished

    def tokens(self):
        return {
            r.request.id: tuple(r.generated.token_ids)
            for rollouts in self.finished.values()
            for r in rollouts
        }

    def versions(self, step):
        return {s.policy_version for r in self.finished[step] for s in r.generated.spans}


def work(step, lengths, num_engines=2):
    """Return one request for each length, assigned to the engines in turn."""
    return [
        (i % num_engines, request(f"p{i}", length, step=step)) for i, length in enumerate(lengths)
    ]


class MoveAt:
    """Asks for a move of the named prompt at every decision from `num_tokens` tokens on."""

    def __init__(self, prompt, num_tokens, make):
        self.prompt, self.num_tokens, self.make = prompt, num_tokens, make
        self.views = []

    def decide(self, view):
        self.views.append(view)
        return [
            self.make(id)
            for engine in view.engines
            for id, n in engine.progress.items()
            if id.prompt_key == self.prompt and n >= self.num_tokens
        ]
