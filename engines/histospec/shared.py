"""The last epochs of all prompts in one index: for what a prompt's own history does not know.

    histories of a batch ─► a new file, merged with the last ones of about its size ─► list of files
                                                                                          │
                                                            engines map what is new ◄─────┘

Each file is an index that never changes (`engines.histospec.index_file`), so what is new
costs what it is long, and with merging a few times as much, whatever there is already. The list
says which files count, and of which steps each of their parts is. What is older than
`SHARED_EPOCHS`, or more than `drafting.shared_tokens`, goes. A file that is lost or damaged is left
out: the index fills again as the epoch goes on.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from pathlib import Path

import numpy as np

from engines.durable import write_durably
from engines.histospec.index import END, HistoryIndex, index_text, response_weights
from engines.histospec.index_file import (
    LIST,
    SUFFIX,
    DamagedIndex,
    index_path,
    open_index,
    shared_dir,
    write_index,
)
from engines.histospec.library import PromptHistory, index_sizes
from schemas.drafting import DraftingConfig

SHARED_EPOCHS = 2
"""Epochs that are kept: two drafted best (`refrain bench drafting`)."""
MERGED = 4
"""A file is merged with a new one that has at least so small a part of its tokens."""
MOST_IN_ONE = 4
"""Part of all tokens that one file may have, as a divisor: so much goes when it grows too old."""
_MAX_WEIGHT = 2**40


@dataclass(frozen=True, slots=True)
class Shard:
    """One file."""

    name: str
    spans: tuple[tuple[int, int], ...]
    """(step, tokens) of the parts of its text, in turn."""

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.spans)

    def num_since(self, step: int) -> int:
        """Tokens from this step on."""
        return sum(num_tokens for of, num_tokens in self.spans if of >= step)


def num_merged(shards: Sequence[Shard], num_new: int, since: int, most: int) -> int:
    """How many of the last files a new one takes in: those that are not much larger, so that a
    token is written anew a few times at most, and those of which half is too old.

    `since`: first step that is kept. `most`: tokens of one file, at most.
    """
    for i, shard in enumerate(reversed(shards)):
        kept = shard.num_since(since)
        stale = 2 * kept < shard.num_tokens
        if num_new + kept > most or (kept > MERGED * num_new and not stale):
            return i
        num_new += kept
    return len(shards)


@dataclass(frozen=True, slots=True)
class _Part:
    """Responses of one step."""

    step: int
    text: np.ndarray
    weights: np.ndarray


class SharedLibrary:
    """Shared files of one history worker, in the directory of all. One call at a time."""

    def __init__(
        self, directory: Path, config: DraftingConfig, epoch_steps: int = 0, share: int = 0
    ) -> None:
        """`epoch_steps`: steps of an epoch; 0: as many as there is room for are kept. `share`: the
        worker's number, told apart by which several share a directory."""
        self._directory = shared_dir(directory)
        self._max_tokens = config.shared_tokens
        self._kept_steps = SHARED_EPOCHS * epoch_steps
        self._sizes = index_sizes(config)
        self._share = share
        self._list = self._directory / f"{share}{LIST}"
        self._shards = list(_read_list(self._list))
        self._newest = max((step for shard in self._shards for step, _ in shard.spans), default=0)
        if self._max_tokens:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._delete_others()

    def add(self, histories: Sequence[PromptHistory]) -> None:
        """Take in these histories; those of steps that are too old are passed over."""
        self._newest = max([self._newest, *(history.step for history in histories)])
        since = self._newest - self._kept_steps + 1 if self._kept_steps else 0
        most = self._max_tokens // MOST_IN_ONE
        recent = [history for history in histories if history.step >= since]
        parts = list(_fitting(recent, self._sizes["max_match"], most))
        if not parts:
            return
        num_new = sum(len(part.text) for part in parts)
        self._shards = [shard for shard in self._shards if shard.num_since(since)]
        num = num_merged(self._shards, num_new, since, most)
        merged = self._shards[len(self._shards) - num :]
        old = chain.from_iterable(self._parts_of(shard, since) for shard in merged)
        self._write([*old, *parts], self._shards[: len(self._shards) - num])

    @property
    def listed(self) -> str:
        """Text of the list; empty where there is none."""
        return _list_text(self._shards) if self._shards else ""

    def _write(self, parts: Sequence[_Part], before: Sequence[Shard]) -> None:
        name = f"{self._share}-{time.time_ns():x}"
        index = index_text(
            np.concatenate([part.text for part in parts]),
            np.concatenate([part.weights for part in parts]),
            **self._sizes,
            step=self._newest,
        )
        write_index(index, name, index_path(self._directory, name))
        spans = tuple(
            (step, sum(len(part.text) for part in of_step))
            for step, of_step in groupby(parts, key=lambda part: part.step)
        )
        shards = [*before, Shard(name, spans)]
        while sum(shard.num_tokens for shard in shards) > self._max_tokens:
            shards.pop(0)
        write_durably(self._list, _list_text(shards))
        self._shards = shards
        self._delete_others()

    def _parts_of(self, shard: Shard, since: int) -> Iterator[_Part]:
        """Parts of a file that are recent enough; none when it is damaged."""
        try:
            index = open_index(index_path(self._directory, shard.name), shard.name)
        except (OSError, DamagedIndex):
            return
        if len(index.text) != shard.num_tokens:
            return
        weights, start, first = index.part_weights(), 0, 0
        for step, num_tokens in shard.spans:
            text = index.text[start : start + num_tokens]
            start, end = start + num_tokens, first + int(np.count_nonzero(text == END))
            if step >= since:
                yield _Part(step, text, weights[first:end])
            first = end

    def _delete_others(self) -> None:
        _delete_unlisted(self._directory, self._share, self._shards)


def missing_shared(directory: Path, listed: str) -> Iterator[Path]:
    """Shared files in a list of another directory that are not in this one; names from there."""
    for shard in _parse_list(listed):
        path = index_path(shared_dir(Path()), shard.name)
        if not (directory / path).exists():
            yield path


def follow_list(directory: Path, share: int, listed: str) -> None:
    """Have engines read the files of a worker by this list, and delete its others."""
    path = shared_dir(directory) / f"{share}{LIST}"
    if listed and (not path.exists() or path.read_text() != listed):
        write_durably(path, listed)
        _delete_unlisted(path.parent, share, list(_parse_list(listed)))


def _fitting(histories: Sequence[PromptHistory], tail_tokens: int, most: int) -> Iterator[_Part]:
    """One response of each prompt, then a second one of each, as far as there is room."""
    for part in chain.from_iterable(zip_longest(*(_samples(h, tail_tokens) for h in histories))):
        if part:
            most -= len(part.text)
            if most < 0:
                return
            yield part


def _samples(history: PromptHistory, tail_tokens: int) -> Iterator[_Part]:
    tail = np.asarray(history.prompt_token_ids, np.int32)[-tail_tokens:]
    weights = np.minimum(response_weights(history.rewards), _MAX_WEIGHT)
    for response, weight in zip(history.responses, weights, strict=True):
        text = np.concatenate([tail, np.asarray(response, np.int32), np.array([END], np.int32)])
        yield _Part(history.step, text, np.array([weight]))


class SharedReader:
    """The shared files as an engine holds them."""

    def __init__(self, directory: Path) -> None:
        self._directory = shared_dir(directory)
        self._seen: dict[Path, int] = {}
        """Time of each list when it was read."""
        self._indexes: dict[str, HistoryIndex] = {}

    def changed(self) -> bool:
        """Whether there is anything else than was read last."""
        return self._times() != self._seen

    def read(self) -> tuple[dict[str, HistoryIndex], int]:
        """Indexes that count now by name, and how many files were refused."""
        self._seen = self._times()
        names = [shard.name for path in self._seen for shard in _read_list(path)]
        indexes, num_refused = {}, 0
        for name in names:
            try:
                known = self._indexes.get(name)
                indexes[name] = known or open_index(index_path(self._directory, name), name)
            except FileNotFoundError:
                continue  # It has just been merged into another one: the list says so soon.
            except (OSError, DamagedIndex):
                num_refused += 1
        self._indexes = indexes
        return indexes, num_refused

    def _times(self) -> dict[Path, int]:
        times = {}
        for path in sorted(self._directory.glob(f"*{LIST}")):
            with suppress(FileNotFoundError):
                times[path] = path.stat().st_mtime_ns
        return times


def _delete_unlisted(directory: Path, share: int, shards: Sequence[Shard]) -> None:
    """Delete a worker's files that are in no list; what engines have mapped stays readable."""
    listed = {shard.name for shard in shards}
    for path in directory.glob(f"{share}-*{SUFFIX}*"):
        if path.suffix != SUFFIX or path.stem not in listed:
            path.unlink(missing_ok=True)


def _list_text(shards: Sequence[Shard]) -> str:
    return json.dumps([{"name": shard.name, "spans": shard.spans} for shard in shards])


def _read_list(path: Path) -> Iterator[Shard]:
    """Files of a list; none where there is no list, or one that cannot be read."""
    with suppress(OSError, ValueError):
        yield from _parse_list(path.read_text())


def _parse_list(text: str) -> Iterator[Shard]:
    """Files of a list; none of one that says nothing, or something else."""
    try:
        for file in json.loads(text):
            spans = tuple((int(step), int(num_tokens)) for step, num_tokens in file["spans"])
            yield Shard(str(file["name"]), spans)
    except (ValueError, KeyError, TypeError):
        return
