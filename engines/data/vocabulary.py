"""Whether two models mean the same by their token ids.

Models of one family pad the rows of their embeddings to different sizes (Qwen2.5: 151,936 for
0.5B, 152,064 for 32B), and may have further tokens at the end; what counts are the ids that both
have. The noise of a sample is by token id, so it is the same for these whatever the number of rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.data.tokenizer import open_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of a model."""

    model: Path
    num_rows: int
    """Rows of its embedding, padding included (`vocab_size`)."""
    tokens: Mapping[int, str]
    """Tokens by id; empty: its directory has no tokenizer."""


def read_vocabulary(model: Path, num_rows: int, *, trust_remote_code: bool) -> Vocabulary:
    """Vocabulary of a local Hugging Face directory. Raises ValueError when its tokenizer is not
    one."""
    if not any((model / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return Vocabulary(model, num_rows, {})
    ids = open_tokenizer(model, trust_remote_code=trust_remote_code).get_vocab()
    return Vocabulary(model, num_rows, {id: token for token, id in ids.items()})


def check_rows(tokenizer: Any, num_rows: int, model: Path) -> None:
    """Raises ValueError where tokens have no row in the model's embedding. Those that were added to
    a tokenizer need none as long as no text has them."""
    added = set(tokenizer.get_added_vocab().values())
    own = [id for id in tokenizer.get_vocab().values() if id not in added]
    used = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    last = max([*own, *(id for id in used if id is not None)], default=0)
    if last >= num_rows:
        raise ValueError(
            f"{model} has a tokenizer of {last + 1} tokens, but its embedding has {num_rows} rows "
            "(vocab_size in config.json): copy tokenizer and model again, from one source"
        )


def check_ending_tokens(ids: Any, num_rows: int, file: Path) -> None:
    """Raises ValueError for an `eos_token_id` of a file that the model cannot sample: no response
    would end by it."""
    for id in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if not isinstance(id, int) or not 0 <= id < num_rows:
            raise ValueError(
                f"{file} has eos_token_id={ids}, and the model a vocabulary of {num_rows} tokens: "
                "give the token that ends a response"
            )


def check_same_tokens(drafter: Vocabulary, policy: Vocabulary, setting: str) -> None:
    """Raises ValueError where the drafter's tokens are not the policy's; `setting` names it."""
    mend = "take a smaller model of the same family"
    if not (drafter.tokens and policy.tokens):
        if drafter.num_rows != policy.num_rows:
            raise ValueError(
                f"{setting}: {drafter.model} has a vocabulary of {drafter.num_rows} tokens and "
                f"{policy.model} one of {policy.num_rows}, and not both have a tokenizer that "
                f"would tell whether only padding differs: save it beside the model, or {mend}"
            )
        return
    for id in sorted(drafter.tokens.keys() & policy.tokens.keys()):
        if drafter.tokens[id] != policy.tokens[id]:
            raise ValueError(
                f"{setting}: token {id} is {drafter.tokens[id]!r} in {drafter.model} and "
                f"{policy.tokens[id]!r} in {policy.model}: a drafter must have the policy's "
                f"tokens; {mend}"
            )
    if (last := max(policy.tokens)) >= drafter.num_rows:
        raise ValueError(
            f"{setting}: {drafter.model} has no row for tokens from {drafter.num_rows} to {last} "
            f"of {policy.model}: {mend}"
        )
