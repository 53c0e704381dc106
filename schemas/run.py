"""Addresses of live runs, for processes that attach to them."""

from pathlib import Path

from pydantic import NonNegativeInt

from refrain.schemas.base import Frozen


class RunRef(Frozen):
    """Address of a live run: all that another process needs to attach to it."""

    run_dir: Path
    working_dir: Path
    """Directory that relative paths in the run's config refer to."""
    ray_address: str
    ray_token: Path | None = None
    """File with the token of that address, if the run started its own Ray."""
    ray_namespace: str
    """Namespace of the run's actors. Every process that drives a run has its own."""
    first_version: NonNegativeInt
    """Policy version of the run when its driver process started."""

    def version_of(self, step: int, max_staleness: int) -> int:
        """Return the policy version that rolls out a step: the oldest that the mode allows, as
        newer ones arrive after the engines have begun."""
        return max(self.first_version, step - 1 - max_staleness)
