"""Files that commands write for people: where they can go is known before anything starts."""

from pathlib import Path


def check_folder(file: Path | str | None, option: str = "") -> None:
    """Raises ValueError when a file's directory is not there; None and `-`, standard output, have
    none. `option`: that gives the file, for the message."""
    if file and str(file) != "-" and not Path(file).absolute().parent.is_dir():
        raise ValueError(f"{f'{option} {file}'.strip()}: there is no such directory; make it first")
