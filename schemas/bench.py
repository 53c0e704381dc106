"""Result of a benchmark: the shape of every file under benchmarks/baselines."""

from pydantic import JsonValue

from schemas.base import Frozen


class BenchReport(Frozen):
    """A file is `json.dumps` of `model_dump()`, as `refrain bench NAME --json FILE` writes it."""

    name: str
    figures: dict[str, int | float]
    """Numbers to follow over time, under flat names; units are suffixes."""
    rows: tuple[dict[str, JsonValue], ...]
    """Table that the figures summarise."""
    command: str
    """Makes this report again."""
    versions: dict[str, str]
    """Versions of the packages on which a figure may depend."""
