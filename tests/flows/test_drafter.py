"""`refrain drafter train` makes a head from a model's own responses, or writes nothing."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from refrain.engines.draft_head.files import load, save
from refrain.engines.draft_head.model import DraftHead
from refrain.flows.cli import main
from tests.conftest import DEMO
from tests.flows.commands import Command

DATA = DEMO / "data" / "train.parquet"


def refusal(*args: str | Path) -> str:
    done = CliRunner().invoke(main, ["drafter", "train", *map(str, args)])
    assert done.exit_code == 2, done.output
    return done.output


def test_a_directory_of_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds other files" in refusal(DEMO / "model", DATA, "--out", tmp_path)


def test_a_head_is_replaced_only_on_request(tmp_path: Path) -> None:
    save(DraftHead(8, torch.arange(16)), tmp_path, vocab_size=16, window=4)
    assert "--overwrite" in refusal(DEMO / "model", DATA, "--out", tmp_path)


def test_a_model_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    said = refusal(tmp_path / "nowhere", DATA, "--out", tmp_path / "head")
    assert said.startswith("error: MODEL: ")
    assert not (tmp_path / "head").exists()


def test_a_single_prompt_is_refused(tmp_path: Path) -> None:
    pq.write_table(pq.read_table(DATA).slice(0, 1), tmp_path / "one.parquet")
    given = DEMO / "model", tmp_path / "one.parquet", "--out", tmp_path / "head"
    assert "needs at least 2" in refusal(*given, "--prompt-tokens=128")
    assert refusal(*given).startswith("error: --prompt-tokens and --tokens: ")


@pytest.mark.engine
@pytest.mark.slow
def test_a_head_learns_to_draft(tmp_path: Path) -> None:
    sizes = "--prompts 30 --samples 4 --tokens 64 --prompt-tokens 128 --steps 100 --dtype float32"
    out = tmp_path / "heads" / "demo"
    command = Command("drafter", "train", DEMO / "model", DATA, "--out", out, *sizes.split())
    try:
        output = command.finish()
    finally:
        command.close()
    (lengths,) = [line for line in output.splitlines() if "tokens per verification" in line]
    before, after = (float(word) for word in lengths.split() if word[0].isdecimal())
    assert after > before
    load(out, hidden_size=128, vocab_size=36)
