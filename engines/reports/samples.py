"""Show rollouts in the terminal: prompts, responses, rewards, and tokens in colour."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from refrain.engines.reports.tables import plain_table, printable
from refrain.engines.store.samples import Page, Sample, Token

Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token id (`engines.data.tokenizer`)."""
COLOURINGS = ("logprob", "version")
PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
"""Bounds between the colours of tokens, by their probability."""
NUM_VERSION_COLOURS = 4
KEY_CHARACTERS = 8
"""Characters of a prompt's key in a list."""
_SHOWN_TOKENS = 120
"""Tokens of a prompt's end and of a response's beginning in a list."""
_OBSERVED = "observed"
_STYLES = {
    "likely0": "",
    "likely1": "green",
    "likely2": "yellow",
    "likely3": "dark_orange",
    "likely4": "bold red",
    "version0": "",
    "version1": "cyan",
    "version2": "magenta",
    "version3": "yellow",
    _OBSERVED: "italic dim",
}
"""Style of each class of tokens (`token_class`)."""


def token_class(token: Token, colouring: str, versions: Sequence[int]) -> str:
    """Return `likely0` (certain) to `likely4`, `version0` to `version3` in the order of
    `versions`, or `observed` for a token of the environment."""
    if token.logprob is None or token.policy_version is None:
        return _OBSERVED
    if colouring == "version":
        return f"version{versions.index(token.policy_version) % NUM_VERSION_COLOURS}"
    return f"likely{likelihood_level(token.logprob)}"


def likelihood_level(logprob: float) -> int:
    """Return 0 for a token that was nearly certain, up to 4 for one below 1 %."""
    probability = math.exp(logprob)
    return sum(probability < bound for bound in PROBABILITIES)


def runs(
    sample: Sample, pieces: Pieces, colouring: str, limit: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the class and the text of each stretch of tokens of one class, up to `limit` tokens."""
    tokens = list(sample.tokens())[:limit]
    versions = sample.versions
    named = zip(
        (token_class(token, colouring, versions) for token in tokens),
        pieces([token.id for token in tokens]),
        strict=True,
    )
    for name, stretch in groupby(named, key=lambda pair: pair[0]):
        yield name, "".join(piece for _, piece in stretch)


def legend(sample: Sample, colouring: str) -> list[tuple[str, str]]:
    """Return the class and the meaning of each colour."""
    if colouring == "version":
        named = [(f"version{i % NUM_VERSION_COLOURS}", v) for i, v in enumerate(sample.versions)]
        return [(name, f"version {version}") for name, version in named]
    bounds = [f"from {bound:.0%}" for bound in PROBABILITIES]
    words = [*bounds, f"below {PROBABILITIES[-1]:.0%}"]
    return [(f"likely{level}", word) for level, word in enumerate(words)]


def properties(sample: Sample) -> dict[str, str]:
    """Return what the store knows of a rollout beside its tokens, in words."""
    versions = sorted(set(sample.versions))
    return {
        "reward": "not scored" if sample.reward is None else f"{sample.reward:.4g}",
        **{f"reward: {name}": _short(value) for name, value in sample.reward_parts.items()},
        "tokens": f"{sample.response_tokens:,}",
        "finish": sample.finish_reason,
        "entropy": "-" if sample.entropy is None else f"{sample.entropy:.3f} nats a token",
        "policy version": " to ".join(map(str, dict.fromkeys((versions[0], versions[-1])))),
        "epoch": str(sample.epoch),
        "engine": str(sample.engine),
        "drafts": f"{sample.num_accepted_tokens:,} of {sample.num_draft_tokens:,} accepted, "
        f"by {sample.drafter}",
    }


def print_samples(page: Page, pieces: Pieces, colouring: str, console: Console) -> None:
    """Print each sample with the end of its prompt and the beginning of its response."""
    for sample in page.samples:
        console.print(Text(headline(sample), "bold"))
        prompt = "".join(pieces(sample.prompt_token_ids[-_SHOWN_TOKENS:]))
        console.print(Text(printable(prompt, lines=True), "dim"))
        console.print(_coloured(sample, pieces, colouring, _SHOWN_TOKENS))
        num_left = len(sample.response_token_ids) - _SHOWN_TOKENS
        console.print(f".. {num_left:,} more tokens\n" if num_left > 0 else "")
    console.print(counted(page), soft_wrap=True)


def print_sample(sample: Sample, pieces: Pieces, colouring: str, console: Console) -> None:
    """Print everything about one sample."""
    console.print(Text(headline(sample, whole_key=True), "bold"))
    table = plain_table("what", "value", text=("what", "value"), header=False)
    for name, value in properties(sample).items():
        table.add_row(printable(name), printable(value))
    console.print(table)
    console.print("\nprompt", style="bold")
    console.print(Text(printable("".join(pieces(sample.prompt_token_ids)), lines=True)))
    console.print("\nresponse", style="bold")
    console.print(_coloured(sample, pieces, colouring))
    meanings = [(f"{word}  ", _STYLES[name]) for name, word in legend(sample, colouring)]
    console.print(Text.assemble("\ncolours by ", f"{colouring}: ", *meanings))


def headline(sample: Sample, *, whole_key: bool = False) -> str:
    key = sample.prompt_key if whole_key else sample.prompt_key[:KEY_CHARACTERS]
    reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
    return (
        f"step {sample.step}  prompt {printable(key)}  sample {sample.sample_index}  "
        f"reward {reward}  {sample.response_tokens:,} tokens  {sample.finish_reason}"
    )


def counted(page: Page) -> str:
    """Return a sentence about how many samples are shown, and of how many."""
    if page.num_searched is None:
        return f"{len(page.samples):,} of {page.num_matching:,} samples"
    late = ", then the time was over: narrow the search" if page.ended_early else ""
    num = len(page.samples)
    return f"{num:,} found in {page.num_searched:,} of {page.num_matching:,} samples{late}"


def _coloured(sample: Sample, pieces: Pieces, colouring: str, limit: int | None = None) -> Text:
    found = runs(sample, pieces, colouring, limit)
    parts = [(printable(text, lines=True), _STYLES[name]) for name, text in found]
    return Text.assemble(*parts)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}.."
