"""`load_dataset` refuses each malformed row with an error that names the file and the row."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refrain.engines.data.dataset import load_dataset, load_tokenizer
from tests.conftest import DEMO

TORN = "half \ud83d"


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
WRONG_ROWS = [good_row(9) | {name: value} for name, values in WRONG.items() for value in values]
NO_ROWS = (
    *("{", "}", '{"prompt": ', "{'prompt': 1}", '{"prompt": 1,}', '{"prompt": tru}', "prompt"),
    *('{"a": 1} {"b": 2}', '{"a": "\x01"}', "[" * 100_000 + "]" * 100_000),
    *('{"a": ' + "9" * 5000 + "}", "5", '"text"', "null", "[1]", "true"),
)
NO_TEXT = (b"\xff", b"\xc3", b"\xe2\x82", b"\x80")


def malformed_files(directory: Path) -> list[Path]:
    """Write files whose second row is malformed, and return them."""
    good, rest = json.dumps(good_row(1)).encode(), json.dumps(good_row(3)).encode()
    lines = [json.dumps(row).encode() for row in WRONG_ROWS] + [text.encode() for text in NO_ROWS]
    lines += [good.replace(b"user", b"us" + bad + b"er") for bad in NO_TEXT]
    files = []
    for number, line in enumerate(lines):
        files.append(directory / f"lines{number}.jsonl")
        files[-1].write_bytes(b"\n".join([good, line, rest]))
    for number, row in enumerate(WRONG_ROWS):
        files.append(directory / f"list{number}.json")
        files[-1].write_text(json.dumps([good_row(1), row, good_row(3)]))
    for name in ("prompt", "data_source", "reward_model"):
        files.append(directory / f"{name}.parquet")
        rows = [good_row(1), good_row(2) | {name: None}, good_row(3)]
        pq.write_table(pa.Table.from_pylist(rows), files[-1])
    return files


def test_a_malformed_row_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(DEMO / "model")
    for file in malformed_files(tmp_path):
        with pytest.raises(ValueError, match=re.escape(str(file))) as refused:
            load_dataset([file], tokenizer, 256)
        said = str(refused.value)
        assert re.search(r"\b(row|line) 2\b", said), f"{file.read_bytes()[:300]!r}: {said}"
        assert "Traceback" not in said
        assert len(said) < 1000, said
