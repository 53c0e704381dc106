"""Settings of the techniques that place responses on engines and GPUs."""

from pydantic import Field, PositiveInt

from refrain.schemas.base import Frozen


class HistoPipeConfig(Frozen):
    """Rank prompts by the lengths of their last epoch and give every engine long and short ones, so
    that none waits (RhymeRL, section 6). Needs `rollout.placement: histopipe` and `staleness`."""

    last_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Outliers have outgrown their ranking group. They move to another engine or to the next step,
    once at most this share of the group is unfinished. For example, `0.2`: once a fifth is left.
    Raise it if engines still wait for a few responses; 0: they never move."""
    min_growth: float = Field(default=1.1, ge=1.0)
    """A response is an outlier beyond this many times the longest of its ranking group. For
    example, `1.2` is 20 % longer. Raise it if too many move (`rollout/num_migrated`). The factor is
    larger if lengths grew faster in the last epoch."""


class PatConfig(Frozen):
    """Use more GPUs per engine when few responses are left (PAT). No token changes."""

    tp_degrees: tuple[PositiveInt, ...] = ()
    """Higher TP degrees that the GPUs of a node may switch to within a step. For example, `[4, 8]`
    after `rollout.tp_degree: 2`: each is a multiple of the one before. Set them if many GPUs wait
    for a few long responses, with a `profile` that measured all of them. Empty: GPUs never
    switch."""
    gpus_per_node: PositiveInt = 8
    """Number of GPUs of a node, for example `4`. Set it to that of your nodes if you set
    `tp_degrees`: a switch stays within one node."""
