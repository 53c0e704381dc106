"""Rows of Parquet, JSON and JSONL files, as plain dicts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
"""Columns that are read; others may be there."""

BATCH_ROWS = 1024


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file, in order. Raises ValueError when it is missing or unreadable."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: check data.train and data.validation")
    match path.suffix.lower():
        case ".parquet":
            return _parquet_rows(path)
        case ".json" | ".jsonl":
            return _json_rows(path)
        case suffix:
            raise ValueError(f"{path} ends in {suffix!r}: use .parquet, .json or .jsonl")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    with file:
        columns = [name for name in file.schema_arrow.names if name in COLUMNS]
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            yield from batch.to_pylist()


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """A `.json` file may hold one list of objects or, like `.jsonl`, an object per line."""
    with path.open(encoding="utf-8") as file:
        start = file.read(1024).lstrip("\ufeff \t\r\n")
        file.seek(0)
        if start.startswith("["):
            yield from map(_object_at(path), _parse(file.read(), path, 1))
            return
        for number, line in enumerate(file, start=1):
            if line.strip("\ufeff \t\r\n"):
                yield _object_at(path)(_parse(line, path, number))


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        number = line + error.lineno - 1
        raise ValueError(f"{path} line {number} is not JSON: {error.msg}") from error


def _object_at(path: Path):
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{path} holds {type(value).__name__} where a row, an object, belongs")
        return value

    return check
