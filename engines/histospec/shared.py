"""Shared indexes: the last epochs of all prompts, for what a prompt's own history does not know.

    histories of a batch ─► a new file, merged with the last ones of about its size ─► list of files
                                                                                          │
                                                            engines map new files ◄───────┘

Files are indexes that never change (`engines.histospec.index_file`). So the cost of new histories
depends on their length alone; merging makes it a few times as much. The list names the current
files and the steps of each of their parts. Histories older than `SHARED_EPOCHS` are dropped, and
so are the oldest beyond `DraftingConfig.shared_tokens`. Lost or damaged files are skipped: the
indexes fill again during the epoch.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from pathlib import Path

import numpy as np

from refrain.engines.durable import write_durably
from refrain.engines.histospec.index import (
    END,
    HistoryIndex,
    index_text,
    num_parts,
    response_text,
    response_weights,
)
from refrain.engines.histospec.index_file import (
    LIST,
    SUFFIX,
    DamagedIndex,
    index_path,
    open_index,
    shared_dir,
    write_index,
)
from refrain.engines.histospec.library import PromptHistory, index_sizes
from refrain.schemas.drafting import DraftingConfig

SHARED_EPOCHS = 2
"""Number of epochs kept. Two drafted best (`refrain bench drafting`)."""
MERGED = 4
"""Largest ratio of an old file's tokens to the new tokens at which the two are merged."""
MOST_IN_ONE = 4
"""One file has at most one part in this many of all tokens. When room runs out, whole files are
dropped, so this bounds how much is dropped at once."""
_MAX_WEIGHT = 2**40


@dataclass(frozen=True, slots=True)
class Shard:
    """One shared file."""

    name: str
    spans: tuple[tuple[int, int], ...]
    """(step, tokens) of each part of the text, in order."""

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.spans)

    def num_since(self, step: int) -> int:
        """Return the number of tokens from this step on."""
        return sum(num_tokens for of, num_tokens in self.spans if of >= step)


def num_merged(shards: Sequence[Shard], num_new: int, since: int, most: int) -> int:
    """Return how many of the last files a new one takes in. It takes in files that are not much
    larger, so that tokens are rewritten only a few times. It also takes in files of which over half
    is too old.

    `since`: first step that is kept. `most`: most tokens of one file.
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
    """Responses of one step, with a weight for each part of their text."""

    step: int
    text: np.ndarray
    weights: np.ndarray


class SharedLibrary:
    """Shared files of one history worker, in the common directory. Make one call at a time."""

    def __init__(
        self, directory: Path, config: DraftingConfig, epoch_steps: int = 0, share: int = 0
    ) -> None:
        """`epoch_steps`: steps of an epoch. With 0, histories are dropped for want of room alone.
        `share`: number of the worker. Its files carry it, so workers may share a directory."""
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
        """Add these histories, except those of steps that are too old."""
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
        """Text of the list of files, empty if there are none."""
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
        """Yield the recent parts of a file, or nothing if it is damaged."""
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
    """Yield the paths of files in another directory's list that this directory lacks, relative to
    it."""
    for shard in _parse_list(listed):
        path = index_path(shared_dir(Path()), shard.name)
        if not (directory / path).exists():
            yield path


def follow_list(directory: Path, share: int, listed: str) -> None:
    """Make engines read a worker's files by this list, and delete its other files."""
    path = shared_dir(directory) / f"{share}{LIST}"
    if listed and (not path.exists() or path.read_text() != listed):
        write_durably(path, listed)
        _delete_unlisted(path.parent, share, list(_parse_list(listed)))


def _fitting(histories: Sequence[PromptHistory], tail_tokens: int, most: int) -> Iterator[_Part]:
    """Yield one response of each prompt, then a second one of each, until the room is used up."""
    for part in chain.from_iterable(zip_longest(*(_samples(h, tail_tokens) for h in histories))):
        if part:
            most -= len(part.text)
            if most < 0:
                return
            yield part


def _samples(history: PromptHistory, tail_tokens: int) -> Iterator[_Part]:
    weights = np.minimum(response_weights(history.rewards), _MAX_WEIGHT)
    turns = history.turns or [()] * len(history.responses)
    for response, weight, own in zip(history.responses, weights, turns, strict=True):
        text = response_text(history.prompt_token_ids, response, own, tail_tokens)
        yield _Part(history.step, text, np.repeat(weight, num_parts(own)))


class SharedReader:
    """Shared files as one engine reads them."""

    def __init__(self, directory: Path) -> None:
        self._directory = shared_dir(directory)
        self._seen: dict[Path, int] = {}
        """Modification time of each list when it was last read."""
        self._indexes: dict[str, HistoryIndex] = {}

    def changed(self) -> bool:
        """Return whether any list has changed since the last read."""
        return self._times() != self._seen

    def read(self) -> tuple[dict[str, HistoryIndex], int]:
        """Return the current indexes by name, and the number of damaged files."""
        self._seen = self._times()
        names = [shard.name for path in self._seen for shard in _read_list(path)]
        indexes, num_refused = {}, 0
        for name in names:
            try:
                known = self._indexes.get(name)
                indexes[name] = known or open_index(index_path(self._directory, name), name)
            except FileNotFoundError:
                continue  # The file was just merged into another; the list will follow.
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
    """Delete a worker's files that its list does not name. Engines can still read what they have
    mapped."""
    listed = {shard.name for shard in shards}
    for path in directory.glob(f"{share}-*{SUFFIX}*"):
        if path.suffix != SUFFIX or path.stem not in listed:
            path.unlink(missing_ok=True)


def _list_text(shards: Sequence[Shard]) -> str:
    return json.dumps([{"name": shard.name, "spans": shard.spans} for shard in shards])


def _read_list(path: Path) -> Iterator[Shard]:
    """Yield the files in a list, or nothing if the list is missing or cannot be read."""
    with suppress(OSError, ValueError):
        yield from _parse_list(path.read_text())


def _parse_list(text: str) -> Iterator[Shard]:
    """Yield the files in a list, or nothing if the text is not a list of files."""
    try:
        for file in json.loads(text):
            spans = tuple((int(step), int(num_tokens)) for step, num_tokens in file["spans"])
            yield Shard(str(file["name"]), spans)
    except (ValueError, KeyError, TypeError):
        return
