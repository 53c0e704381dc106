"""How responses are drafted for: from history, by n-grams, by small models."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from schemas.base import Frozen, UnitInterval

HISTORY = "histospec"
"""The drafter that every run has: a prompt's earlier responses."""
NGRAM = "ngram"
"""The drafter that looks for what comes next in the text so far."""


class DraftingConfig(Frozen):
    """A prompt's earlier responses draft its next ones (RhymeRL, section 5). No token changes."""

    enabled: bool = True
    """Off: engines start without speculation."""
    window: Literal["goodput", "paper", "doubling"] = "goodput"
    """Draft tokens per verification. `goodput`: as many as pay, by each token's probability of
    being accepted; `paper`: 2 more after full acceptance and back to 2 after a
    rejection; `doubling`: doubled and halved."""
    max_draft: int = Field(default=16, ge=1, le=64)
    """Longest draft, in tokens."""
    min_match: PositiveInt = 2
    """Tokens that must match before a draft, at least."""
    max_match: PositiveInt = 16
    """Longest match that is looked for, in tokens."""
    siblings: bool = False
    """Samples of one prompt draft for each other while they run, where its history has nothing:
    for a first epoch in which requests start one after the other. Those that run in step have
    little to tell each other."""
    shared_tokens: int = Field(default=2**20, ge=0)
    """Tokens of the index that all prompts share, at most: their last two epochs, or as much of
    them as there is room for, draft where a prompt's own history knows less. 17 bytes each. 0:
    prompts draft from their own history alone."""
    foresee: bool = True
    """Draft what the very sample will draw: its noise is known beforehand. Off: what is most
    rewarded, or most frequent."""
    gate: bool = True
    """Verify only what pays in the running batch, by the run's `profile` or, without one, by step
    times measured while the run goes on. Off: everything that was drafted."""
    plain_share: float = Field(default=1 / 16, ge=0, le=0.5)
    """Share of the time in which nothing is drafted: so what a pass takes without stays known, and
    with it what drafting saves. 0: none; drafts are made all the time where there is a
    `profile`."""
    index_dir: Path | None = None
    """Directory in which that of the run's index files is made, on a disk or in shared memory that
    engines and history workers see; where nodes do not share it, files are copied to each. Default:
    `history` in the run's own directory."""
    index_cpus: PositiveInt | None = None
    """Cores of each node that index histories, its last ones, at low priority. Default: a quarter
    of them, at least one."""
    max_index_bytes: PositiveInt = 64 * 2**30
    """Bytes of index files, where nodes do not share them on each. Beyond this, those that return
    last are compressed, to a third, and then deleted; they are built again from the run's store
    when their prompt returns."""

    @model_validator(mode="after")
    def _matches(self) -> "DraftingConfig":
        if self.min_match > self.max_match:
            raise ValueError(
                f"drafting.min_match ({self.min_match}) exceeds drafting.max_match "
                f"({self.max_match}): lower the first or raise the second"
            )
        return self


class DraftModel(Frozen):
    """A small model that drafts. Its token ids must mean what the policy's do; rows that pad its
    vocabulary may be more or fewer."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Its name among the drafters, and in profiles."""
    path: Path
    """Local Hugging Face directory of a causal language model."""
    num_engines: PositiveInt = 1
    """Processes that serve it, each on a GPU of its own where there are any."""


def _named_apart(models: tuple[DraftModel, ...]) -> tuple[DraftModel, ...]:
    names = [model.name for model in models]
    if len({HISTORY, NGRAM, *names}) < 2 + len(names):
        raise ValueError(
            f"{', '.join(names)}: each needs a name of its own, other than {HISTORY} and {NGRAM}"
        )
    return models


DraftModels = Annotated[tuple[DraftModel, ...], AfterValidator(_named_apart)]


class SpecActorConfig(Frozen):
    """Small models draft ahead of verification, and freed engines race further drafters on the
    slowest responses (SpecActor). No token changes."""

    draft_models: DraftModels = ()
    """Models that draft. None: nothing of this is used but what `drafter` says."""
    drafter: str = HISTORY
    """Who drafts for responses when they begin: `histospec`, `ngram` or one of `draft_models`."""
    ladder: bool = True
    """The draft ladder: with `drafter: histospec` each step begins with the drafter that is the
    fastest by the run's `profile`, at the acceptance of the last steps. Off, without a profile or
    without draft models: always with `drafter`."""
    window: int = Field(default=4, ge=1, le=64)
    """Draft tokens per verification; a draft model is at most twice as many less one ahead."""
    split_gpus: int | None = Field(default=None, ge=2)
    """GPUs that engines and the draft model in use share out, or processes on CPUs: how many each
    has, and `window`, are planned by the run's `profile` before anything starts (Algorithm 1), in
    the place of `rollout.num_engines`, the model's `num_engines` and `window`. Default: these are
    as they are given."""
    expected_acceptance: UnitInterval = 0.7
    """Probability that a draft model's token is right, for which `split_gpus` is planned."""
    coupled: bool = False
    """Draft models rest while a window is verified. Off: drafting goes on meanwhile (decoupled).
    Verification waits in neither case."""
    shared_noise: bool = True
    """Draft models draw with the noise of the response they draft for. Off: with noise of their
    own, for comparison."""
    fuse: bool = True
    """History drafts for the responses of other drafters too, wherever more of its tokens are
    expected to be accepted than of theirs; where both begin alike, the longer draft is taken. Off:
    each response has one drafter."""
    reconfigure_tokens: int = Field(default=1000, ge=0)
    """Tokens after which the window and the coupling of a response are chosen anew, for its
    acceptance and its engine's batch; 0: never."""
    race: bool = True
    """Engines that have become free generate the slowest responses too, with other drafters."""
    max_race_batch: PositiveInt = 8
    """Responses that one engine races at once."""
    race_kv_tokens: int | None = Field(default=2048, ge=0)
    """Context tokens of a response from which on its keys and values go along with a race to an
    engine of the same node, through its shared memory; the one that has them pauses to save them.
    Those of shorter ones, and elsewhere, are computed again. Off with `null`: always."""
    gpu_memory_share: UnitInterval = 0.9
    """Share of a drafter's GPU, which nobody else uses, for its weights and KV cache. Responses
    that the cache has no room for are not drafted for."""
    max_restarts: int = Field(default=3, ge=0)
    """Times one drafter may be restarted in a run; then the run goes on without it."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """All drafters there are beside the history."""
        return (NGRAM, *(model.name for model in self.draft_models))

    @property
    def races(self) -> bool:
        """Whether engines that have become free race."""
        return self.race and bool(self.draft_models)

    @model_validator(mode="after")
    def _known(self) -> "SpecActorConfig":
        names = [HISTORY, *self.drafters]
        if self.drafter not in names:
            raise ValueError(
                f"specactor.drafter: there is no {self.drafter!r}; it is one of {', '.join(names)}"
            )
        return self


class DrafterConfig(Frozen):
    """One drafter process: its model, and how it samples."""

    name: str
    path: Path
    trust_remote_code: bool
    dtype: Literal["float32", "bfloat16"]
    max_model_len: PositiveInt
    max_num_seqs: PositiveInt
    temperature: float
    top_p: float
    top_k: int
    shared_noise: bool
    enforce_eager: bool
    gpu_memory_share: float
    start_timeout_s: float
