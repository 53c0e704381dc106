"""Counts that processes keep. They are added up over processes and calls."""

from dataclasses import dataclass, fields

NUM_SWITCHES_KEPT = 8
"""Switches whose costs are kept. Costs change, and a single one may be far off."""


@dataclass(frozen=True, slots=True)
class DraftingCounts:
    """Counts of drafting on one engine since the last request for them."""

    num_steps: int = 0
    """Decoding steps."""
    num_drafting_steps: int = 0
    """Steps that verified drafts."""
    draft_s: float = 0.0
    """Seconds spent drafting and choosing drafts to verify."""
    num_with_index: int = 0
    """Requests whose prompt had a history."""
    num_without_index: int = 0
    """Requests whose prompt had none."""
    num_damaged: int = 0
    """Index files that were refused."""
    num_shared_draft_tokens: int = 0
    """Verified draft tokens from the index that all prompts share."""
    num_shared_accepted_tokens: int = 0
    decode_s: float = 0.0
    """Seconds of forward passes without drafts, without their time for prompts."""
    verify_s: float = 0.0
    """Seconds of forward passes that verified drafts, without their time for prompts."""
    step_costs: tuple[float, ...] = ()
    """Seconds that each part of a step takes, as the engine measured them: the step itself, each of
    the first few requests, each further request (`engines.latency.measured`), each token of
    context, each request with drafts, each draft token. Empty while too little is known."""
    plain_error: float = 0.0
    """Relative standard error with which `step_costs` predicts passes without drafts, measured on
    such passes."""
    learnt: str = ""
    """Learnt state of its proposer as JSON, for an engine that replaces this one."""

    def __add__(self, later: "DraftingCounts") -> "DraftingCounts":
        latest = later if later.step_costs else self
        kept = {name: getattr(latest, name) for name in ("step_costs", "plain_error")}
        kept["learnt"] = later.learnt or self.learnt
        names = [f.name for f in fields(self) if f.name not in kept]
        sums = {name: getattr(self, name) + getattr(later, name) for name in names}
        return DraftingCounts(**sums, **kept)


@dataclass(slots=True)
class KVCounts:
    """Counts of saving and loading KV caches of moved requests on one engine, since the last
    request for them."""

    num_withdrawals: int = 0
    num_requests: int = 0
    """Requests that had a KV cache to take along."""
    num_saved: int = 0
    num_failures: int = 0
    """Withdrawals and copies that could save nothing."""
    num_copied: int = 0
    """Requests that were saved for a race and went on."""
    copy_s: float = 0.0
    """Seconds spent saving these copies."""
    num_bytes: int = 0
    pause_s: float = 0.0
    """Seconds until the running step had ended."""
    export_s: float = 0.0
    resume_s: float = 0.0
    """Seconds until the engine received the order to go on."""
    num_bytes_ahead: int = 0
    """Bytes that were saved while the engine went on."""
    ahead_s: float = 0.0
    """Seconds that the slowest rank took to save these bytes."""
    num_bytes_loaded: int = 0
    """Bytes that arrived with requests, on the rank that took longest to load its bytes."""
    load_s: float = 0.0
    """Seconds that this rank took."""


@dataclass(slots=True)
class StreamCounts:
    """Counts of drafting ahead, in tokens of the drafter."""

    num_drafted: int = 0
    num_wasted: int = 0
    """Tokens drafted after the end of the response or from the first wrong token on, which counts
    too."""
    num_failures: int = 0
    """Times that drafts were thrown away."""
    max_wasted: int = 0
    """Most tokens that one failure wasted."""
    num_steps: int = 0
    """Steps of the drafter. Each drafts one token for every response it is drafting for."""
    work_s: float = 0.0
    """Seconds in which the drafter drafted or received verified tokens."""

    def add(self, other: "StreamCounts") -> None:
        self.num_steps += other.num_steps
        self.work_s += other.work_s
        self.num_drafted += other.num_drafted
        self.num_wasted += other.num_wasted
        self.num_failures += other.num_failures
        self.max_wasted = max(self.max_wasted, other.max_wasted)


@dataclass(frozen=True, slots=True)
class LibraryCounts:
    """Counts of history indexes since the run, or its history workers, started. Sizes are
    current."""

    num_indexes: int = 0
    """Index files."""
    num_bytes: int = 0
    num_built: int = 0
    num_damaged: int = 0
    """Files that were refused and built again."""
    num_evicted: int = 0
    """Files deleted to free space."""
    num_compressed: int = 0
    """Files compressed to free space."""
    num_restored: int = 0
    """Compressed files that were unpacked."""
    num_copied: int = 0
    """Files that came from another node."""
    build_s: float = 0.0
    """Core seconds spent building indexes."""

    def __add__(self, other: "LibraryCounts") -> "LibraryCounts":
        names = LibraryCounts.__slots__
        return LibraryCounts(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class MoveCounts:
    """Counts of moves in one generation stage."""

    num_migrated: int = 0
    """Requests that continued on another engine."""
    num_deferred: int = 0
    """Requests deferred to the next step."""
    num_raced: int = 0
    """Copies of requests that other engines started."""
    num_raced_with_kv: int = 0
    """Copies among these that got the request's KV cache."""
    num_races_won: int = 0
    """Requests whose copy finished first."""
    wasted_tokens: int = 0
    """Tokens that losing copies generated since they started, where known."""
    num_diverged: int = 0
    """Copies that finished after the winner with other tokens. In float32 there are none."""
    num_switches: int = 0
    """Switches of GPUs to another TP degree. Switches of a finished pool back to its base do not
    count."""

    def __add__(self, later: "MoveCounts") -> "MoveCounts":
        names = MoveCounts.__slots__
        return MoveCounts(*(getattr(self, name) + getattr(later, name) for name in names))


@dataclass(frozen=True, slots=True)
class SwitchCounts:
    """Seconds and rates of the last switches to another TP degree, the newest last."""

    control_s: tuple[float, ...] = ()
    """Seconds of each switch from taking its requests until the new layout has its GPUs, without
    the time for saving the KV cache."""
    link_bytes_per_s: tuple[float, ...] = ()
    """Bytes per second at which a rank loaded KV caches, for each engine that received some."""

    def __add__(self, later: "SwitchCounts") -> "SwitchCounts":
        """Return both, limited to the last `NUM_SWITCHES_KEPT`."""
        names = SwitchCounts.__slots__
        both = {name: getattr(self, name) + getattr(later, name) for name in names}
        return SwitchCounts(**{name: values[-NUM_SWITCHES_KEPT:] for name, values in both.items()})
