"""Read the distinct prompts of Parquet, JSON and JSONL files, tokenised with the chat template.

The key of a prompt is the hash of its tokens. Rows with the same prompt are told apart by their
`extra_info` (`engines.data.repeats`), but not by `extra_info.index`: it repeats across files and
changes when a file is edited. Rows with the same prompt and `extra_info` but different ground
truths raise an error, because refrain cannot know which one is right.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from refrain.engines.data.messages import (
    AS_THEY_ARE,
    BadRowError,
    PromptSettings,
    messages_of,
    tokenize,
)
from refrain.engines.data.repeats import (
    MAX_ERRORS_SHOWN,
    RowName,
    Samples,
    contradiction,
    other_truth,
    refuse,
)
from refrain.engines.data.template import StoppedTemplate
from refrain.engines.data.tokenizer import open_tokenizer
from refrain.engines.paths import check_regular, named
from refrain.schemas.data import Prompt
from refrain.schemas.keys import prompt_key

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
"""Columns that are read. Other columns are ignored."""

BATCH_ROWS = 1024
MAX_LINE = 64 * 2**20
"""Most characters of a row in a JSONL file."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects, below the limits of pickle and JSON."""
MAX_SOURCE_CHARACTERS = 1_000
"""Most characters of a `data_source`, because metric names contain it."""
BLANK = "\ufeff \t\r\n"
BLANKS = re.compile(f"[{BLANK}]*")


@dataclass(frozen=True)
class Dataset:
    """Distinct prompts in the order of the files."""

    prompts: tuple[Prompt, ...]
    rows: tuple[RowName, ...]
    """Row of each prompt."""
    num_duplicates: int
    """Number of rows left out because they repeat an earlier row's prompt and `extra_info`."""
    num_overlong: int = 0
    """Number of rows left out because their prompts are too long."""

    @property
    def data_sources(self) -> set[str]:
        return {prompt.data_source for prompt in self.prompts}

    @cached_property
    def by_key(self) -> dict[str, Prompt]:
        return {prompt.key: prompt for prompt in self.prompts}


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a local Hugging Face directory.

    Raises ValueError when there is no tokenizer or it has no chat template.
    """
    tokenizer = open_tokenizer(path, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise ValueError(
            f"{path} has no chat template, which turns messages into tokens. Use an instruction-"
            "tuned model, or save a template as chat_template.jinja beside the tokenizer."
        )
    return tokenizer


def load_dataset(
    paths: Iterable[Path],
    tokenizer: Any,
    max_prompt_tokens: int,
    check_ground_truth: Callable[[Any], None] | None = None,
    settings: PromptSettings = AS_THEY_ARE,
) -> Dataset:
    """Read veRL-style files into prompts of at most `max_prompt_tokens` tokens.

    `tokenizer`: from `load_tokenizer`. `check_ground_truth` raises ValueError for a ground truth
    that the scorer cannot compare with. Raises ValueError that names each bad row by file and
    number (from 1) with a way to fix it. Also raises ValueError when rows of the same prompt have
    different ground truths or data sources.
    """
    samples = Samples()
    rows: dict[str, RowName] = {}
    contradictions: list[str] = []
    num_rows = num_overlong = 0
    for path in paths:
        for number, prompt in _prompts_of_file(
            Path(path), tokenizer, max_prompt_tokens, check_ground_truth, settings
        ):
            if prompt is None:
                num_overlong += 1
                continue
            first, row = samples.find(prompt), RowName(Path(path), number)
            num_rows += 1
            if first is None:
                rows[samples.add(prompt).key] = row
            elif what := contradiction(first, prompt):
                contradictions.append(f"{rows[first.key]} and {row}: {what}")
    refuse(contradictions)
    prompts = samples.prompts
    if not prompts:
        raise ValueError(
            f"every prompt is longer than data.max_prompt_tokens ({max_prompt_tokens}): raise it"
        )
    num_duplicates = num_rows - len(prompts)
    return Dataset(tuple(prompts.values()), tuple(rows.values()), num_duplicates, num_overlong)


def check_shared(train: Dataset, validation: Dataset) -> list[tuple[RowName, RowName]]:
    """Return the pairs of (training row, validation row) that share a prompt. Each validation row
    is paired with the training row most like it. Data sources may differ.

    Raises ValueError that names rows with different ground truths, if they have the same prompt
    and `extra_info`, or if each data set has the prompt once.
    """
    alike, firsts = Samples(), dict[tuple[int, ...], Prompt]()
    for prompt in train.prompts:
        firsts.setdefault(alike.add(prompt).token_ids, prompt)
    rows = dict(zip(train.by_key, train.rows, strict=True))
    times = Counter(prompt.token_ids for prompt in (*train.prompts, *validation.prompts))
    contradictions: list[str] = []
    shared: list[tuple[RowName, RowName]] = []
    for other, other_row in zip(validation.prompts, validation.rows, strict=True):
        if other.token_ids not in firsts:
            continue
        same = alike.find(other)
        first = same or firsts[other.token_ids]
        row, alone = rows[first.key], times[other.token_ids] == 2
        if (same or alone) and (what := other_truth(first, other)):
            contradictions.append(f"{row} and {other_row}: {what}")
        shared.append((row, other_row))
    refuse(contradictions)
    return shared


def _prompts_of_file(
    path: Path,
    tokenizer: Any,
    max_prompt_tokens: int,
    check_ground_truth: Callable[[Any], None] | None,
    settings: PromptSettings,
) -> Iterator[tuple[int, Prompt | None]]:
    """Yield row numbers and prompts. None for a prompt that is left out."""
    errors: list[str] = []
    number = 0
    for number, row in enumerate(read_rows(path), start=1):
        try:
            prompt = _prompt(row, tokenizer, max_prompt_tokens, settings)
            if prompt and check_ground_truth:
                check_ground_truth(prompt.ground_truth)
        except StoppedTemplate as error:
            raise ValueError(
                f"{path} row {number}: {error}: fix the chat template in the model's directory"
            ) from error
        except ValueError as error:
            errors.append(f"row {number}: {error}")
        else:
            yield number, prompt
        if len(errors) == MAX_ERRORS_SHOWN:
            errors.append("(further rows were not read)")
            break
    if number == 0:
        raise ValueError(f"{path} has no rows: add rows, or remove the file from the list")
    if errors:
        raise ValueError("\n  ".join([f"{path} has bad rows (counted from 1):", *errors]))


def _prompt(
    row: dict[str, Any], tokenizer: Any, max_prompt_tokens: int, settings: PromptSettings
) -> Prompt | None:
    _check_values({name: row[name] for name in COLUMNS if name in row})
    messages = messages_of(row, settings)
    data_source, ground_truth = _data_source(row), _ground_truth(row)
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        kind = type(extra_info).__name__
        raise BadRowError(f"`extra_info` is a {kind}: make it an object, or remove it")
    token_ids = tokenize(messages, tokenizer, settings.template_arguments, settings.date)
    if len(token_ids) > max_prompt_tokens:
        if settings.drops_overlong:
            return None
        raise BadRowError(
            f"the prompt has {len(token_ids)} tokens, more than data.max_prompt_tokens "
            f"({max_prompt_tokens}): raise the limit, remove the row, or set data.overlong=drop"
        )
    key = prompt_key(token_ids)
    return Prompt(key, token_ids, data_source, ground_truth, extra_info, messages)


def _check_values(value: Any, depth: int = 0) -> None:
    """Raise BadRowError for values that a tokenizer, JSON or another process cannot take."""
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict | list | tuple):
        if depth == MAX_DEPTH:
            raise BadRowError(f"it is nested over {MAX_DEPTH} levels deep: make it a JSON string")
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for item in items:
            _check_values(item, depth + 1)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = text[max(0, error.start - 20) : error.start + 20]
        raise BadRowError(
            f"{place!r} holds {text[error.start]!r}, which is a byte that is not UTF-8 or half of "
            "a surrogate pair: save the file as UTF-8, or fix the text"
        ) from error


def _data_source(row: dict[str, Any]) -> str:
    data_source = row.get("data_source")
    if not isinstance(data_source, str) or not data_source.strip():
        raise BadRowError("no `data_source`: add the name that selects the scorer")
    if len(data_source) > MAX_SOURCE_CHARACTERS:
        raise BadRowError(
            f"`data_source` has {len(data_source):,} characters, more than "
            f"{MAX_SOURCE_CHARACTERS:,}: give the name that selects the scorer"
        )
    return data_source


def _ground_truth(row: dict[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if ground_truth is None:
        raise BadRowError(
            "no `reward_model.ground_truth`: add what the scorer compares with "
            '("" if it needs nothing)'
        )
    return ground_truth


def read_rows(path: Path, *, all_columns: bool = False) -> Iterator[dict[str, Any]]:
    """Return the rows of one file, in order, at least with the columns in `COLUMNS` that the file
    has. Raises ValueError when the file is missing or unreadable."""
    check_regular(path)
    match path.suffix.lower():
        case ".parquet":
            return _parquet_rows(path, all_columns)
        case ".json" | ".jsonl":
            return _json_rows(path)
        case suffix:
            raise ValueError(f"{path} ends in {suffix!r}: use .parquet, .json or .jsonl")


def _parquet_rows(path: Path, all_columns: bool) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    with file:
        columns = [n for n in file.schema_arrow.names if all_columns or n in COLUMNS]
        number = 0
        try:
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                yield from _batch_rows(batch, path, number)
                number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged after row {number}: {error}") from error


def _batch_rows(batch: Any, path: Path, number: int) -> list[dict[str, Any]]:
    """Return the rows of an Arrow batch. `number`: rows of the file before this batch."""
    try:
        return batch.to_pylist()
    except (ValueError, ArithmeticError):
        for index in range(batch.num_rows):
            try:
                batch.slice(index, 1).to_pylist()
            except (ValueError, ArithmeticError) as error:
                raise ValueError(f"{path} row {number + index + 1} is damaged: {error}") from error
        raise


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON file: of one list, or one per line as in `.jsonl`."""
    # Bytes that are not UTF-8 become surrogates, which `_check_text` refuses with their row.
    with named(path), path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        start = file.read(1024).lstrip(BLANK)
        file.seek(0)
        is_list = start.startswith("[")
        rows = _list_rows(file.read(), path) if is_list else _line_rows(_lines(file, path), path)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise ValueError(f"{path} row {number} is of type {kind}: make it an object")
            yield row


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield lines of limited length, so that a file without line breaks is not read whole."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise ValueError(
                f"{path} line {number} is over {MAX_LINE:,} characters long: write one row per line"
            )
        yield line


def _line_rows(lines: Iterable[str], path: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if text := line.strip(BLANK):
            with _readable(f"{path} line {number}"):
                row = json.loads(text)
            yield row


def _list_rows(text: str, path: Path) -> Iterator[Any]:
    """Yield the elements of a JSON list one by one, so that an error names the row."""
    decoder, number = json.JSONDecoder(), 0
    position = _after_blanks(text, text.index("[") + 1)
    while not text.startswith("]", position):
        number += 1
        with _readable(f"{path} row {number}"):
            row, position = decoder.raw_decode(text, position)
            position = _after_blanks(text, position)
            if text.startswith(",", position):
                position = _after_blanks(text, position + 1)
                if text.startswith("]", position):
                    raise json.JSONDecodeError("a comma before ]", text, position)
            elif not text.startswith("]", position):
                raise json.JSONDecodeError("there is no , or ] after it", text, position)
        yield row
    if text[position + 1 :].strip(BLANK):
        raise ValueError(f"{path} goes on after its list: remove the text after the ]")


def _after_blanks(text: str, position: int) -> int:
    blanks = BLANKS.match(text, position)
    assert blanks
    return blanks.end()


@contextmanager
def _readable(where: str) -> Generator[None]:
    try:
        yield
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg}") from error
    except RecursionError:
        raise ValueError(f"{where} is nested too deep: make it a JSON string") from None
    except ValueError as error:
        raise ValueError(f"{where} holds a number that is too long: {error}") from error
