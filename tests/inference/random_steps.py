"""Make random sampling steps, and compute their tokens by the definition, request by request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from refrain.engines.inference.sampling.noise import perturbed_argmax
from refrain.engines.inference.sampling.step_rows import REJECTED, LogitColumns, StepRows

CHUNK = 2**22


@dataclass(frozen=True)
class Step:
    logits: Tensor
    drawn_from: Tensor
    rows: StepRows
    tokens: list[list[int]]
    """Tokens that each request emits."""
    logprobs: list[list[float]]


def make_step(
    seed: int,
    num_rows: int,
    vocab_size: int,
    *,
    drafted: bool = True,
    truncated: bool = False,
    dtype: torch.dtype = torch.float32,
    greedy_only: bool = False,
) -> Step:
    """Return a step with ties and -inf among its logits, and many temperatures, 0 included.

    About 70 % of the draft tokens are right. The logits lie in a buffer that is wider than the
    vocabulary.
    """
    random = torch.Generator().manual_seed(seed)
    counts = (
        torch.randint(1, 18, (num_rows,), generator=random) if drafted else torch.ones(num_rows)
    )
    ends = counts.cumsum(0)
    num_requests = int((ends < num_rows).sum()) + 1
    ends = ends[:num_requests].clamp(max=num_rows).int()
    logits = torch.randn(num_rows, vocab_size + 8, generator=random) * 3
    logits = (logits * 4).round().div(4).to(dtype)[:, :vocab_size]
    logits[torch.rand(logits.shape, generator=random) < 0.1] = -torch.inf
    logits[:, 0] = logits[:, 0].clamp(min=-9.0)
    drawn_from = logits
    if truncated:
        cut = torch.rand(logits.shape, generator=random) < 0.7
        cut.scatter_(1, logits.argmax(1, keepdim=True), value=False)
        drawn_from = torch.empty_strided(logits.shape, logits.stride(), dtype=dtype)
        drawn_from.copy_(logits.masked_fill(cut, -torch.inf))
    indices = torch.int64 if drafted else torch.int32
    temperatures = torch.rand(num_requests, generator=random) + 0.5
    temperatures[torch.rand(num_requests, generator=random) < 0.2] = 0.0
    rows = StepRows(
        positions=torch.randint(0, 40_000, (num_rows,), generator=random),
        # vLLM's index type depends on whether the step has drafts.
        input_rows=torch.randperm(num_rows, generator=random).to(indices) + 1,
        after=1,
        keys=torch.randint(-(2**63), 2**63 - 1, (num_requests,), generator=random),
        temperatures=None if greedy_only else temperatures,
    )
    return _with_drafts(logits, drawn_from, rows, ends, drafted, random)


def from_few(step: Step) -> tuple[Tensor, StepRows, Tensor]:
    """Return the arguments of `Foresee` for every third token alone, and the tokens that a step
    without drafts draws then."""
    size = step.logits.shape[1]
    token_ids = torch.arange(0, size, 3)
    few = step.drawn_from[:, token_ids]
    drawn_from = torch.full_like(step.logits, -torch.inf).index_copy(1, token_ids, few)
    ends = torch.arange(1, len(few) + 1)
    tokens, _ = _by_definition(step.logits, drawn_from, step.rows, ends)
    return few, replace(step.rows, columns=LogitColumns(token_ids, size)), tokens.int()


def _with_drafts(
    logits: Tensor,
    drawn_from: Tensor,
    rows: StepRows,
    ends: Tensor,
    drafted: bool,
    random: torch.Generator,
) -> Step:
    sampled, logprobs = _by_definition(logits, drawn_from, rows, ends)
    tokens, kept, drafts, first = [], [], [], 0
    for end in ends.tolist():
        own = sampled[first:end].tolist()
        right = torch.rand(len(own) - 1, generator=random) < 0.7
        drafts.append([t if r else t + 1 for t, r in zip(own, right.tolist(), strict=False)])
        tokens.append(_emitted(own, drafts[-1]))
        kept.append(logprobs[first : first + len(tokens[-1])].tolist())
        first = end
    if drafted:
        counts = ends.diff(prepend=ends.new_zeros(1))
        # The first row of a request continues no draft.
        by_row = [token for draft in drafts for token in (-7, *draft)]
        of_drafts = {"drafts": torch.tensor(by_row, dtype=torch.int32), "width": int(counts.max())}
        rows = replace(rows, ends=ends, **of_drafts)
    return Step(logits, drawn_from, rows, tokens, kept)


def _by_definition(
    logits: Tensor, drawn_from: Tensor, rows: StepRows, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each row's token and its log-probability."""
    request = torch.searchsorted(ends, torch.arange(len(logits)), right=True)
    temperatures = torch.zeros(len(ends)) if rows.temperatures is None else rows.temperatures
    greedy = (temperatures < 1e-5)[request]
    scales = torch.where(greedy, 1.0, 1.0 / temperatures[request])[:, None]
    positions = rows.positions[rows.input_rows.long() - rows.after] + 1
    tokens, logprobs = [], []
    size = max(1, CHUNK // logits.shape[1])
    for at in torch.arange(len(logits)).split(size):
        scaled = logits[at].float() * scales[at]
        candidates = scaled.masked_fill(drawn_from[at] == -torch.inf, -torch.inf)
        drawn = perturbed_argmax(candidates, rows.keys[request[at]], positions[at])
        token = torch.where(greedy[at], candidates.argmax(1), drawn)
        tokens.append(token)
        logprobs.append(scaled.double().log_softmax(-1).gather(1, token[:, None])[:, 0])
    return torch.cat(tokens), torch.cat(logprobs)


def _emitted(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Verify one request's draft tokens one by one. Return the tokens that it emits."""
    out = []
    for i, token in enumerate(sampled):
        out.append(token)
        if i == len(drafts) or drafts[i] != token:
            break
    return out


def check(step: Step, tokens: Tensor, logprobs: Tensor) -> None:
    """Assert that all tokens are equal, and that log-probabilities differ by less than 2e-5."""
    assert tokens.dtype == torch.int32
    assert tokens.shape == logprobs.shape == (len(step.tokens), step.rows.width)
    wide = [own + [REJECTED] * (step.rows.width - len(own)) for own in step.tokens]
    assert torch.equal(tokens.cpu(), torch.tensor(wide, dtype=torch.int32))
    for own, expected in zip(logprobs.cpu().tolist(), step.logprobs, strict=True):
        assert max(abs(a - b) for a, b in zip(own, expected, strict=False)) < 2e-5
