"""Result of a benchmark, as in every file under benchmarks/baselines."""

from pydantic import JsonValue

from refrain.schemas.base import Frozen


class BenchReport(Frozen):
    """Report that `refrain bench NAME --json FILE` writes: `json.dumps` of `model_dump()`."""

    name: str
    figures: dict[str, int | float]
    """Numbers to compare over time. Names are flat and end with the unit."""
    rows: tuple[dict[str, JsonValue], ...]
    """Table that the figures summarise."""
    command: str
    """Command that makes this report again."""
    versions: dict[str, str]
    """Versions of the packages that a figure may depend on."""
