"""Commands overwrite output files of their own kind, and no other files."""

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.flows.cli import main
from refrain.flows.output_file import (
    CSV,
    HTML,
    JSON,
    PARQUET,
    PNG,
    check_output,
    write_output,
    writing,
)
from tests.failing_disks import full_disk
from tests.flows.directory_snapshots import tree
from tests.flows.run_dirs import make_checkpoint, make_run
from tests.learn.test_checkpoint import write

GOOD = {JSON: b'{"a": 1}', PARQUET: b"PAR1..", PNG: b"\x89PNG..", HTML: b"<!doctype", CSV: b"a,b\n"}
SUFFIX = {JSON: "json", PARQUET: "parquet", PNG: "png", HTML: "html", CSV: "csv"}


@pytest.mark.parametrize("kind", GOOD)
def test_a_file_of_the_same_kind_is_replaced_and_another_is_not(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"file.{SUFFIX[kind]}"
    check_output(file, kind)
    for content in (GOOD[kind], b""):
        file.write_bytes(content)
        check_output(file, kind, "--option")
    for other in (b"\\documentclass{thesis}\0", b"\x7fELF\0"):
        file.write_bytes(other)
        with pytest.raises(ValueError, match=f"--option .* exists already and is no {kind}"):
            check_output(file, kind, "--option")


def test_a_table_replaces_no_text_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match="exists already and is no CSV file"):
        check_output(tmp_path / "train.yaml", CSV)


def test_files_of_runs_checkpoints_and_models_are_kept(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "demo", (0.5,))
    checkpoint = make_checkpoint(run_dir, 1)
    copied = write(tmp_path / "elsewhere", 1)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "link.json").symlink_to(run_dir / "config.json")
    for file, owner in (
        (run_dir / "config.json", "the run in"),
        (run_dir / "progress.json", "the run in"),
        (checkpoint / "state.json", "the checkpoint in"),
        (copied / "state.json", "the checkpoint in"),
        (tmp_path / "model" / "config.json", "the model in"),
        (tmp_path / "link.json", "the run in"),
    ):
        if not file.exists():
            file.write_text("{}")
        with pytest.raises(ValueError, match=f"is a file of {owner}"):
            check_output(file, JSON)
    check_output(run_dir / "new.json", JSON)


def test_directories_and_unread_pipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory"):
        check_output(tmp_path, JSON)
    with pytest.raises(ValueError, match="there is no such directory"):
        check_output(tmp_path / "nowhere" / "a.json", JSON)
    with pytest.raises(ValueError, match=r"ends in \.png"):
        check_output(tmp_path / "a.json", PNG)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="nobody reads from it"):
        check_output(tmp_path / "pipe", JSON)
    check_output("/dev/null", JSON)
    check_output("-", JSON)
    check_output(None, JSON)
    write_output("/dev/null", "{}")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_pipe_that_is_read_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_output(tmp_path / "pipe", JSON)
    write_output(tmp_path / "pipe", "{}")
    assert os.read(reader, 10) == b"{}"
    os.close(reader)


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"old": 1}')
    before = tree(tmp_path)
    with full_disk(), pytest.raises(OSError, match="No space left"):
        write_output(file, "{" + " " * 1000 + "}")
    with pytest.raises(KeyboardInterrupt):
        write_half(file)
    assert tree(tmp_path).keys() == before.keys()
    assert file.read_text() == '{"old": 1}'
    (tmp_path / "link.json").symlink_to(file)
    write_output(tmp_path / "link.json", "{}")
    assert (file.read_text(), (tmp_path / "link.json").is_symlink()) == ("{}", True)


def write_half(file: Path) -> None:
    with writing(file) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt


REFUSED = [
    "export {0}/demo {0}/demo/config.json",
    "export {0}/demo --trace {0}/demo/progress.json",
    "export {0}/demo {0}/thesis.tex",
    "export {0}/demo --timeline 1 {0}/thesis.tex",
    "sql demo DESCRIBE\u00a0rollouts --runs-dir {0} --csv {0}/thesis.tex",
    "report demo --runs-dir {0} --json {0}/thesis.tex",
    "report demo --runs-dir {0} --png {0}/thesis.png",
    "evaluate demo --runs-dir {0} --json {0}/thesis.tex",
    "doctor --runs-dir {0} --json {0}/thesis.tex",
    "simulate demo --json {0}/thesis.tex",
    "bench index --json {0}/thesis.tex",
    "data {0}/rows.parquet --out {0} --overwrite",
]


@pytest.mark.parametrize("line", REFUSED)
def test_each_command_refuses_to_replace_what_is_anothers(tmp_path: Path, line: str) -> None:
    run_dir = make_run(tmp_path, "demo", (0.5,))
    (run_dir / "progress.json").write_text("{}")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    for name in ("thesis.tex", "thesis.png"):
        (tmp_path / name).write_text("\\documentclass{thesis}")
    before = tree(tmp_path)
    args = [part.replace("\u00a0", " ") for part in line.format(tmp_path).split(" ")]
    done = CliRunner().invoke(main, args)
    assert (type(done.exception), done.exit_code) == (SystemExit, 2), (done.exception, done.output)
    assert any(
        said in done.output.replace("\n", "")
        for said in ("exists already and is no", "is a file of the run", "is an input file")
    ), done.output
    assert tree(tmp_path) == before
