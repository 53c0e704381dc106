"""Requests to rollout engines, and their results.

These are plain dataclasses, not pydantic models: thousands of them travel between Ray actors, and
their prompts were validated before.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `refrain samples` needs these classes at once, without pydantic.
    from refrain.schemas.environment import EnvironmentTask


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its response."""
    LENGTH = "length"
    """The response was cut at `max_response_tokens`."""
    TURNS = "turns"
    """The conversation was cut after its last turn (`environment.max_turns`)."""
    TIME = "time"
    """The conversation was cut because the environment took too long to answer."""
    CONTEXT = "context"
    """The conversation was cut because an observation did not fit into `max_response_tokens`."""
    FAILED = "failed"
    """The environment failed (`environment.on_error`)."""


MAX_EXPERTS = 255
"""Most experts of a layer that a byte of `Generated.experts` can tell apart."""
OVERLONG = (FinishReason.LENGTH, FinishReason.CONTEXT)
"""Reasons of a response that was cut because it had no room left."""


@dataclass(frozen=True, slots=True)
class RequestId:
    """Unique id of one rollout in a run. It stays the same after a restart."""

    split: Split
    step: int
    prompt_key: str
    sample_index: int

    def __str__(self) -> str:
        return f"{self.split}/{self.step}/{self.prompt_key}/{self.sample_index}"

    def __reduce__(self) -> tuple[type, tuple[Split, int, str, int]]:
        """Engines send an id a request several times a second: by fields it is pickled in a third
        of the time."""
        return RequestId, (self.split, self.step, self.prompt_key, self.sample_index)

    @property
    def origin(self) -> "RequestId":
        """Id of the sample in the step whose plan drew it. A deferred one has a negative index."""
        if self.sample_index >= 0:
            return self
        return replace(self, step=self.step - 1, sample_index=-1 - self.sample_index)


@dataclass(frozen=True, slots=True)
class LengthHistory:
    """Lengths of the responses to one prompt in the last step that rolled it out."""

    median_tokens: float
    longest_tokens: int
    previous_median_tokens: float | None = None
    """Median response length in the step before that one, in tokens. None if there is none."""
    tokens_per_pass: float = 1.0
    """Tokens of all its responses / their forward passes; 1 if no draft was accepted."""
    mean_wait_s: float = 0.0
    """Mean seconds in which a response waited for its environment."""
    observed_per_token: float = 0.0
    """Tokens that the environment gave / tokens that the policy sampled."""

    @property
    def context_per_token(self) -> float:
        """Tokens by which the context grows for each sampled token."""
        return 1.0 + self.observed_per_token


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """How a request, or all requests of an engine, are drafted for."""

    drafter: str
    """Name of the drafter, as in the latency model."""
    window: int
    """Draft tokens per verification, at least 1."""
    coupled: bool = True
    """Drafting and verification take turns. Decoupled, the drafter continues while its last window
    is verified (SpecActor, section 4.1)."""


@dataclass(frozen=True, slots=True)
class DraftProgress:
    """Drafts of one unfinished request since its current setting began."""

    setting: DraftSetting | None
    """Current draft setting. None: the request gets no drafts."""
    num_draft_tokens: int = 0
    """Draft tokens that were verified."""
    num_accepted_tokens: int = 0
    num_rejections: int = 0
    """Verifications that rejected a token. They do not check the tokens after it."""

    @property
    def acceptance(self) -> float | None:
        """Probability that a draft token is accepted if all before it were: accepted tokens /
        checked tokens. It does not depend on the lengths of drafts. None before the first
        verification."""
        num_looked_at = self.num_accepted_tokens + self.num_rejections
        return self.num_accepted_tokens / num_looked_at if num_looked_at else None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Consecutive tokens of a response that one policy version generated."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: tokens that the policy sampled, then tokens that it observed."""

    num_sampled: int
    num_observed: int | None = None
    """Tokens of the environment's answer, with the beginning of the next turn. None: there is no
    answer yet. In the last turn of a finished response, None: the response ended."""
    waited_s: float = 0.0
    """Seconds from the end of the turn to the answer."""
    score: float | None = None
    """The environment's score of this turn. None: it gave none."""
    num_calls: int = 0
    """Tool calls of this turn."""
    num_failed_calls: int = 0
    """Tool calls that raised an exception."""
    ended_s: float | None = field(default=None, compare=False)
    """Unix time at which the turn ended. None: an older refrain recorded it."""
    num_draft_tokens: int = 0
    """Draft tokens of this turn that were verified."""
    num_accepted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Sampled and observed tokens."""
        return self.num_sampled + (self.num_observed or 0)


@dataclass(frozen=True, slots=True)
class SavedKV:
    """KV cache of a withdrawn request, for an engine on the same node."""

    path: str
    """Directory with one file per rank that had some of the heads."""
    num_tokens: int
    """Tokens of the prompt and of the response so far, without the last one."""
    tp_degree: int
    """Ranks of the engine that saved it."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample to generate, or to continue where another engine stopped."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    sample_key: int
    """Key of the noise (`schemas.keys.sample_key`)."""
    max_response_tokens: int
    generated: "Generated | None" = None
    """Tokens generated before the request was withdrawn."""
    deferred_from: int | None = None
    """Step whose plan drew it, if the request was deferred to the next one."""
    drafting: DraftSetting | None = None
    """Draft setting. None: the engine's default."""
    kv: SavedKV | None = None
    """KV cache of the generated tokens. None: it is computed again."""
    task: "EnvironmentTask | None" = None
    """What the sample's environment starts with. None: a single turn, without an environment."""

    @property
    def origin(self) -> RequestId:
        """Id of the sample in the step whose plan drew it."""
        return self.id.origin

    @property
    def origin_step(self) -> int:
        """Step whose plan drew it."""
        return self.origin.step

    def deferred(self) -> "RolloutRequest":
        """Return this sample as a request of the next step. A sample is deferred only once.

        Its index becomes negative (`-1 - index`), as the next step may have the same prompt.
        """
        assert self.deferred_from is None, f"{self.id} was deferred before"
        id = self.id
        return replace(
            self,
            id=replace(id, step=id.step + 1, sample_index=-1 - id.sample_index),
            deferred_from=id.step,
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of one response, or of its beginning, with everything recorded about them."""

    token_ids: Sequence[int]
    """Tokens after the prompt, sampled and observed, in order. Engines give arrays, which travel in
    one piece."""
    inference_logprobs: Sequence[float]
    """Log-probability of each sampled token under softmax(logits / T), before top-k and top-p;
    [num_sampled]."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens. The lengths of the spans add up to num_sampled."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verifications: int = 0
    """Forward passes that verified at least one draft token."""
    num_rejections: int = 0
    """Verifications that rejected a token."""
    turns: tuple[Turn, ...] = ()
    """Turns that have ended, in order. Later tokens belong to the turn that goes on. The turns of a
    finished conversation cover all its tokens. Empty without an environment: all tokens are
    sampled."""
    score: float | None = None
    """The environment's score of the whole response. None: it gave none."""
    experts: bytes = field(default=b"", compare=False, repr=False)
    """Experts that the engine's routers chose (`trainer.routing_replay`): one byte for each
    position from the prompt's first on, layer with experts, and choice, in this order. A byte is
    the number of the expert plus one; 0: unknown. Positions without a row at the end are unknown
    too. Empty: not recorded."""

    @property
    def num_observed(self) -> int:
        """Tokens that the environment gave."""
        return sum(turn.num_observed or 0 for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.token_ids) - self.num_observed

    @property
    def sampled(self) -> tuple[range, ...]:
        """Indices of the sampled tokens: one range a turn, and one for a turn that goes on."""
        starts = list(accumulate((turn.num_tokens for turn in self.turns), initial=0))
        ended = zip(starts, self.turns, strict=False)
        own = [range(start, start + turn.num_sampled) for start, turn in ended]
        going_on = range(starts[-1], len(self.token_ids))
        return (*own, going_on) if going_on else tuple(own)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample."""

    request: RolloutRequest
    generated: Generated
    finish_reason: FinishReason
    engine: int
    """Engine that finished it."""
    started_s: float
    """Unix time at which it was first submitted to that engine."""
    finished_s: float
    num_cached_tokens: int = 0
    """Tokens whose KV cache existed when it arrived at that engine: moved, or in the engine's
    cache."""

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return self.generated.num_sampled

    @property
    def token_digest(self) -> bytes:
        """Digest of the response's tokens, to compare them without having them."""
        return blake2b(array("i", self.generated.token_ids), digest_size=8).digest()

    def without_tokens(self, row: int) -> "FinishedRollout":
        """Return this rollout without its tokens. `row`: index of its row in the table of
        tokens."""
        return FinishedRollout(
            id=self.id,
            engine=self.engine,
            finish_reason=self.finish_reason,
            num_tokens=self.num_tokens,
            num_observed=self.generated.num_observed,
            num_draft_tokens=self.generated.num_draft_tokens,
            num_accepted_tokens=self.generated.num_accepted_tokens,
            num_cached_tokens=self.num_cached_tokens,
            token_digest=self.token_digest,
            row=row,
        )


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """One finished sample without its tokens."""

    id: RequestId
    engine: int
    finish_reason: FinishReason
    num_tokens: int
    """Tokens that the policy sampled."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_cached_tokens: int
    token_digest: bytes
    """Digest of the response's tokens, sampled and observed."""
    row: int
    """Index of its row in `rows`."""
    rows: Any = None
    """Rows of all rollouts that were reported together: the table, or a Ray object reference to its
    Arrow stream."""
    num_observed: int = 0
    """Tokens that the environment gave."""
