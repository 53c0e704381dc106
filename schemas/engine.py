"""What the driver gives a rollout engine besides its settings."""

from refrain.schemas.base import Frozen


class EngineSetup(Frozen):
    """GPUs, measurements and state that an engine starts with. The driver knows them only when the
    run starts."""

    devices: tuple[int, ...] = ()
    """GPUs of its node, by rank. Empty: those that Ray assigns."""
    keeps_weights: bool = True
    """Whether its weights stay in memory while it is parked."""
    exports_metrics: bool = False
    """Whether vLLM's metrics appear among those of its Ray node."""
    profile_json: str | None = None
    """The run's `schemas.latency.Profile` as JSON, for the gate. None: step times are measured."""
    learnt: str = ""
    """See `schemas.counts.DraftingCounts`; empty: nothing yet."""


ALONE = EngineSetup()
"""The setup of an engine with GPUs of its own, before anything is measured or learnt."""
