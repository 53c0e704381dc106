"""A drafter's tokenizer must give each token id the meaning that the policy's tokenizer gives."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from refrain.engines.data.dataset import load_tokenizer
from refrain.engines.data.vocabulary import (
    Vocabulary,
    check_ending_tokens,
    check_rows,
    check_same_tokens,
    read_vocabulary,
)
from refrain.engines.inference.sampling.cpu import sample
from refrain.engines.inference.sampling.step_rows import StepRows
from tests.conftest import DEMO

POLICY = Vocabulary(Path("policy"), 40, {0: "a", 1: "b", 2: "c"})


def drafter(tokens: dict[int, str], num_rows: int = 36) -> Vocabulary:
    return Vocabulary(Path("drafter"), num_rows, tokens)


@pytest.mark.parametrize(
    "tokens",
    [{0: "a", 1: "b", 2: "c"}, {0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c", 3: "<more>"}],
)
def test_padding_and_further_tokens_make_no_other_vocabulary(tokens):
    check_same_tokens(drafter(tokens), POLICY, "specactor.draft_models")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (drafter({0: "a", 1: "c", 2: "b"}), "token 1 is 'c' in drafter and 'b' in policy"),
        (drafter({0: "a", 1: "b"}, num_rows=2), "drafter has no row for tokens from 2 to 2"),
        (drafter({}), "has a vocabulary of 36 tokens and policy one of 40. A tokenizer is missing"),
    ],
)
def test_other_tokens_are_refused(given, message):
    with pytest.raises(ValueError, match=f"specactor.draft_models: .*{message}"):
        check_same_tokens(given, POLICY, "specactor.draft_models")


def test_without_tokenizers_as_many_rows_are_taken_for_the_same():
    check_same_tokens(drafter({}, num_rows=40), POLICY, "specactor.draft_models")


def test_the_tokenizer_of_a_directory_is_read(tmp_path):
    ids = json.loads((DEMO / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    read = read_vocabulary(DEMO / "model", 36, trust_remote_code=False)
    assert ids.items() <= {token: id for id, token in read.tokens.items()}.items()
    shutil.copy(DEMO / "model" / "config.json", tmp_path)
    assert read_vocabulary(tmp_path, 36, trust_remote_code=False).tokens == {}


def test_embedding_has_a_row_for_each_token():
    tokenizer = load_tokenizer(DEMO / "model")
    last = max(tokenizer.get_vocab().values())
    check_rows(tokenizer, last + 1, DEMO)
    with pytest.raises(ValueError, match=f"a tokenizer of {last + 1} tokens, .* has {last} rows"):
        check_rows(tokenizer, last, DEMO)
    tokenizer.add_tokens(["<image>"])
    check_rows(tokenizer, last + 1, DEMO)


@pytest.mark.parametrize("ids", [None, 0, 35, [1, 2], []])
def test_ending_tokens_are_of_the_vocabulary(ids):
    check_ending_tokens(ids, 36, DEMO)


@pytest.mark.parametrize("ids", [36, -1, 10**9, [1, 36], "2", [[2]], 2.0])
def test_an_ending_token_that_is_never_sampled_is_refused(ids):
    with pytest.raises(
        ValueError, match=r"eos_token_id=.* but the model has a vocabulary of 36 tokens"
    ):
        check_ending_tokens(ids, 36, DEMO)


def test_models_that_differ_in_padding_share_the_noise():
    """Logits with and without padding columns draw the same tokens."""
    policy = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    policy[:, 36:] = -30.0
    drawn = [_drawn(policy[:, :num_rows].contiguous()) for num_rows in (36, 48)]
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) > 10


def _drawn(logits: torch.Tensor) -> torch.Tensor:
    num = len(logits)
    rows = StepRows(
        positions=torch.arange(num),
        input_rows=torch.arange(num),
        after=0,
        keys=torch.arange(num),
        temperatures=torch.ones(num),
    )
    return sample(logits, logits, rows)[0]
