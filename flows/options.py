"""Types and options that several commands share. Each number has bounds."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import click

DIRECTORY = click.Path(path_type=Path, file_okay=False)
"""A directory, which may not exist yet."""
FILE = click.Path(path_type=Path, dir_okay=False)
"""A file, which may not exist yet."""
COUNT = click.IntRange(1, 1_000_000)
BYTES = click.IntRange(1, 2**50)
TOKENS = click.IntRange(1, 2**40)
PORT = click.IntRange(1, 65_535)


class Finite(click.FloatRange):
    """A range of finite numbers. `FloatRange` would accept not-a-number (NaN) in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


class Numbers(click.ParamType):
    """A list of whole numbers, for example 1,2,4."""

    name = "list"

    def __init__(self, most: int = 1_000_000) -> None:
        self.most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        if isinstance(value, list):
            return value
        words = [word for word in value.split(",") if word]
        if not all(word.isascii() and word.isdecimal() and len(word) < 20 for word in words):
            self.fail(f"{value!r} is not a list of numbers, for example 1,2,4", param, ctx)
        numbers = [int(word) for word in words]
        if numbers and max(numbers) > self.most:
            self.fail(f"{max(numbers)} is above {self.most:,}", param, ctx)
        return numbers


class DraftModelPath(click.ParamType):
    """A draft model's name and path, for example small=models/small."""

    name = "name=path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, str]:
        if isinstance(value, dict):
            return value
        name, _, path = value.partition("=")
        if not (name and path):
            self.fail(f"{value!r} is not NAME=PATH, for example small=models/small", param, ctx)
        return {"name": name, "path": path}


SECONDS = Finite(0.001, 86_400.0)
count = partial(click.option, type=COUNT, metavar="N")
seed = partial(click.option, "--seed", type=click.IntRange(0, 2**32 - 1), metavar="N")
prefect_port = click.option("--prefect-port", type=PORT, default=4200, show_default=True)
mlflow_port = click.option("--mlflow-port", type=PORT, default=5000, show_default=True)
runs_dir = click.option("--runs-dir", type=DIRECTORY, default=Path("runs"), show_default=True)
