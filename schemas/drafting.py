"""Settings of drafting: from history, by n-grams, by small models."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from refrain.schemas.base import Frozen

HISTORY = "histospec"
"""Drafter that every run has: the earlier responses of a prompt."""
NGRAM = "ngram"
"""Drafter that looks up the last tokens earlier in the same text."""
HEAD = "head"
"""Drafter of `specactor.head`, with history beside it."""
TEXT_DRAFTERS = (NGRAM,)
"""Drafters that need only the text of a request (`engines.specactor.text_drafters`)."""


MATCH, PAPER_MATCH = (2, 16), (3, 7)
"""Least and most tokens of a match. The gate leaves out drafts of short matches that do not pay, so
they cost little. RhymeRL has no such gate, and takes 3 to 7."""


class DraftingSection(Frozen):
    """Draft responses from a prompt's earlier ones (RhymeRL, section 5). No token changes."""

    enabled: bool = True
    """Draft from a prompt's history. Switch it off if few drafts are accepted, as with prompts that
    never return. Off: only the drafters of `specactor` draft, if there are any."""
    max_draft: int = Field(default=16, ge=1, le=64)
    """Longest draft, in tokens, for example `32`. Raise it if `rollout/spec_accept_length` comes
    close to it."""
    index_dir: Path | None = None
    """Directory for the run's index files, on disk or in shared memory, for example `/dev/shm`. Set
    it if the run's directory is on a slow disk. Engines and history workers must see it; nodes that
    do not share it copy files from each other. Default: `history` in the run's directory."""


class DraftingConfig(DraftingSection):
    """The settings, and variants that benchmarks compare. A run has the defaults, which won."""

    window: Literal["goodput", "paper", "doubling"] = "goodput"
    """How many draft tokens a step verifies for a request. `goodput`: as many as pay, by each
    token's probability of being accepted. `paper`: 2 more after full acceptance, back to 2 after a
    rejection, and matches of 3 to 7 tokens instead of 2 to 16. `doubling`: twice as many after full
    acceptance, half after a rejection."""
    shared_tokens: int = Field(default=2**20, ge=0)
    """Size limit, in tokens of 17 bytes each, of the index that all prompts share: 18 MB. It holds
    the last two epochs, or as much as fits, and drafts where a prompt's own history knows less. 0:
    prompts draft only from their own history."""
    max_index_bytes: PositiveInt = 64 * 2**30
    """Disk space for index files in bytes, on each node if nodes do not share the directory. A run
    takes at most half of the disk, too. When it is full, the files of prompts that return last are
    compressed to a third, then deleted and later rebuilt."""
    look_ahead: bool = True
    """Use a sample's noise, which is known beforehand, to draft the tokens that this sample would
    draw. Off: draft the continuation with the highest rewards, or the most frequent one."""
    gate: bool = True
    """Verify only as many drafts as pay in the running batch. Step times come from the run's
    `profile`, or from steps that the engine has measured. Off: verify every draft."""

    @property
    def min_match(self) -> int:
        """Shortest match with the history that a draft may follow, in tokens."""
        return PAPER_MATCH[0] if self.window == "paper" else MATCH[0]

    @property
    def max_match(self) -> int:
        """Longest match that the drafter looks for, in tokens."""
        return PAPER_MATCH[1] if self.window == "paper" else MATCH[1]


class DraftModel(Frozen):
    """A small model that drafts. Its token ids must mean the same as the policy's. The padding of
    its vocabulary may differ."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the drafter, in settings and in profiles, for example `small`."""
    path: Path
    """Local Hugging Face directory of a causal language model, for example `/models/Qwen3-0.6B`."""
    num_engines: PositiveInt = 1
    """Processes that serve the model, each on a GPU of its own if the machine has GPUs. For
    example, `2`. Raise it if too few drafts arrive in time."""


def _named_apart(models: tuple[DraftModel, ...]) -> tuple[DraftModel, ...]:
    names = [model.name for model in models]
    taken = (HISTORY, HEAD, *TEXT_DRAFTERS)
    if len({*taken, *names}) < len(taken) + len(names):
        raise ValueError(
            f"{', '.join(names)}: each needs a name of its own, other than {', '.join(taken)}"
        )
    return models


DEVICE_INDEX_BYTES = 2**29
"""Most bytes of history indexes on a GPU, beside the share of its memory that vLLM takes
(`rollout.model_runner: v2`). Prompts whose index has no room get no drafts from it."""
DRAFTER_MEMORY_SHARE = 0.9
"""Share of a drafter's own GPU for its weights and KV cache. The rest is for its process."""
DraftModels = Annotated[tuple[DraftModel, ...], AfterValidator(_named_apart)]


class SpecActorConfig(Frozen):
    """Small models draft ahead of verification, and idle engines race the slowest responses with
    other drafters (SpecActor). No token changes."""

    draft_models: DraftModels = ()
    """Draft models, for example `[{name: small, path: /models/Qwen3-0.6B, num_engines: 2}]`. Its
    `num_engines` processes (default 1) take a GPU each. Add one if first epochs are slow and GPUs
    are free. Empty: only `drafter` and `head` have an effect in this section."""
    drafter: str = HISTORY
    """Drafter of new responses: `histospec` (history), `ngram` or the name of one of
    `draft_models`. Choose a model if most prompts have no history. With `histospec`, a `profile`
    and draft models, each step begins with the fastest drafter by the profile, at the acceptance of
    the last steps."""
    head: Path | None = None
    """Directory of a draft head, for example `/files/head`, made by `refrain drafter train`. The
    engines draft with it where history knows less, from the first epoch on. Set it if first epochs
    are slow. It needs `pat.tp_degrees` unset. Default: no head."""
    train_head: bool = False
    """Train the head along: after each update the trainer trains it on some of the step's rollouts,
    and engines get it with the weights, for example `true`. Set it if the policy moves so far that
    `rollout/spec_accept_length` falls from epoch to epoch. It costs the trainer a few forward
    passes a step. Off: the head stays as it is."""
    window: int = Field(default=4, ge=1, le=64)
    """Draft tokens per verification, w, for example `6`. A draft model is at most 2w - 1 tokens
    ahead. Raise it if nearly all drafts are accepted. With a profile of the draft model, responses
    get windows of their own."""
    split_gpus: int | None = Field(default=None, ge=2)
    """GPUs (or CPU processes) to divide between engines and the draft model, for example `10`. The
    run's `profile` then determines `rollout.num_engines`, the model's `num_engines` and `window`
    before anything starts (Algorithm 1). Set it if you do not know a good split. Default: you set
    these three yourself."""
    race: bool = True
    """Idle engines race the slowest responses: they generate a copy with another drafter, and the
    first to finish counts. Needs `draft_models`. Switch it off if engines share cores, where copies
    slow down the others."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of all drafters other than history."""
        return (*TEXT_DRAFTERS, *(model.name for model in self.draft_models))

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter besides history."""
        return bool(self.draft_models or self.head) or self.drafter != HISTORY

    @property
    def races(self) -> bool:
        """Whether idle engines race."""
        return self.race and bool(self.draft_models)

    @model_validator(mode="after")
    def _known(self) -> "SpecActorConfig":
        names = [HISTORY, *self.drafters]
        if self.drafter not in names:
            raise ValueError(
                f"specactor.drafter: there is no {self.drafter!r}; it is one of {', '.join(names)}"
            )
        if self.train_head and not self.head:
            raise ValueError(
                "specactor.train_head needs a head to begin with: make one with `refrain drafter "
                "train`, and set specactor.head to its directory"
            )
        return self


class DrafterConfig(Frozen):
    """Settings of one drafter process: its model and its sampling."""

    name: str
    path: Path
    trust_remote_code: bool
    dtype: Literal["float32", "bfloat16"]
    max_model_len: PositiveInt
    max_num_seqs: PositiveInt
    temperature: float
    top_p: float
    top_k: int
    enforce_eager: bool
    start_timeout_s: float
    shared_noise: bool = True
    """Sample with the noise of the response that it drafts for, which gets more drafts accepted.
    Off: with noise of its own, for comparison."""
