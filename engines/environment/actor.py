"""Ray actor that answers the turns of conversations, one on each node of a run.

    engine ── tokens of the turns ──► actor: text, tool calls ──► pool: workers run user's code
       ▲                                                              │
       └── observed tokens, or the end ◄── rendered messages ◄────────┘

An engine may ask again, and another engine may ask: the same turn gets the same answer. The actor
keeps the answers of a sample's turns. If it dies with them, it has them from the journal, and
replays the turns that the engine still has. A replay with other tokens starts the conversation
anew.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

from refrain.engines.data.tokenizer import open_tokenizer
from refrain.engines.environment.client import TurnAnswer, share_of
from refrain.engines.environment.client import answered as with_answer
from refrain.engines.environment.hermes import HERMES, Parser
from refrain.engines.environment.journal import Journal, answer_of
from refrain.engines.environment.pool import Diverged, EnvironmentFailed, EnvironmentPool
from refrain.engines.environment.rendering import TurnRenderer
from refrain.engines.garbage import freeze_garbage
from refrain.engines.store.actor import StoreClient
from refrain.engines.store.turns import RecordedTurn
from refrain.engines.user_files import read_json_object
from refrain.schemas.config import TrainConfig
from refrain.schemas.environment import EnvironmentAnswer, EnvironmentTask, TurnText
from refrain.schemas.rollout import Generated, RequestId, Turn


@dataclass(slots=True)
class _Answered:
    """A turn with its answer."""

    sampled: bytes
    """Digest of the turn's tokens."""
    answer: EnvironmentAnswer
    observed: bytes | None = None
    """Digest of the answer's tokens. None: not rendered yet."""
    in_journal: bool = False


class EnvironmentActor:
    """Environments, tokenizer and parser of a run."""

    def __init__(
        self,
        config: TrainConfig,
        open_parser: Callable[[str, Any, Sequence[Mapping[str, Any]]], Parser],
        open_store: Callable[[], StoreClient] | None = None,
        share: int = 0,
        num_shares: int = 1,
    ) -> None:
        """`config`: with absolute paths and a local model. `open_parser`: returns another parser
        than `hermes` for its name, the tokenizer and the tools. `open_store`: returns the store
        that keeps the journal. None: without a journal. `share`: which of the run's samples it
        has."""
        assert config.environment is not None
        self._config = config.environment
        self._data = config.data
        with freeze_garbage():
            self._tokenizer = open_tokenizer(
                config.model.path,
                trust_remote_code=config.model.trust_remote_code,
                try_first=False,
            )
        self._end_token_ids = ending_tokens(config.model.path, self._tokenizer)
        self._pool = EnvironmentPool(self._config, config.data.surroundings)
        self._answers: dict[str, list[_Answered]] = {}
        """Answered turns of each sample, from the first on."""
        self._failures: dict[str, str] = {}
        self._num_restarts: Counter[str] = Counter()
        self._renderer: TurnRenderer | None = None
        self._open_parser = open_parser
        self._parser = HERMES
        self._share, self._num_shares = share, num_shares
        self._journal = Journal(open_store()) if open_store is not None else None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the workers, unless they have started. Raise ValueError that names the user's file.

        Ray may restart the actor, and repeats the calls of engines then.
        """
        async with self._starting:
            if self._renderer is None:
                setup = await self._pool.start()
                tools = setup.tools
                if not setup.goes_on:
                    self._journal = None
                if self._journal is not None:
                    self._restore(await self._journal.conversations())
                if (name := self._config.parser) != "hermes":
                    self._parser = await asyncio.to_thread(
                        self._open_parser, name, self._tokenizer, tools
                    )
                arguments = self._data.template_arguments
                self._renderer = TurnRenderer(self._tokenizer, arguments, tools, self._data.date)

    async def answer(
        self, id: RequestId, task: EnvironmentTask, generated: Generated
    ) -> TurnAnswer:
        """Return the answer to the last turn. `id`: of the sample in the step that drew it."""
        began_s, sample = time.monotonic(), str(id)
        await self.start()
        parts = split_turns(generated.token_ids, generated.turns)
        try:
            await self._replay(sample, task, parts[:-1])
            answered = await self._answer_to(sample, task, parts)
            answer = answered.answer
            observed = None if answer.ended else await self._observed(answered, parts[-1][0])
        except Diverged as error:
            self._num_restarts[sample] += 1
            if self._num_restarts[sample] <= self._config.retries:
                await self._forget([sample])
                return TurnAnswer(None, restarts=True)
            return self._failed(sample, str(error), began_s)
        except (EnvironmentFailed, ValueError) as error:
            return self._failed(sample, str(error), began_s)
        reply = TurnAnswer(
            observed,
            answer.score,
            answer.num_calls,
            answer.num_failed_calls,
            time.monotonic() - began_s,
        )
        if observed is not None:
            self._note(id, answered, with_answer(generated, reply))
        return reply

    async def end(
        self, id: RequestId, task: EnvironmentTask, generated: Generated, reason: str
    ) -> TurnAnswer:
        """End a conversation that was cut. Return its score, and whether the environment failed."""
        await self.start()
        began_s, sample = time.monotonic(), str(id)
        parts = split_turns(generated.token_ids, generated.turns)
        try:
            await self._replay(sample, task, parts[:-1])
            known = _answers(self._known(sample, parts))
            score = await self._pool.end(sample, task, self._texts(parts), known, reason)
            return TurnAnswer(None, score)
        except (Diverged, EnvironmentFailed, ValueError) as error:
            return self._failed(sample, str(error), began_s)

    async def failures(self) -> dict[str, str]:
        """Return why conversations failed since the last call, by sample."""
        found, self._failures = self._failures, {}
        return found

    async def finished(self, samples: Sequence[str]) -> None:
        """Close these conversations and drop their answers. Nobody will ask for them again."""
        await self._forget(samples)
        for sample in samples:
            self._num_restarts.pop(sample, None)
            self._failures.pop(sample, None)

    async def written(self, samples: Sequence[str]) -> list[str]:
        """Wait until the journal has the answered turns of these conversations. Return those that
        have some."""
        await self.start()
        if self._journal is None:
            return []
        await self._journal.written()
        return [sample for sample in samples if self._answers.get(sample)]

    async def journal_s(self) -> float:
        """Return the seconds that the store has spent on the journal."""
        return self._journal.store_s if self._journal else 0.0

    async def shutdown(self) -> None:
        try:
            if self._journal is not None:
                await self._journal.close()
        finally:
            await self._pool.close()

    def _restore(self, conversations: Mapping[RequestId, Sequence[RecordedTurn]]) -> None:
        """Know the answers that an earlier process gave to these conversations."""
        own = (id for id in conversations if share_of(str(id), self._num_shares) == self._share)
        for id in own:
            turns = conversations[id]
            self._answers[str(id)] = [_restored(turn) for turn in turns]
            # The user may have changed the environment since. To begin anew costs no retry then.
            self._num_restarts[str(id)] = -1

    def _note(self, id: RequestId, last: _Answered, generated: Generated) -> None:
        """Put the turns into the journal that it lacks. `last`: the last one."""
        num_turns = len(generated.turns)
        known = self._answers.get(str(id), [])[:num_turns]
        forgotten = known[num_turns - 1 :] != [last]
        if self._journal is None or last.in_journal or forgotten:
            return
        first = next(number for number, one in enumerate(known) if not one.in_journal)
        self._journal.note(id, generated, _answers(known), first)
        for one in known:
            one.in_journal = True

    async def _forget(self, samples: Sequence[str]) -> None:
        for sample in samples:
            self._answers.pop(sample, None)
        await self._pool.forget(samples)

    def _failed(self, sample: str, reason: str, began_s: float) -> TurnAnswer:
        self._failures[sample] = reason
        score = 0.0 if self._config.on_error == "zero" else None
        waited_s = time.monotonic() - began_s
        return TurnAnswer(None, score, waited_s=waited_s, failed=True)

    async def _replay(
        self, sample: str, task: EnvironmentTask, parts: Sequence[tuple[Sequence[int], ...]]
    ) -> None:
        """Get the answers to earlier turns that are not known here. Raise `Diverged` if one has
        other tokens than the conversation, which may have begun anew elsewhere."""
        for number, (sampled, observed) in enumerate(parts):
            answered = await self._answer_to(sample, task, parts[: number + 1])
            if not answered.answer.ended and answered.observed is None:
                await self._observed(answered, sampled)
            if answered.observed != digest(observed):
                raise Diverged(sample, number + 1)

    async def _answer_to(
        self, sample: str, task: EnvironmentTask, parts: Sequence[tuple[Sequence[int], ...]]
    ) -> _Answered:
        known, number = self._known(sample, parts), len(parts)
        if number <= len(known):
            return known[number - 1]
        answer = await self._pool.answer(sample, task, self._texts(parts), _answers(known))
        answered = _Answered(digest(parts[-1][0]), answer)
        # Another call for this turn may have come first. It has the same answer.
        if len(known) == number - 1:
            known.append(answered)
        return answered

    def _known(self, sample: str, parts: Sequence[tuple[Sequence[int], ...]]) -> list[_Answered]:
        """Return the answered turns. Forget them from the last of `parts` on if it has other tokens
        there: they belong to another conversation."""
        known, last = self._answers.setdefault(sample, []), len(parts) - 1
        if last < len(known) and known[last].sampled != digest(parts[last][0]):
            del known[last:]
        return known

    def _texts(self, parts: Sequence[tuple[Sequence[int], ...]]) -> list[TurnText]:
        return [self._text(sampled) for sampled, _ in parts]

    def _text(self, sampled: Sequence[int]) -> TurnText:
        assert self._renderer, "start() comes first"
        text = self._renderer.text_of(sampled, self._end_token_ids, self._parser.tags)
        return self._parser.parse(text, self._config.max_calls)

    async def _observed(self, answered: _Answered, sampled: Sequence[int]) -> Sequence[int]:
        """Return the tokens of an answer to a turn with these tokens."""
        assert self._renderer, "start() comes first"
        ended_by = sampled[-1] if sampled[-1] in self._end_token_ids else None
        most = self._config.max_observation_tokens
        render = self._renderer.observation_tokens
        messages = list(answered.answer.messages)
        observed = await asyncio.to_thread(render, messages, ended_by, most)
        answered.observed = digest(observed)
        return observed


def digest(token_ids: Sequence[int]) -> bytes:
    return blake2b(array("i", token_ids), digest_size=16).digest()


def _restored(turn: RecordedTurn) -> _Answered:
    ((sampled, observed),) = split_turns(turn.part.token_ids, turn.part.turns)
    return _Answered(digest(sampled), answer_of(turn), digest(observed), in_journal=True)


def _answers(known: Sequence[_Answered]) -> list[EnvironmentAnswer]:
    return [answered.answer for answered in known]


def ending_tokens(model: Path, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a turn: the tokenizer's, and those of the model's files."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            ids = read_json_object(model / name).get("eos_token_id")
            found |= set(ids) if isinstance(ids, list) else {ids}
    return frozenset(found - {None})


def split_turns(
    token_ids: Sequence[int], turns: Sequence[Turn]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the sampled and the observed tokens of each turn."""
    sizes = [(turn.num_sampled, turn.num_observed or 0) for turn in turns]
    ends = [0]
    for size in (size for pair in sizes for size in pair):
        ends.append(ends[-1] + size)
    assert ends[-1] == len(token_ids), f"{len(token_ids)} tokens in turns of {sizes}"
    pieces: list[Any] = [token_ids[begin:end] for begin, end in pairwise(ends)]
    return list(zip(pieces[::2], pieces[1::2], strict=True))
