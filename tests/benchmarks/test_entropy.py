"""The synthetic policy has the requested entropy, learns, and samples with an engine's noise."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from refrain.benchmarks import synthetic
from refrain.benchmarks.synthetic import SEED, VOCABULARY, draw
from refrain.engines.inference.sampling.noise import gumbel_noise
from refrain.flows.cli import main
from refrain.schemas.keys import sample_key
from refrain.schemas.rollout import Split


@pytest.fixture(scope="module", name="drawn")
def what_was_drawn():
    return draw(entropy=0.5, num_epochs=3, num_prompts=64, group_size=4, step_prompts=16)


def test_the_entropy_is_what_was_asked_for_and_what_was_generated():
    drawn = draw(entropy=0.5, num_epochs=1, num_prompts=256, group_size=16, step_prompts=64)
    assert drawn.entropies[0] == pytest.approx(0.5, abs=0.05)
    counts: dict[tuple, np.ndarray] = {}
    for row in drawn.trace.table.to_pylist():
        tokens = [*row["prompt_token_ids"][-2:], *row["response_token_ids"]]
        kind = row["prompt_token_ids"][0]
        for before in zip(tokens, tokens[1:], tokens[2:], strict=False):
            counts.setdefault((kind, *before[:2]), np.zeros(VOCABULARY))[before[2]] += 1
    often = [count for count in counts.values() if count.sum() >= 100]
    shares = [count / count.sum() for count in often]
    found = [-(share[share > 0] * np.log(share[share > 0])).sum() for share in shares]
    assert len(often) > 20
    weights = [count.sum() for count in often]
    assert np.average(found, weights=weights) == pytest.approx(0.5, abs=0.12)


def test_synthetic_policy_learns_rewarded_responses(drawn, monkeypatch):
    assert drawn.right_shares[0] == pytest.approx(0.5, abs=0.01)
    assert drawn.right_shares[2] > drawn.right_shares[1] + 0.03 > 0.56
    monkeypatch.setattr(synthetic, "LEARNING_RATE", 0.0)
    same = draw(entropy=0.5, num_epochs=3, num_prompts=64, group_size=4, step_prompts=16)
    assert same.right_shares[2] == pytest.approx(0.5, abs=0.06)


def test_tokens_are_drawn_with_the_noise_of_an_engine():
    """With equal logits, the sampled token is the one with the largest noise."""
    prompt = np.array([3, 1, 0, VOCABULARY - 1], np.int32)
    key = sample_key(SEED, 2, Split.TRAIN, "prompt-19", 1)
    flat = np.zeros((VOCABULARY,) * 3)
    response = synthetic._generate(flat, prompt, 50, key)
    positions = torch.arange(50) + len(prompt)
    noise = gumbel_noise(torch.full((50,), key), positions, VOCABULARY)
    assert response.tolist() == noise.argmax(-1).tolist()
    assert len(set(response.tolist())) > 10


def test_foreseeing_drafts_more_of_what_is_drawn():
    arguments = ["bench", "entropy", "--epochs", "3", "--prompts", "64", "--json", "-"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)["figures"]
    lengths = {
        name: figures[f"{name}_acceptance_length"]
        for name in ("ngram", "histospec_paper", "histospec_counts", "histospec")
    }
    assert lengths["histospec"] > 1.05 * max(v for k, v in lengths.items() if k != "histospec")
    assert figures["right_last"] > figures["right_first"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--entropy=3.6", "--entropy 3.6: give nats above 0 and below 3.58"),
        ("--entropy=0", "--entropy 0.0: give nats above 0 and below 3.58"),
        ("--epochs=1", "--epochs 1: give at least 2: the first has no history"),
        ("--prompts=100", "--prompts 100: give a multiple of 64"),
        ("--max-num-seqs=0", "--max-num-seqs 0: give at least 1"),
    ],
)
def test_bad_arguments_are_refused(argument, message):
    result = CliRunner().invoke(main, ["bench", "entropy", argument])
    assert result.exit_code == 2
    assert message in result.output
