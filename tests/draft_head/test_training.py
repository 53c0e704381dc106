"""A head's loss and its agreement with the policy are what loops over single tokens compute."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from refrain.engines.draft_head import training
from refrain.engines.draft_head.model import DraftHead
from refrain.engines.draft_head.training import (
    SampledTokens,
    backpropagate,
    hindsight_noise,
    measure,
)

WIDTH, VOCAB, TEMPERATURE, DEPTH = 6, 9, 0.7, 3
CHOSEN = torch.tensor([0, 2, 3, 5, 7, 8])
"""The draft vocabulary."""


def random_head() -> DraftHead:
    torch.manual_seed(1)
    head = DraftHead(WIDTH, CHOSEN, 5).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


def policy_of(num_tokens: int) -> tuple[SampledTokens, Callable[[Tensor], Tensor]]:
    """Return tokens that a policy has sampled in texts of 1 to 5 tokens, and its `lm_head`."""
    torch.manual_seed(0)
    lm_head = torch.randn(VOCAB, WIDTH, dtype=torch.double, requires_grad=True)
    hidden = torch.randn(num_tokens, WIDTH, dtype=torch.double)
    with torch.no_grad():
        probabilities = torch.softmax(hidden @ lm_head.T / TEMPERATURE, -1)
    token_ids = torch.multinomial(probabilities, 1)[:, 0]
    follows = torch.rand(num_tokens) < 0.7
    follows[0] = False
    embeddings = torch.randn(VOCAB, WIDTH, dtype=torch.double)[token_ids]
    return SampledTokens(hidden, embeddings, token_ids, follows), lambda x: x @ lm_head.T


def chosen(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda hidden: logits(hidden)[..., CHOSEN]


def drafts_of(head: DraftHead, tokens: SampledTokens):
    """Yield depth, place and output of every draft, one by one."""
    for start in range(len(tokens.token_ids)):
        state = head.begin(tokens.hidden[start : start + 1])
        for depth in range(1, DEPTH + 1):
            at = start + depth
            if at == len(tokens.token_ids) or not tokens.follows[at]:
                break
            state = head.step(state, tokens.embeddings[at - 1 : at])
            yield depth, at, head.output(state)[0]


def test_loss_and_gradient_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MAX_LOGITS", 4 * VOCAB)  # Chunks of four tokens.
    tokens, all_logits = policy_of(23)
    logits = chosen(all_logits)
    head, looped = random_head(), random_head()
    loss = backpropagate(head, tokens, logits, TEMPERATURE, DEPTH)
    total, weights = torch.zeros((), dtype=torch.double), 0.0
    for depth, at, output in drafts_of(looped, tokens):
        own = torch.softmax(logits(output) / TEMPERATURE, -1)
        target = torch.softmax(logits(tokens.hidden[at]) / TEMPERATURE, -1).detach()
        weight = 0.8 ** (depth - 1)
        total = total + weight * (target * (target / own).log()).sum()
        weights += weight
    (total / weights).backward()
    assert loss == pytest.approx(total.item() / weights, rel=1e-5)
    for (name, mine), other in zip(head.named_parameters(), looped.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_agreement_is_that_of_draws_with_shared_noise() -> None:
    tokens, logits = policy_of(6000)
    head = random_head()
    settings = TEMPERATURE, DEPTH, torch.Generator().manual_seed(0)
    found = measure(head, tokens, logits, chosen(logits), *settings)
    drafts = training.unroll(head, tokens, DEPTH)
    for one, rate in zip(drafts, found.by_depth, strict=True):
        noise = -torch.log(torch.empty(len(one.at), VOCAB).exponential_())
        drawn = (logits(tokens.hidden[one.at]) / TEMPERATURE + noise).argmax(-1)
        scores = chosen(logits)(one.outputs) / TEMPERATURE + noise[:, CHOSEN]
        drafted = CHOSEN[scores.argmax(-1)]
        assert rate == pytest.approx((drawn == drafted).float().mean().item(), abs=0.04)
        assert 0.15 < rate < 0.8


def test_acceptance_counts_drafts_whose_predecessors_are_right() -> None:
    tokens, _ = policy_of(600)
    head = random_head()
    right = [torch.rand(600) < 0.6 for _ in range(DEPTH)]
    chains: dict[int, list[bool]] = {}
    accepted = [0] * DEPTH
    for depth, at, _ in drafts_of(head, tokens):
        own = chains.setdefault(at - depth, [])
        own.append(bool(right[depth - 1][at]))
        accepted[depth - 1] += all(own)
    found = training._count(training.unroll(head, tokens, DEPTH), right)
    assert found.num_accepted == tuple(accepted)
    expected = 1.0 + sum(a / n for a, n in zip(accepted, found.num_drafted, strict=True))
    assert found.acceptance_length == pytest.approx(expected)
    assert (found + found).by_depth == found.by_depth


def test_hindsight_noise_is_gumbel_noise_over_all_draws() -> None:
    torch.manual_seed(0)
    logprobs = torch.tensor([[0.6, 0.3, 0.1, 1e-30]]).log().expand(40_000, -1)
    drawn = torch.multinomial(logprobs.exp(), 1)[:, 0]
    noise = hindsight_noise(logprobs, drawn)
    assert torch.equal((logprobs + noise).argmax(-1), drawn)
    mean, variance = 0.5772, torch.pi**2 / 6
    assert noise.mean(0).tolist() == pytest.approx([mean] * 4, abs=0.04)
    assert noise.var(0).tolist() == pytest.approx([variance] * 4, abs=0.12)


def test_nothing_to_draft_changes_nothing() -> None:
    tokens, logits = policy_of(5)
    alone = tokens._replace(follows=torch.zeros(5, dtype=torch.bool))
    head = random_head()
    assert backpropagate(head, alone, logits, TEMPERATURE, DEPTH) is None
    assert all(parameter.grad is None for parameter in head.parameters())
