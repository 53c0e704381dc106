"""Measured latencies of one model on one machine, and how accurately the fit predicts them."""

from enum import StrEnum

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from refrain.schemas.base import Frozen


class PointKind(StrEnum):
    DECODE = "decode"
    """One decoding step of a batch."""
    PREFILL = "prefill"
    """One pass over the prompts of a batch."""
    VERIFY = "verify"
    """One step that checks `window` draft tokens of each sequence."""
    DRAFT = "draft"
    """Drafting `window` tokens for each sequence."""


class ProfilePoint(Frozen):
    """One measurement. Fields that do not belong to its kind keep their defaults."""

    kind: PointKind
    tp_degree: PositiveInt = 1
    """GPUs (or CPU processes) of the engine; unused for drafting."""
    batch: PositiveInt
    """Sequences in the step."""
    context_tokens: NonNegativeInt = 0
    """Context of all sequences together, in tokens; for decode and verify."""
    rms_tokens: NonNegativeFloat = 0.0
    """Root-mean-square prompt length, in tokens; for prefill."""
    window: NonNegativeInt = 0
    """Draft tokens per sequence; for verify and draft."""
    drafter: str | None = None
    """Name of the drafter; for draft."""
    seconds: float = Field(gt=0.0, allow_inf_nan=False)
    """Mean seconds of one step."""
    num_repeats: PositiveInt = 1
    """Steps that `seconds` averages."""

    @model_validator(mode="after")
    def _fields_match_kind(self) -> "ProfilePoint":
        has_context = self.kind in (PointKind.DECODE, PointKind.VERIFY)
        has_window = self.kind in (PointKind.VERIFY, PointKind.DRAFT)
        expected = {
            "context_tokens": (self.context_tokens > 0, has_context),
            "rms_tokens": (self.rms_tokens > 0, self.kind is PointKind.PREFILL),
            "window": (self.window > 0, has_window),
            "drafter": (bool(self.drafter), self.kind is PointKind.DRAFT),
        }
        for field, (is_set, belongs) in expected.items():
            if is_set != belongs:
                raise ValueError(
                    f"a {self.kind} point {'needs' if belongs else 'has no'} `{field}`"
                )
        return self


class Profile(Frozen):
    """All measurements of one model on one kind of hardware. The file is `model_dump_json()`."""

    model_name: str
    model_hash: str
    """Hash of the model's configuration. A profile of a model with another shape is refused."""
    hardware: str
    """Name of the hardware, for example `NVIDIA H100 80GB HBM3`."""
    links: str | None = None
    """Hardware whose data sheet gave the all-reduces, if shards were measured."""
    dtype: str
    """Data type of weights and activations."""
    max_active_tokens: PositiveInt
    """Tokens that the KV cache of an engine of the lowest TP degree holds. Measured points do not
    exceed it."""
    active_tokens_of: dict[PositiveInt, PositiveInt] = {}
    """Tokens that the KV cache holds, by TP degree. Empty in old profiles, which have one value for
    all."""
    points: tuple[ProfilePoint, ...]
    created_s: NonNegativeFloat
    """Unix time at which the profile was completed, in seconds."""
    versions: dict[str, str] = {}
    """Versions of the software that ran."""

    def kv_capacity_tokens(self, tp_degree: int) -> int:
        """Return the tokens that the KV cache of an engine of this TP degree holds."""
        return self.active_tokens_of.get(tp_degree, self.max_active_tokens)

    def of_kind(self, kind: PointKind) -> tuple[ProfilePoint, ...]:
        """Return the points of one kind, in the order measured."""
        return tuple(point for point in self.points if point.kind is kind)


class FitKnot(Frozen):
    """One knot of a fitted curve. Values between knots are interpolated."""

    kind: PointKind
    tp_degree: int | None
    """TP degree. None for drafting."""
    drafter: str | None
    batch: NonNegativeInt
    window: NonNegativeInt
    x: float
    """Decode: context tokens of all sequences. Prefill: RMS prompt length. Otherwise: the batch."""
    seconds: float
    """Seconds of a step. For verify: seconds on top of a decoding step."""


class Accuracy(Frozen):
    """Predicted and measured times on points that the fit did not see."""

    kind: PointKind
    num_points: PositiveInt
    num_extrapolated: NonNegativeInt
    """Points outside the range of the fit."""
    median_error: NonNegativeFloat
    """Median of |predicted - measured| / measured."""
    p90_error: NonNegativeFloat
    """90th percentile of |predicted - measured| / measured."""
