"""Counts that processes keep, added up over processes and calls."""

from dataclasses import dataclass, fields

NUM_SWITCHES_KEPT = 8
"""Switches of which it is known what they took: costs change, and one may be far off."""


@dataclass(frozen=True, slots=True)
class DraftingCounts:
    """Counts of drafting on one engine, since it was last asked."""

    num_steps: int = 0
    """Decoding steps."""
    num_drafting_steps: int = 0
    """Steps that had something to verify."""
    draft_s: float = 0.0
    """Seconds spent on drafting and on deciding what to verify."""
    num_with_index: int = 0
    """Requests whose prompt had a history."""
    num_without_index: int = 0
    """Requests whose prompt had none."""
    num_damaged: int = 0
    """Index files that were refused."""
    num_shared_draft_tokens: int = 0
    """Draft tokens from what all prompts share, of those that were verified."""
    num_shared_accepted_tokens: int = 0
    num_sibling_draft_tokens: int = 0
    """Verified draft tokens from samples of the same prompt that were still running."""
    num_sibling_accepted_tokens: int = 0
    decode_s: float = 0.0
    """Seconds of forward passes that verified nothing, without their part for prompts."""
    verify_s: float = 0.0
    """Seconds of forward passes that verified drafts, likewise."""
    step_costs: tuple[float, ...] = ()
    """Seconds of the parts of a step, as the engine measured them: the step itself, each of a few
    requests and each one beyond (`engines.latency.measured`), each token of context, each request
    that is drafted for, each draft token. None while too little is known."""
    plain_error: float = 0.0
    """Standard error of the seconds without drafts that `step_costs` predicts, as a share of them,
    by the passes that were made without."""
    learnt: str = ""
    """All that drafting has learnt, for an engine in this one's place: JSON of its proposer."""

    def __add__(self, later: "DraftingCounts") -> "DraftingCounts":
        latest = later if later.step_costs else self
        kept = {name: getattr(latest, name) for name in ("step_costs", "plain_error")}
        kept["learnt"] = later.learnt or self.learnt
        names = [f.name for f in fields(self) if f.name not in kept]
        sums = {name: getattr(self, name) + getattr(later, name) for name in names}
        return DraftingCounts(**sums, **kept)


@dataclass(slots=True)
class KVCounts:
    """Counts of leaving and coming with keys and values on one engine, since it was last asked."""

    num_withdrawals: int = 0
    num_requests: int = 0
    """Requests that had keys and values to take along."""
    num_saved: int = 0
    num_failures: int = 0
    """Withdrawals and copies of which nothing could be saved."""
    num_copied: int = 0
    """Requests that were saved and went on, to be raced."""
    copy_s: float = 0.0
    """Seconds that saving these took."""
    num_bytes: int = 0
    pause_s: float = 0.0
    """Seconds until the step under way was done."""
    export_s: float = 0.0
    resume_s: float = 0.0
    """Seconds until the engine was told to go on."""
    num_bytes_ahead: int = 0
    """Bytes that were saved while the engine went on."""
    ahead_s: float = 0.0
    """Seconds that this took, the slowest rank's."""
    num_bytes_loaded: int = 0
    """Bytes that came to this engine with requests, of the rank that took most seconds for its own.
    """
    load_s: float = 0.0
    """Seconds that it took."""


@dataclass(slots=True)
class StreamCounts:
    """Counts of drafting ahead, in tokens of the drafter."""

    num_drafted: int = 0
    num_wasted: int = 0
    """Tokens drafted after one that was wrong, that one included, or after the response's end."""
    num_failures: int = 0
    """Times that drafts were thrown away."""
    max_wasted: int = 0
    """Most tokens that one failure wasted."""
    num_steps: int = 0
    """Steps of the drafter: one token of each response that it drafts for then."""
    work_s: float = 0.0
    """Seconds in which it drafted, or heard what was verified."""

    def add(self, other: "StreamCounts") -> None:
        self.num_steps += other.num_steps
        self.work_s += other.work_s
        self.num_drafted += other.num_drafted
        self.num_wasted += other.num_wasted
        self.num_failures += other.num_failures
        self.max_wasted = max(self.max_wasted, other.max_wasted)


@dataclass(frozen=True, slots=True)
class LibraryCounts:
    """Counts of history indexes, since the run or its history workers were started; sizes as they
    are."""

    num_indexes: int = 0
    """Index files."""
    num_bytes: int = 0
    num_built: int = 0
    num_damaged: int = 0
    """Files that were refused and built again."""
    num_evicted: int = 0
    """Files deleted for want of room."""
    num_compressed: int = 0
    """Files compressed for want of room."""
    num_restored: int = 0
    """Compressed files made whole again."""
    num_copied: int = 0
    """Files that came from another node."""
    build_s: float = 0.0
    """Seconds of a core spent on building."""

    def __add__(self, other: "LibraryCounts") -> "LibraryCounts":
        names = LibraryCounts.__slots__
        return LibraryCounts(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class MoveCounts:
    """Counts of the moves of one generation stage."""

    num_migrated: int = 0
    """Requests that went on on another engine."""
    num_deferred: int = 0
    """Requests left to the next step."""
    num_raced: int = 0
    """Copies of requests that were begun on further engines."""
    num_raced_with_kv: int = 0
    """Copies among these that took their keys and values along."""
    num_races_won: int = 0
    """Requests of which such a copy finished first."""
    wasted_tokens: int = 0
    """Tokens that the copies which lost generated since they joined, as far as it is known."""
    num_diverged: int = 0
    """Copies that finished after the winner, and with other tokens: in float32 there is none."""
    num_switches: int = 0
    """Switches of GPUs to another TP degree, those back to the base of a pool that was done not
    counted."""

    def __add__(self, later: "MoveCounts") -> "MoveCounts":
        names = MoveCounts.__slots__
        return MoveCounts(*(getattr(self, name) + getattr(later, name) for name in names))


@dataclass(frozen=True, slots=True)
class SwitchCounts:
    """Seconds and rates of the last switches of GPUs to another TP degree, the newest last."""

    control_s: tuple[float, ...] = ()
    """Seconds of each from when its requests were taken until the new layout had its GPUs, without
    those of saving keys and values."""
    link_bytes_per_s: tuple[float, ...] = ()
    """Bytes per second that a rank took keys and values in with, of each engine that they came
    to."""

    def __add__(self, later: "SwitchCounts") -> "SwitchCounts":
        """Both, as far as they are the last ones."""
        names = SwitchCounts.__slots__
        both = {name: getattr(self, name) + getattr(later, name) for name in names}
        return SwitchCounts(**{name: values[-NUM_SWITCHES_KEPT:] for name, values in both.items()})
