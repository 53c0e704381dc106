"""Conversations in an engine, without vLLM: turns, limits, and requests that move while they wait.

The engines here sample token n of a request as a hash of its key and n, as exact sampling does. The
environment's answer is a function of the turn's tokens.
"""

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.environment.client import TurnAnswer
from refrain.engines.inference.engine.conversations import (
    NOTHING,
    Conversations,
    TurnLimits,
    num_in_turn,
    waits,
)
from refrain.schemas.rollout import (
    FinishReason,
    Generated,
    RequestId,
    RolloutRequest,
    Split,
    Turn,
    VersionSpan,
)

END = 0
"""Token that ends a turn: one of `NUM_TOKENS`."""
NUM_TOKENS = 5


def number(*of: object, below: int) -> int:
    digest = blake2b(repr(of).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % below


@dataclass
class HashedEnvironments:
    """Answers by the turn's tokens: some end the conversation."""

    max_observed: int = 3
    stable: bool = True
    """Whether the same turn always gets the same answer."""
    num_answers: int = 0
    ends: list[FinishReason] = field(default_factory=list)
    failing: frozenset[int] = frozenset()
    """Turns at which the environment fails."""
    fails_to_end: bool = False

    async def answer(self, request: RolloutRequest) -> TurnAnswer:
        assert request.generated is not None
        self.num_answers += 1
        tokens = tuple(request.generated.token_ids)
        turn = len(request.generated.turns)
        await asyncio.sleep(0)
        if turn in self.failing:
            return TurnAnswer(None, score=0.0, failed=True)
        of = (tokens, 0 if self.stable else self.num_answers)
        if number("ends", *of, below=4) == 0:
            return TurnAnswer(None, score=number("score", *of, below=10) / 10)
        num_observed = number("length", *of, below=self.max_observed + 1)
        observed = [100 + number("token", *of, at, below=9) for at in range(num_observed)]
        return TurnAnswer(observed, score=0.5, num_calls=1, waited_s=0.25)

    async def end(self, request: RolloutRequest, reason: FinishReason) -> TurnAnswer:
        assert waits(request.generated)
        self.ends.append(reason)
        await asyncio.sleep(0)
        return TurnAnswer(None, -1.0, failed=self.fails_to_end)


@dataclass
class HashedEngine:
    """Samples one token of each of its requests at a time."""

    environments: HashedEnvironments
    limits: TurnLimits
    running: dict[RequestId, RolloutRequest] = field(default_factory=dict)
    finished: list[tuple[RolloutRequest, FinishReason]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conversations = Conversations(
            self.environments, self.limits, self._go_on, self._finish, self.errors.append
        )

    async def _go_on(self, request: RolloutRequest) -> None:
        self.running[request.id] = request

    def _finish(self, request: RolloutRequest, reason: FinishReason) -> None:
        self.finished.append((request, reason))

    def submit(self, request: RolloutRequest) -> None:
        if waits(request.generated):
            self.conversations.ask(request)
        else:
            self.running[request.id] = request

    def step(self) -> None:
        for request in list(self.running.values()):
            generated = request.generated or NOTHING
            token = number(request.sample_key, len(generated.token_ids), below=NUM_TOKENS)
            allowed = self.limits.max_tokens(request)
            generated = replace(
                generated,
                token_ids=array("i", [*generated.token_ids, token]),
                inference_logprobs=array("f", [*generated.inference_logprobs, -1.0]),
                spans=(VersionSpan(0, len(generated.inference_logprobs) + 1),),
                num_draft_tokens=generated.num_draft_tokens + 2,
                num_accepted_tokens=generated.num_accepted_tokens + token % 2,
            )
            self.running[request.id] = replace(request, generated=generated)
            if token == END or allowed == 1:
                reason = FinishReason.STOP if token == END else FinishReason.LENGTH
                self.conversations.turn_ended(self.running.pop(request.id), reason)

    async def withdraw(self, id: RequestId) -> RolloutRequest | None:
        if waiting := self.conversations.withdraw(id):
            return waiting
        await self.conversations.ended([id])
        return self.running.pop(id, None)


def request_of(sample: int, max_tokens: int = 40) -> RolloutRequest:
    return RolloutRequest(RequestId(Split.TRAIN, 1, "p", sample), (1, 2), sample, max_tokens)


async def converse(
    engines: Sequence[HashedEngine], moves: Sequence[tuple[int, int]], num_samples: int = 6
) -> dict[RequestId, tuple[Generated, FinishReason]]:
    """Generate samples. `moves`: (sample, engine to move it to), one before each step."""
    for sample in range(num_samples):
        engines[0].submit(request_of(sample))
    left = list(moves)
    for _ in range(400):
        if left:
            sample, to = left.pop()
            for engine in engines:
                if request := await engine.withdraw(request_of(sample).id):
                    engines[to % len(engines)].submit(request)
        for engine in engines:
            engine.step()
        await asyncio.sleep(0)
        found = [one for engine in engines for one in engine.finished]
        if len(found) == num_samples:
            break
    assert not [error for engine in engines for error in engine.errors]
    assert len({request.id for request, _ in found}) == len(found) == num_samples
    assert not any(engine.conversations.num_waiting or engine.running for engine in engines)
    assert all(request.generated for request, _ in found)
    return {request.id: (request.generated or NOTHING, reason) for request, reason in found}


def alone(limits: TurnLimits, environments: HashedEnvironments | None = None) -> dict:
    engine = HashedEngine(environments or HashedEnvironments(), limits)
    return asyncio.run(converse([engine], ()))


LIMITS = TurnLimits(max_turns=5)
MOVES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=60)


@given(MOVES, st.integers(1, 6), st.none() | st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_no_move_changes_a_conversation(moves, max_turns: int, max_turn_tokens) -> None:
    limits = TurnLimits(max_turns, max_turn_tokens)
    engines = [HashedEngine(HashedEnvironments(), limits) for _ in range(3)]
    moved = asyncio.run(converse(engines, moves))
    assert moved == alone(limits)
    for generated, reason in moved.values():
        check(generated, reason, limits)


def check(generated: Generated, reason: FinishReason, limits: TurnLimits) -> None:
    turns = generated.turns
    assert 1 <= len(turns) <= limits.max_turns
    num_sampled = sum(turn.num_sampled for turn in turns)
    num_observed = sum(turn.num_observed or 0 for turn in turns)
    assert len(generated.token_ids) == num_sampled + num_observed <= 40
    assert len(generated.inference_logprobs) == num_sampled
    assert [turn.num_observed is None for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert all(turn.num_sampled <= (limits.max_turn_tokens or 40) for turn in turns)
    ended = reason is FinishReason.STOP
    assert (generated.score == -1.0) is not ended
    at = 0
    for turn in turns:
        sampled = generated.token_ids[at : at + turn.num_sampled]
        at += turn.num_sampled + (turn.num_observed or 0)
        assert all(token < NUM_TOKENS for token in sampled)
        assert all(
            token >= 100 for token in generated.token_ids[at - (turn.num_observed or 0) : at]
        )
        assert (sampled[-1] == END) or (turn is turns[-1] and reason is FinishReason.LENGTH)


def test_the_kinds_of_ends_all_occur() -> None:
    """Else the test above would not see them."""
    found = {reason for _, reason in alone(LIMITS).values()}
    found |= {reason for _, reason in alone(TurnLimits(1)).values()}
    found |= {reason for _, reason in alone(TurnLimits(9, 3)).values()}
    found |= {reason for _, reason in alone(TurnLimits(50, max_wait_s=0.3)).values()}
    crowded = HashedEnvironments(max_observed=60)
    found |= {reason for _, reason in alone(TurnLimits(50), crowded).values()}
    failing = HashedEnvironments(failing=frozenset({1}))
    found |= {reason for _, reason in alone(LIMITS, failing).values()}
    assert found == set(FinishReason)


def test_each_turn_has_its_drafts_and_its_end() -> None:
    began_s = time.time()
    for generated, _ in alone(LIMITS).values():
        ends = [turn.ended_s for turn in generated.turns]
        assert ends == sorted(ends)
        assert began_s <= ends[0] <= ends[-1] <= time.time()
        for turn, own in zip(generated.turns, generated.sampled, strict=True):
            accepted = sum(generated.token_ids[at] % 2 for at in own)
            assert (turn.num_draft_tokens, turn.num_accepted_tokens) == (2 * len(own), accepted)


def test_unstable_answers_change_tokens() -> None:
    """Negative control: an environment that answers a repeated question differently."""
    moves = [(sample % 6, sample % 3) for sample in range(60)]
    engines = [HashedEngine(HashedEnvironments(stable=False), LIMITS) for _ in range(3)]
    moved = asyncio.run(converse(engines, moves))
    assert moved != alone(LIMITS, HashedEnvironments(stable=False))


def test_a_cut_turn_is_never_answered() -> None:
    environments = HashedEnvironments()
    finished = alone(TurnLimits(9, max_turn_tokens=1), environments)
    cut = [one for one in finished.values() if one[1] is FinishReason.LENGTH]
    num_turns = sum(len(generated.turns) for generated, _ in finished.values())
    assert cut
    assert environments.num_answers == num_turns - len(cut)
    assert environments.ends == [FinishReason.LENGTH] * len(cut)


def test_an_environment_that_fails_to_end_a_conversation_is_named() -> None:
    plain = alone(TurnLimits(9, max_turn_tokens=1))
    failed = alone(TurnLimits(9, max_turn_tokens=1), HashedEnvironments(fails_to_end=True))
    cut = {id for id, (_, reason) in plain.items() if reason is FinishReason.LENGTH}
    assert cut
    assert cut == {id for id, (_, reason) in failed.items() if reason is FinishReason.FAILED}


def test_who_withdraws_a_cut_request_waits_for_its_end() -> None:
    """Weights may change only when an engine has no request."""

    async def run() -> list[FinishReason]:
        engine = HashedEngine(HashedEnvironments(), LIMITS)
        request = engine.conversations.turn_ended(turn_of((3, 4)), FinishReason.LENGTH)
        assert engine.conversations.withdraw(request.id) is None
        await engine.conversations.ended([request.id])
        return [reason for _, reason in engine.finished]

    assert asyncio.run(run()) == [FinishReason.LENGTH]


def test_an_error_of_the_environments_is_reported() -> None:
    class Broken(HashedEnvironments):
        async def answer(self, request: RolloutRequest) -> TurnAnswer:
            raise RuntimeError(f"no environment for {request.id}")

    async def run() -> list[BaseException]:
        engine = HashedEngine(Broken(), LIMITS)
        engine.conversations.turn_ended(turn_of((3, END)), FinishReason.STOP)
        for _ in range(3):
            await asyncio.sleep(0)
        return engine.errors

    (error,) = asyncio.run(run())
    assert "no environment" in str(error)


def test_a_lost_environment_that_answers_differently_starts_anew() -> None:
    class Lost(HashedEnvironments):
        async def answer(self, request: RolloutRequest) -> TurnAnswer:
            if not self.ends:
                self.ends.append(FinishReason.FAILED)
                return TurnAnswer(None, restarts=True)
            return await super().answer(request)

    assert alone(LIMITS, Lost()) == alone(LIMITS)


def turn_of(tokens: Sequence[int]) -> RolloutRequest:
    generated = Generated(array("i", tokens), array("f", [-1.0] * len(tokens)), ())
    return replace(request_of(0), generated=generated)


@pytest.mark.parametrize(
    ("turns", "num_tokens", "expected"),
    [((), 3, 3), ((Turn(2, 4),), 9, 3), ((Turn(2, 4), Turn(3, 0)), 9, 0)],
)
def test_tokens_of_the_current_turn(turns, num_tokens: int, expected: int) -> None:
    generated = replace(NOTHING, token_ids=array("i", range(num_tokens)), turns=turns)
    assert num_in_turn(generated) == expected
