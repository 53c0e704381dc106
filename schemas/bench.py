"""What a benchmark found: the shape of every file under benchmarks/baselines."""

from pydantic import JsonValue

from schemas.base import Frozen


class BenchReport(Frozen):
    """A file is `json.dumps` of `model_dump()`, as `refrain bench NAME --json FILE` writes it."""

    name: str
    figures: dict[str, int | float]
    """What is followed over time, under flat names; units are suffixes."""
    rows: tuple[dict[str, JsonValue], ...]
    """What the figures are made of."""
    command: str
    """Makes this report again."""
    versions: dict[str, str]
    """Of the packages on which a figure may depend."""
