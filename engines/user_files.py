"""Read files that users give. Errors name the file and say in plain words what is wrong."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from refrain.engines.paths import check_regular, explain

if TYPE_CHECKING:  # Most readers of a file need no pydantic, which takes 0.1 s to load.
    from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound="BaseModel")


MAX_TEXT_BYTES = 256 * 2**20
"""Largest text file that we read as a whole."""


def read_text(file: Path) -> str:
    """Return the text of a file. Raise ValueError as `read_bytes` does, or if it is not UTF-8."""
    content = read_bytes(file)
    with naming(file):
        return content.decode()


def read_bytes(file: Path) -> bytes:
    """Return the content of a file.

    Raise ValueError as `check_regular` and `naming` do, or if the file is too large.
    """
    check_regular(file)
    if (num_bytes := file.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(
            f"{file} has {num_bytes:,} bytes, more than the limit of {MAX_TEXT_BYTES:,}: give "
            "another file"
        )
    with naming(file):
        return file.read_bytes()


@contextmanager
def naming(file: Path | str) -> Generator[None]:
    """Turn errors of reading a file in the block into a ValueError that names the file.

    Covers missing permissions, text that is not UTF-8 or not JSON, too deep nesting, and too large
    numbers.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.start + 1} is invalid): save it as UTF-8, or "
            "give another file"
        ) from error
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}: {error.msg}"
        raise ValueError(f"{file} is not valid JSON ({problem}): copy it again") from error
    except RecursionError as error:
        raise ValueError(f"{file} cannot be read: it is nested too deeply") from error
    except ValueError as error:
        # After the semicolon, Python's message advises to change a setting of Python.
        raise ValueError(f"{file} cannot be read: {str(error).partition(';')[0]}") from error


@contextmanager
def no_bytecode() -> Generator[None]:
    """Import users' files without creating a `__pycache__` beside them."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise ValueError as `naming` does, or if it has none."""
    text = read_text(file)
    with naming(file):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not contain a JSON object: copy it again")
    return content


def read_model(file: Path, kind: type[Model]) -> Model:
    """Return a run's record from its JSON file. Raise ValueError if the file is damaged."""
    from pydantic import ValidationError

    content = read_bytes(file)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{file} is damaged ({first_problem(error)})") from error


def readable_lines(
    file: Path, kind: type[Model], *, appended: bool = False
) -> tuple[list[Model], list[str]]:
    """Return the records of a file with one record per line, and a message per unreadable line.

    Return empty lists if the file is missing. `appended`: skip a last line without a line end; it
    is being written, or a crash cut it. Raise ValueError as `read_bytes` does.
    """
    from pydantic import ValidationError

    *lines, last = read_bytes(file).split(b"\n") if file.exists() else [b""]
    if last and not appended:
        lines.append(last)
    found, wrong = [], []
    for number, line in enumerate(lines, 1):
        try:
            found.append(kind.model_validate_json(line))
        except ValidationError as error:
            wrong.append(f"{file} line {number} is damaged ({first_problem(error)})")
    return found, wrong


def first_problem(error: "ValidationError") -> str:
    """Return the first problem of a validation error in one line."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the first line of an error's message, cut to `most` characters.

    Return the name of its class if there is no message.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def validated(values: object, source: str, kind: type[Model]) -> Model:
    """Return a config from plain values. Raise ValueError with a line for each refused value."""
    from pydantic import ValidationError

    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(str(part) or repr(part) for part in problem['loc']) or 'config'}: "
            + problem["msg"].removesuffix(f" for {Path!r}")
            + _meant(problem, kind)
            for problem in error.errors()
        ]
        raise ValueError(f"{source} is not a valid config:\n" + "\n".join(lines)) from error


def _meant(problem: Any, kind: "type[BaseModel]") -> str:
    """Return a hint for the message if an unknown setting resembles a known one, else ""."""
    if problem["type"] != "extra_forbidden":
        return ""
    from refrain.schemas.settings import meant_by

    meant = meant_by(".".join(str(part) for part in problem["loc"]), kind)
    return f": did you mean {meant}?" if meant else ""
