"""Data files that hold one malformed row among good ones."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TORN = "half \ud83d"


@dataclass(frozen=True)
class MalformedRow:
    """A data file with one bad row."""

    what: str
    file: Path
    number: int
    """Number of the bad row, or of its line, from 1."""


def good_row(number: int) -> dict[str, Any]:
    return {
        "data_source": "refrain/arithmetic",
        "prompt": [{"role": "user", "content": f"a={number} b=a+2 b=?"}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
        "extra_info": {"index": number},
    }


WRONG: dict[str, tuple[Any, ...]] = {
    "prompt": (
        *(None, 5, "a question", True, [], {}, {"role": "user"}),
        [None],
        ["a question"],
        [[]],
        [{"role": "user"}],
        [{"content": "a question"}],
        [{"role": "user", "content": None}],
        [{"role": 5, "content": "a question"}],
        [{"role": "user", "content": ["a", "b"]}],
        [{"role": "user", "content": TORN}],
        [{"role": "user", "content": "long " * 400}],
    ),
    "data_source": (None, 5, "", [], {}, True, TORN),
    "reward_model": (None, 5, "65", [], {}, {"ground_truth": None}, {"ground_truth": TORN}),
    "extra_info": (5, "index", [1], True, {"note": TORN}, {TORN: 1}),
}
NO_JSON = (
    "{",
    "}",
    '{"prompt": ',
    "{'prompt': 1}",
    '{"prompt": 1,}',
    '{"prompt": tru}',
    "prompt",
    '{"a": 1} {"b": 2}',
    "[" * 100_000 + "]" * 100_000,
    '{"a": ' + "9" * 5000 + "}",
    '{"a": "\x01"}',
)
NO_OBJECT = ("5", '"text"', "null", "[1]", "true")


def bad_rows(seed: int, num: int, directory: Path) -> Iterator[MalformedRow]:
    drawn = random.Random(seed)
    for turn in range(num):
        file = directory / f"rows{turn}.jsonl"
        yield (_wrong_value, _missing, _no_row, _no_text, _in_parquet)[turn % 5](drawn, file)


def _write(file: Path, draw: random.Random, bad: str | bytes) -> int:
    """Write the bad line among good ones. Return its number, from 1."""
    before, after = draw.randrange(5), draw.randrange(5)
    lines = [json.dumps(good_row(number)).encode() for number in range(before + after)]
    bad = bad.encode("utf-8") if isinstance(bad, str) else bad
    file.write_bytes(b"\n".join([*lines[:before], bad, *lines[before:]]) + b"\n")
    return before + 1


def _wrong_value(draw: random.Random, file: Path) -> MalformedRow:
    name = draw.choice([*WRONG])
    value = draw.choice(WRONG[name])
    row = good_row(99) | {name: value}
    if draw.random() < 0.3:
        # Write one JSON list instead of lines.
        file = file.with_suffix(".json")
        before = draw.randrange(5)
        file.write_text(json.dumps([*map(good_row, range(before)), row, good_row(98)]))
        return MalformedRow(f"{name}: {str(value)[:30]!r}", file, before + 1)
    return MalformedRow(f"{name}: {str(value)[:30]!r}", file, _write(file, draw, json.dumps(row)))


def _missing(draw: random.Random, file: Path) -> MalformedRow:
    name = draw.choice(["prompt", "data_source", "reward_model"])
    row = {key: value for key, value in good_row(99).items() if key != name}
    return MalformedRow(f"no {name}", file, _write(file, draw, json.dumps(row)))


def _no_row(draw: random.Random, file: Path) -> MalformedRow:
    text = draw.choice([*NO_JSON, *NO_OBJECT])
    return MalformedRow(f"line {text[:30]}", file, _write(file, draw, text))


def _no_text(draw: random.Random, file: Path) -> MalformedRow:
    good = json.dumps(good_row(99)).encode()
    bad = draw.choice([b"\xff", b"\xc3", b"\xe2\x82", b"\x80"])
    return MalformedRow(
        f"bytes {bad!r}", file, _write(file, draw, good.replace(b"user", b"us" + bad + b"er"))
    )


def _in_parquet(draw: random.Random, file: Path) -> MalformedRow:
    name = draw.choice(["prompt", "data_source", "reward_model"])
    before, after = draw.randrange(5), draw.randrange(1, 5)
    rows = [good_row(number) for number in range(before + after)]
    rows.insert(before, good_row(99) | {name: None})
    file = file.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)
    return MalformedRow(f"{name} is null", file, before + 1)
