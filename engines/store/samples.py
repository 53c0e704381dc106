"""Find rollouts of a run for a user to read: by step and prompt, sorted, searched, page by page.

    SampleFilter ─► keys of the matching rollouts, in order ─► the rows of one page, with tokens
                                                    └─ search: tokens of a few keys at a time

The first query reads no tokens, so it stays fast with a million rollouts.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from refrain.schemas.rollout import FinishReason, Split

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Read = Callable[[str], list[Row]]
"""Answers a query in SQL, over archived steps too (`engines.store.reader`)."""
Key = tuple[str, int, str, int]
"""Split, step, prompt key and sample index."""
CHUNK = 512
"""Responses that a search reads at once."""
_KEY = "split, step, prompt_key, sample_index"
_REWARDS = f"LEFT JOIN rewards USING ({_KEY})"
_OLDER = "entropy IS NULL AND response_tokens > 0"
"""Rows of older stores, in which `entropy` is yet to be computed."""
_ENTROPY = "if(len(inference_logprobs) > 0, -list_avg(inference_logprobs), NULL)"
SORTS = {
    "step": "step",
    "epoch": "origin_step",
    "reward": "reward",
    "length": "response_tokens",
    "entropy": "entropy",
}
"""SQL of each order, the largest first. `epoch` is for the samples of one prompt."""


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Conditions on rollouts, and their order."""

    split: str = str(Split.TRAIN)
    step: int | None = None
    prompt: str = ""
    """Beginning of the prompt's key."""
    sample: int | None = None
    finish_reason: str = ""
    least_reward: float | None = None
    most_reward: float | None = None
    sort: str = "step"
    reverse: bool = False
    """Whether the smallest comes first."""

    def __post_init__(self) -> None:
        _one_of("split", self.split, [str(split) for split in Split])
        _one_of("sort", self.sort, list(SORTS))
        if self.finish_reason:
            _one_of("the finish reason", self.finish_reason, [str(one) for one in FinishReason])
        for bound in (self.least_reward, self.most_reward):
            if bound is not None and not math.isfinite(bound):
                raise ValueError(f"a bound of rewards is {bound}: give a finite number, like 0.5")

    @property
    def source(self) -> str:
        """FROM clause with only the tables that this filter needs."""
        is_scored = self.least_reward is not None or self.most_reward is not None
        return f"rollouts {_REWARDS}" if is_scored or self.sort == "reward" else "rollouts"

    @property
    def where(self) -> str:
        conditions = {
            f"split = {quoted(self.split)}": True,
            f"step = {self.step}": self.step is not None,
            f"starts_with(prompt_key, {quoted(self.prompt)})": bool(self.prompt),
            f"sample_index = {self.sample}": self.sample is not None,
            f"finish_reason = {quoted(self.finish_reason)}": bool(self.finish_reason),
            f"reward >= {self.least_reward}": self.least_reward is not None,
            f"reward <= {self.most_reward}": self.most_reward is not None,
        }
        return " AND ".join(condition for condition, holds in conditions.items() if holds)

    def order(self, read: Read) -> str:
        by = SORTS[self.sort]
        if by == "entropy" and read(f"FROM rollouts SELECT 1 WHERE {_OLDER} LIMIT 1"):
            by = _ENTROPY
        first = f"{by} {'ASC' if self.reverse else 'DESC'} NULLS LAST"
        return f"{first}, step DESC, prompt_key, sample_index"


class Token(NamedTuple):
    """A token of a response. An environment's token has neither log-probability nor version."""

    id: int
    logprob: float | None
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout with its tokens and its reward."""

    split: str
    step: int
    prompt_key: str
    sample_index: int
    epoch: int
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    inference_logprobs: list[float]
    version_spans: list[dict[str, int]]
    turns: list[dict[str, Any]]
    response_tokens: int
    finish_reason: str
    engine: int
    drafter: str
    num_draft_tokens: int
    num_accepted_tokens: int
    reward: float | None
    extra: str | None
    """What the scorer returned beside the reward, as JSON."""

    @property
    def key(self) -> Key:
        return (self.split, self.step, self.prompt_key, self.sample_index)

    @property
    def entropy(self) -> float | None:
        """As the column `entropy`, in nats per token."""
        return -fmean(self.inference_logprobs) if self.inference_logprobs else None

    @property
    def versions(self) -> list[int]:
        """Policy versions that sampled the response, in order."""
        return [span["policy_version"] for span in self.version_spans]

    @property
    def reward_parts(self) -> dict[str, Any]:
        """Values that the scorer returned beside the reward, by name."""
        return json.loads(self.extra or "{}")

    def tokens(self) -> Iterator[Token]:
        logprobs = iter(self.inference_logprobs)
        versions = (one for span in self.version_spans for one in _spread(span))
        for id, is_sampled in zip(self.response_token_ids, self._sampled(), strict=False):
            yield Token(id, next(logprobs), next(versions)) if is_sampled else Token(id, None, None)

    def _sampled(self) -> Iterator[bool]:
        """Yield for each token whether the policy sampled it. After the last turn, it did."""
        for turn in self.turns:
            yield from repeat(True, turn["num_sampled"])
            yield from repeat(False, turn["num_observed"] or 0)
        yield from repeat(True)


_COLUMNS = [field.name for field in fields(Sample)]


class Page(NamedTuple):
    """Some of the matching samples."""

    samples: list[Sample]
    num_matching: int
    """Rollouts that match the filter, on all pages."""
    num_searched: int | None = None
    """Rollouts whose text a search has read. None: there was no search."""
    ended_early: bool = False
    """Whether a search ran out of time."""


def find(read: Read, wanted: SampleFilter, limit: int, offset: int = 0) -> Page:
    """Return one page of the matching samples."""
    rows = read(
        f"SELECT {_KEY}, (SELECT count(*) FROM {wanted.source} WHERE {wanted.where}) AS num "
        f"FROM {wanted.source} WHERE {wanted.where} ORDER BY {wanted.order(read)} "
        f"LIMIT {limit} OFFSET {offset}"
    )
    return Page(_samples(read, [_key(row) for row in rows]), rows[0]["num"] if rows else 0)


def search(
    ask: "Callable[[str], pa.Table]",
    wanted: SampleFilter,
    contains: Callable[[list[list[int]]], list[bool]],
    limit: int,
    offset: int,
    timeout_s: float,
) -> Page:
    """Return one page of the samples whose response contains a text. Stop after `timeout_s`
    seconds.

    `contains`: returns for each response (its token ids) whether it has the text.
    """
    end_s = time.monotonic() + timeout_s
    hits: list[Key] = []

    def read(query: str) -> list[Row]:
        return ask(query).to_pylist()

    order = wanted.order(read)
    table = ask(f"SELECT {_KEY} FROM {wanted.source} WHERE {wanted.where} ORDER BY {order}")
    num_searched = 0
    while num_searched < table.num_rows and len(hits) < offset + limit:
        if time.monotonic() > end_s:
            break
        keys = [_key(row) for row in table.slice(num_searched, CHUNK).to_pylist()]
        found = _rows(read, keys, ["response_token_ids"])
        responses = [row["response_token_ids"] for row in found]
        hits += [key for key, hit in zip(keys, contains(responses), strict=True) if hit]
        num_searched += len(keys)
    is_late = num_searched < table.num_rows and len(hits) < offset + limit
    samples = _samples(read, hits[offset : offset + limit])
    return Page(samples, table.num_rows, num_searched, is_late)


def quoted(text: str) -> str:
    """Return a text as a constant of SQL. Raise ValueError when it is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[:40]!r} is not UTF-8: give letters and digits") from error
    return "'" + text.replace("'", "''") + "'"


def _samples(read: Read, keys: Sequence[Key]) -> list[Sample]:
    return [Sample(**row) for row in _rows(read, keys, _COLUMNS)]


def _rows(read: Read, keys: Sequence[Key], columns: Sequence[str]) -> list[Row]:
    """Return these columns and the key of each rollout, in the order of the keys."""
    if not keys:
        return []
    steps, prompts = sorted({key[1] for key in keys}), sorted({key[2] for key in keys})
    names = dict.fromkeys([*_KEY.split(", "), *columns])
    shown = [f"coalesce({name}, []) AS {name}" if name == "turns" else name for name in names]
    joined = f"LEFT JOIN prompts USING (prompt_key) {_REWARDS}" if len(columns) > 1 else ""
    # A live store sends only these steps (`engines.store.reader`).
    rows = read(
        f"SELECT {', '.join(shown)} FROM rollouts {joined} "
        f"WHERE split = {quoted(keys[0][0])} AND step >= {steps[0]} AND step <= {steps[-1]} "
        f"AND step IN ({', '.join(map(str, steps))}) "
        f"AND prompt_key IN ({', '.join(map(quoted, prompts))})"
    )
    by_key = {_key(row): row for row in rows}
    return [by_key[key] for key in keys]


def _key(row: Row) -> Key:
    return row["split"], row["step"], row["prompt_key"], row["sample_index"]


def _spread(span: dict[str, int]) -> Iterator[int]:
    return repeat(span["policy_version"], span["num_tokens"])


def _one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{what} is {value!r}: give one of {', '.join(known)}")
