"""Files that commands write for the user.

Commands check the path before they start. They write a file completely or leave it as it was. They
replace an existing file only if it is of the same kind, and belongs to no run and no model.
"""

import os
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from refrain.engines.durable import replacing, write_durably
from refrain.engines.paths import explain

JSON, PARQUET, PNG, HTML, CSV = "JSON", "Parquet", "PNG", "HTML", "CSV"
_BEGINNINGS = {JSON: (b"{", b"["), PARQUET: (b"PAR1",), PNG: (b"\x89PNG",), HTML: (b"<",)}
_TABLES = ("", ".csv", ".tsv", ".txt")
"""Suffixes of files that may be CSV. The content of a CSV file does not show its kind."""
_TERMINALS = (4, 5, *range(136, 144))
"""Major device numbers of terminals in Linux."""


def check_output(file: Path | str | None, kind: str, option: str = "") -> None:
    """Raise ValueError when a file cannot be written, or when it exists and must not be replaced.

    None and `-` (standard output) are always fine. `option`: the option's name, for the message.
    """
    if not file or str(file) == "-":
        return
    path, given = Path(file), f"{option} {file}".strip()
    try:
        _check_path(path, kind, given)
    except OSError as error:
        raise ValueError(explain(error, given)) from error


def _check_path(path: Path, kind: str, given: str) -> None:
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{given}: there is no such directory; make it first")
    if kind == PNG and path.suffix != ".png":
        raise ValueError(f"{given}: pictures are PNG; give a name that ends in .png")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ValueError(f"{given}: this user may not write to its directory: give another path")
    if path.is_symlink():
        path.stat()  # Raises OSError for a broken link, which is not replaced.
    if path.is_dir():
        raise ValueError(f"{given} is a directory: give a file's name")
    if not path.exists():
        return
    if not path.is_file():
        _check_special(path, given)
    elif owner := _owner(path.resolve()):
        raise ValueError(f"{given} is a file of {owner} and is not replaced: give another name")
    elif not _is_of(path, kind):
        raise ValueError(
            f"{given} exists already and is no {kind} file: move it away, or give another name"
        )


def write_output(file: Path | str, text: str) -> None:
    """Write text to a checked file, or to standard output for `-`."""
    if str(file) == "-":
        sys.stdout.write(text)
    elif Path(file).exists() and not Path(file).is_file():
        Path(file).write_text(text)
    else:
        write_durably(Path(file).resolve(), text)


@contextmanager
def writing(file: Path | str) -> Generator[Path]:
    """Yield a temporary path to write to. After the block, its file replaces the checked one."""
    if Path(file).exists() and not Path(file).is_file():
        yield Path(file)
        return
    with replacing(Path(file).resolve()) as unfinished:
        yield unfinished


@contextmanager
def making(directory: Path) -> Generator[None]:
    """Make a directory for the block's files. If the block fails, remove new empty directories."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):  # The directory was not made, or is not empty.
                place.rmdir()
        raise


def _check_special(path: Path, given: str) -> None:
    """Raise ValueError unless the path is /dev/null, a terminal or a pipe with a reader."""
    status = path.stat()
    mode = status.st_mode
    if stat.S_ISCHR(mode) and os.major(status.st_rdev) in _TERMINALS:
        return
    if status.st_rdev == Path(os.devnull).stat().st_rdev:
        return
    try:
        if not stat.S_ISFIFO(mode):
            raise OSError
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        raise ValueError(f"{given} is no file, and nobody reads from it: give a file") from error


def _owner(path: Path) -> str:
    """Return the run, checkpoint or model that a file belongs to. Empty: none."""
    # Imported here, because these modules import numpy and pyarrow.
    from refrain.engines.learn.checkpoint import STATE_FILE
    from refrain.tasks.run.run_dir import is_run

    for directory in path.parents:
        if is_run(directory):
            return f"the run in {directory}"
        if (directory / STATE_FILE).is_file():
            return f"the checkpoint in {directory}"
    return f"the model in {path.parent}" if any(path.parent.glob("*.safetensors")) else ""


def _is_of(path: Path, kind: str) -> bool:
    with path.open("rb") as content:
        beginning = content.read(1024).lstrip()
    if kind == CSV:
        return path.suffix in _TABLES and b"\0" not in beginning
    return not beginning or beginning.startswith(_BEGINNINGS[kind])
