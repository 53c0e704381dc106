"""Files that people give: what cannot be read is refused by the file's name, in plain words."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engines.paths import check_regular, explain
from schemas.settings import meant_by

Model = TypeVar("Model", bound=BaseModel)


MAX_TEXT_BYTES = 256 * 2**20
"""Size of a text file that is read whole, at most."""


def read_text(file: Path) -> str:
    """The text of a file. Raises ValueError as `read_bytes` does, and for one that is not UTF-8."""
    content = read_bytes(file)
    with naming(file):
        return content.decode()


def read_bytes(file: Path) -> bytes:
    """The content of a file. Raises ValueError as `check_regular` and `naming` do, and for one that
    is too large to be read whole."""
    check_regular(file)
    if (num_bytes := file.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(
            f"{file} has {num_bytes:,} bytes, and at most {MAX_TEXT_BYTES:,} are read: give the "
            "right file"
        )
    with naming(file):
        return file.read_bytes()


@contextmanager
def naming(file: Path | str) -> Generator[None]:
    """Raises ValueError that names the file, where the block cannot read it: no permission, not
    UTF-8, not JSON, nested too deeply, numbers beyond measure."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is no text in UTF-8 (its byte {error.start + 1} is none): save it as UTF-8, "
            "or give another file"
        ) from error
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}: {error.msg}"
        raise ValueError(f"{file} is not valid JSON ({problem}): copy it again") from error
    except RecursionError as error:
        raise ValueError(f"{file} cannot be read: it is nested too deeply") from error
    except ValueError as error:
        # Python names one of its own settings behind the semicolon.
        raise ValueError(f"{file} cannot be read: {str(error).partition(';')[0]}") from error


@contextmanager
def no_bytecode() -> Generator[None]:
    """Import people's files without a `__pycache__` beside them: to look at one changes nothing."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def read_json_object(file: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises ValueError as `naming` does, and for anything else in it."""
    text = read_text(file)
    with naming(file):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object: copy it again")
    return content


def read_model(file: Path, kind: type[Model]) -> Model:
    """A record of a run, out of its JSON file. Raises ValueError that names a damaged one."""
    content = read_bytes(file)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{file} is damaged ({first_problem(error)})") from error


def readable_lines(
    file: Path, kind: type[Model], *, appended: bool = False
) -> tuple[list[Model], list[str]]:
    """Records of a file that has one a line, none without the file, and what is wrong with lines
    that cannot be read. `appended`: one without its end is being written, or was cut by a crash,
    and is left out. Raises ValueError as `read_bytes` does."""
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


def first_problem(error: ValidationError) -> str:
    """The first of the problems, without pydantic's own explanations."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the first line of an error's message, of so many characters at most, or its class
    where there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def validated(values: object, source: str, kind: type[Model]) -> Model:
    """A config from plain values; raises ValueError with a line per value that is refused."""
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


def _meant(problem: Any, kind: type[BaseModel]) -> str:
    """The setting that an unknown one is like, for the message."""
    if problem["type"] != "extra_forbidden":
        return ""
    meant = meant_by(".".join(str(part) for part in problem["loc"]), kind)
    return f": did you mean {meant}?" if meant else ""
