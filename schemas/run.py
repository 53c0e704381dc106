"""Addresses of live runs, for processes that do not drive them."""

from pathlib import Path

from pydantic import NonNegativeInt

from schemas.base import Frozen


class RunRef(Frozen):
    """Address of a live run: all that a process needs to attach to it."""

    run_dir: Path
    working_dir: Path
    """Directory that relative paths of the run's config begin at."""
    ray_address: str
    ray_token: Path | None = None
    """File with the token of that address, where the run has a Ray of its own."""
    ray_namespace: str
    """Namespace of the run's actors; every process that drives a run has one of its own."""
    first_version: NonNegativeInt
    """Policy version that the run was at when the process that drives it began."""

    def version_of(self, step: int, max_staleness: int) -> int:
        """Policy version that a step is rolled out with: as old as the mode allows, as newer ones
        come only when the engines have begun already."""
        return max(self.first_version, step - 1 - max_staleness)
