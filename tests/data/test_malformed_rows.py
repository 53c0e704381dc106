"""`load_dataset` refuses each malformed row with an error that names the file and the row."""

import re
from pathlib import Path

import pytest

from engines.data.dataset import load_dataset, load_tokenizer
from tests.conftest import DEMO
from tests.data.malformed_rows import bad_rows

SEED, NUM_ROWS = 17, 180


def test_a_malformed_row_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(DEMO / "model")
    seen = set()
    for row in bad_rows(SEED, NUM_ROWS, tmp_path):
        with pytest.raises(ValueError, match=re.escape(str(row.file))) as refused:
            load_dataset([row.file], tokenizer, 256)
        said = str(refused.value)
        assert re.search(rf"\b(row|line) {row.number}\b", said), f"{row.what}: {said}"
        assert "Traceback" not in said
        assert len(said) < 1000, f"{row.what}: {said}"
        seen.add(row.what)
    assert len(seen) > NUM_ROWS / 4
