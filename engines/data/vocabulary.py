"""Check that token ids mean the same in two models, and that they fit the model's embedding.

Models of one family pad their embeddings to different sizes (Qwen2.5: 151,936 rows for 0.5B,
152,064 for 32B), and may have extra tokens at the end. Only ids that both models have must agree.
The sampling noise depends on the token id, so it does not depend on the number of rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refrain.engines.data.tokenizer import open_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of a model."""

    model: Path
    num_rows: int
    """Number of rows of its embedding, padding included (`vocab_size`)."""
    tokens: Mapping[int, str]
    """Tokens by id. Empty if the model's directory has no tokenizer."""


def read_vocabulary(model: Path, num_rows: int, *, trust_remote_code: bool) -> Vocabulary:
    """Return the vocabulary of a local Hugging Face directory. Raises ValueError when its tokenizer
    cannot be read."""
    if not any((model / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return Vocabulary(model, num_rows, {})
    ids = open_tokenizer(model, trust_remote_code=trust_remote_code).get_vocab()
    return Vocabulary(model, num_rows, {id: token for token, id in ids.items()})


def check_rows(tokenizer: Any, num_rows: int, model: Path) -> None:
    """Raise ValueError if a token has no row in the model's embedding. Added tokens need no row,
    unless they are the begin, end or unknown token."""
    added = set(tokenizer.get_added_vocab().values())
    own = [id for id in tokenizer.get_vocab().values() if id not in added]
    used = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    last = max([*own, *(id for id in used if id is not None)], default=0)
    if last >= num_rows:
        raise ValueError(
            f"{model} has a tokenizer of {last + 1} tokens, but its embedding has {num_rows} rows "
            "(vocab_size in config.json): copy tokenizer and model again from the same source"
        )


def check_ending_tokens(ids: Any, num_rows: int, file: Path) -> None:
    """Raise ValueError for a file's `eos_token_id` that the model cannot sample, because no
    response could end with it."""
    for id in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if not isinstance(id, int) or not 0 <= id < num_rows:
            raise ValueError(
                f"{file} has eos_token_id={ids}, but the model has a vocabulary of {num_rows} "
                "tokens: set it to the token that ends a response"
            )


def check_same_tokens(drafter: Vocabulary, policy: Vocabulary, setting: str) -> None:
    """Raise ValueError if the drafter's tokens differ from the policy's. `setting`: the drafter's
    setting, for the message."""
    fix = "take a smaller model of the same family"
    if not (drafter.tokens and policy.tokens):
        if drafter.num_rows != policy.num_rows:
            raise ValueError(
                f"{setting}: {drafter.model} has a vocabulary of {drafter.num_rows} tokens and "
                f"{policy.model} one of {policy.num_rows}. A tokenizer is missing, so refrain "
                f"cannot check whether only padding differs. Save it beside the model, or {fix}"
            )
        return
    for id in sorted(drafter.tokens.keys() & policy.tokens.keys()):
        if drafter.tokens[id] != policy.tokens[id]:
            raise ValueError(
                f"{setting}: token {id} is {drafter.tokens[id]!r} in {drafter.model} and "
                f"{policy.tokens[id]!r} in {policy.model}: a drafter must have the policy's "
                f"tokens; {fix}"
            )
    if (last := max(policy.tokens)) >= drafter.num_rows:
        raise ValueError(
            f"{setting}: {drafter.model} has no row for tokens from {drafter.num_rows} to {last} "
            f"of {policy.model}: {fix}"
        )
