"""The drafter of the demo has the model's tokens, is far smaller, and most drafts are accepted."""

from itertools import islice

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from refrain.engines.data.dataset import load_tokenizer, read_rows
from refrain.engines.inference.sampling.noise import perturbed_argmax
from tests.conftest import DEMO

NUM_PROMPTS = 12
NUM_TOKENS = 40
"""Length of each response, in tokens."""
OTHER_NOISE = 1000
"""Added to a key to draw with other noise."""


def load(name):
    return Qwen3ForCausalLM.from_pretrained(DEMO / name, local_files_only=True).eval()


@pytest.fixture(scope="module")
def model():
    return load("model")


@pytest.fixture(scope="module")
def drafter():
    return load("drafter")


@torch.no_grad()
def draws(model: Qwen3ForCausalLM, ids: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    """Draw the token at each position of each row, given the tokens before it. Return them as
    [rows, positions]."""
    logits = model(ids, use_cache=False).logits[torch.arange(len(ids))[:, None], positions - 1]
    noise = (keys[:, None].expand_as(positions).flatten(), positions.flatten())
    return perturbed_argmax(logits.flatten(0, 1), *noise).view_as(positions)


def respond(model: Qwen3ForCausalLM, prompts: list[list[int]], keys: Tensor) -> tuple[Tensor, ...]:
    """Return prompts with sampled responses, right-padded, and the positions of the responses."""
    ids = torch.zeros(len(prompts), max(map(len, prompts)) + NUM_TOKENS, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    positions = torch.tensor([len(prompt) for prompt in prompts])[:, None] + torch.arange(
        NUM_TOKENS
    )
    for column in positions.T:
        ids.scatter_(1, column[:, None], draws(model, ids, column[:, None], keys))
    return ids, positions


def test_the_drafter_has_the_models_tokens():
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (DEMO / "drafter" / name).read_bytes() == (DEMO / "model" / name).read_bytes()


def test_shared_noise_makes_more_drafts_right(model, drafter):
    """Draft the model's responses to prompts that neither model was trained on. Drafts with the
    model's noise are right more often than drafts with other noise."""
    tokenizer = load_tokenizer(DEMO / "model")
    rows = islice(read_rows(DEMO / "data" / "validation.parquet"), NUM_PROMPTS)
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for row in rows
    ]
    keys = torch.arange(NUM_PROMPTS)
    ids, positions = respond(model, prompts, keys)
    drawn = ids.gather(1, positions)
    ends = (drawn == tokenizer.eos_token_id).long()
    is_response = ends.cumsum(1) - ends == 0
    accepted, by_chance = (
        (draws(drafter, ids, positions, noise) == drawn)[is_response].double().mean()
        for noise in (keys, keys + OTHER_NOISE)
    )
    assert accepted > 0.85
    assert accepted > by_chance + 0.01
