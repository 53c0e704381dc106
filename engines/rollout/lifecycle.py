"""The states of an engine in a run.

`Lifecycle` changes only along these arrows. A death does not change which layout has the GPUs, but
the pool may switch layouts before the engine has restarted.

    SERVING, ENTERING ── enter ────► ENTERING ────────── serve ──────────► SERVING
    SERVING, ENTERING ── stand_by ─► STANDBY ─────────── leave_standby ──► ENTERING
    SERVING, ENTERING ── die ──────► DEAD ────────────── revive ─────────► SERVING
    STANDBY ──────────── die ──────► DEAD_ON_STANDBY ─── revive ─────────► STANDBY
    DEAD ─────────────── stand_by ─► DEAD_ON_STANDBY ─── leave_standby ──► DEAD
    DEAD, DEAD_ON_STANDBY ── lose ─► GONE (final)
"""

from enum import Enum


class Lifecycle(Enum):
    """States of an engine in a run."""

    SERVING = "serving"
    """Has its GPUs and weights: a submitted request starts at once."""
    ENTERING = "entering"
    """Is waking or loading the weights of its stage. Requests wait."""
    STANDBY = "standby"
    """Another layout or the trainer has the GPUs. The engine is parked or asleep, or about to
    be."""
    DEAD = "dead"
    """Is restarting. Requests wait, or move to other engines."""
    DEAD_ON_STANDBY = "dead on standby"
    """Is dead, and another layout has the GPUs. The restart may have to wait."""
    GONE = "gone"
    """The cluster has no room for the engine any more. Other engines take its requests."""
