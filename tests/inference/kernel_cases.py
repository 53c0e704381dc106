"""The sampling kernel draws the tokens of the definition.

On a GPU the kernel is compiled. Elsewhere it runs in Triton's interpreter, which must be switched
on before Triton is imported: `test_kernel` runs this file so.
"""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from refrain.engines.inference.sampling import gpu, kernels
from refrain.engines.inference.sampling.kernels import _key_of, _keys
from refrain.engines.inference.sampling.noise import gumbel, gumbel_noise, perturbed_argmax
from refrain.engines.inference.sampling.step_rows import LogitColumns, StepRows
from tests.inference.random_steps import Step, check, from_few, make_step

ON_GPU = torch.cuda.is_available()
# The interpreter takes 0.1 s for a block of a few rows.
ROWS = 100_000 if ON_GPU else 10_000
NEAR_TIES = 100 if ON_GPU else 24
SINGLE_ROWS = 64 if ON_GPU else 8
TILES = [{}] if ON_GPU else [{"rows_at_once": 1024, "block": 64, "requests_at_once": 512}]


def to_gpu(thing: Any) -> Any:
    return thing.cuda() if ON_GPU and isinstance(thing, Tensor) else thing


def on_gpu(step: Step) -> tuple[Tensor, Tensor, StepRows]:
    """Return the arguments of `gpu.sample`, on the GPU if there is one."""
    logits = to_gpu(step.logits)
    drawn_from = logits if step.drawn_from is step.logits else to_gpu(step.drawn_from)
    return logits, drawn_from, rows_on_gpu(step.rows)


def rows_on_gpu(rows: StepRows) -> StepRows:
    return replace(rows, **{f.name: to_gpu(getattr(rows, f.name)) for f in fields(rows)})


def sampled(step: Step, **tile: int) -> tuple[Tensor, Tensor]:
    return gpu.sample(*on_gpu(step), **tile)


def test_logits_of_few_tokens_draw_as_if_the_others_had_none():
    few, rows, expected = from_few(make_step(4, SINGLE_ROWS, 4100, drafted=False))
    columns = LogitColumns(to_gpu(rows.columns.token_ids), rows.columns.vocab_size)
    tokens = gpu.foresee(to_gpu(few), replace(rows_on_gpu(rows), columns=columns))
    assert torch.equal(tokens.cpu(), expected)


@pytest.mark.parametrize("tile", TILES)
def test_every_token_of_many_rows(tile):
    from refrain.engines.inference.sampling import cpu

    step = make_step(1, ROWS, 36)
    check(step, *cpu.sample(step.logits, step.drawn_from, step.rows))
    check(step, *sampled(step, **tile))


@pytest.mark.parametrize(
    "changes",
    [{}, {"drafted": False}, {"truncated": True}, {"greedy_only": True}, {"dtype": torch.bfloat16}],
    ids=str,
)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(24, 500), (1, 50), (17, 1)])
def test_kernel_draws_every_token_in_any_step(num_rows, vocab_size, changes):
    step = make_step(num_rows, num_rows, vocab_size, **changes)
    for tile in (
        {"rows_at_once": 4, "block": 256},
        {"rows_at_once": 64, "block": 64, "requests_at_once": 8},
    ):
        check(step, *sampled(step, **tile))


def test_a_vocabulary_of_many_parts():
    """The kernel splits a large vocabulary into parts and combines their results."""
    step = make_step(5, 2, 151_936 if ON_GPU else 40_000)
    check(step, *sampled(step))


def test_another_noise_would_be_noticed():
    """Negative control: with other keys, the comparison fails."""
    step = make_step(0, 64, 36)
    step.rows.keys.add_(1)
    with pytest.raises(AssertionError):
        check(step, *sampled(step, **TILES[0]))


@pytest.mark.parametrize(
    ("most_drafts", "widths"), [(0, {1}), (4, {1, 2, 4, 8}), (7, {1, 2, 4, 8})]
)
def test_warmup_compiles_the_kernels_of_steps(monkeypatch, most_drafts, widths):
    """Kernels are compiled for the next power of two of the rows per request."""
    warmed = []

    def seen(logits, drawn_from, rows):
        warmed.append(triton.next_power_of_2(rows.width))
        return sample(logits, drawn_from, rows, block=64)

    sample = gpu.sample
    monkeypatch.setattr(gpu, "sample", seen)
    gpu.warm(100, torch.bfloat16, torch.device("cuda" if ON_GPU else "cpu"), most_drafts)
    steps = {triton.next_power_of_2(width) for width in range(1, most_drafts + 2)}
    assert set(warmed) == steps == widths


def test_a_kernel_that_draws_other_tokens_stops_the_engine(monkeypatch):
    sample = gpu.sample
    monkeypatch.setattr(gpu, "sample", lambda *given: (sample(*given, block=64)[0] + 1, None))
    with pytest.raises(RuntimeError, match="draws other tokens than its definition"):
        gpu.warm(100, torch.bfloat16, torch.device("cuda" if ON_GPU else "cpu"), 0)


def plain_rows(num_rows: int) -> StepRows:
    return StepRows(
        positions=torch.arange(num_rows) * 37,
        input_rows=torch.arange(1, num_rows + 1, dtype=torch.int32),
        after=1,
        keys=torch.arange(num_rows) * 7919 - 3,
        temperatures=torch.ones(num_rows),
    )


def near_ties(num_rows: int) -> tuple[Tensor, StepRows]:
    """Return logits that make two scores of a row differ in their last bits only."""
    rows, random = plain_rows(num_rows), torch.Generator().manual_seed(0)
    scores = torch.full((num_rows, 64), -20.0)
    scores[:, 11], scores[:, 40] = 4.0, 4.0 + 2e-6 * torch.randn(num_rows, generator=random)
    return scores - gumbel_noise(rows.keys, rows.positions + 1, 64), rows


def drawn(logits: Tensor, rows: StepRows, rows_at_once: int = 1) -> Tensor:
    rows = replace(rows, **{f.name: to_gpu(getattr(rows, f.name)) for f in fields(rows)})
    logits = to_gpu(logits)
    tokens, _ = gpu.sample(logits, logits, rows, block=128, rows_at_once=rows_at_once)
    return tokens.flatten().cpu().long()


def defined(logits: Tensor, rows: StepRows) -> Tensor:
    return perturbed_argmax(logits, rows.keys, rows.positions + 1)


def test_scores_that_nearly_tie_are_computed_exactly():
    logits, rows = near_ties(NEAR_TIES)
    assert torch.equal(drawn(logits, rows), defined(logits, rows))


@pytest.mark.skipif(ON_GPU, reason="the kernel is compiled already")
def test_lower_bounds_would_draw_other_tokens(monkeypatch):
    """Negative control: with bounds that are a nat lower, some tokens are missed."""
    logits = torch.randn(64, 512, generator=torch.Generator().manual_seed(7)) * 4
    rows = plain_rows(len(logits))
    assert torch.equal(drawn(logits, rows, 64), defined(logits, rows))
    a_nat_lower = tl.constexpr(kernels._BITS_TOO_LOW.value - 1 / math.log(2))
    monkeypatch.setattr(kernels, "_BITS_TOO_LOW", a_nat_lower)
    assert not torch.equal(drawn(logits, rows, 64), defined(logits, rows))


def test_one_program_a_row_draws_the_tokens_of_the_definition():
    """Most programs compute one exact score only."""
    logits = torch.randn(SINGLE_ROWS, 512, generator=torch.Generator().manual_seed(7)) * 4
    rows = plain_rows(len(logits))
    assert torch.equal(drawn(logits, rows), defined(logits, rows))


@triton.jit
def write_slack(words_ptr, exponentials_ptr, scores_ptr, slack_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint32)
    keys = _keys(tl.load(exponentials_ptr + at)[None, :], words[None, :], BLOCK)
    least = _key_of(tl.load(scores_ptr + at), tl.zeros([BLOCK], tl.float32), BLOCK)
    tl.store(slack_ptr + at, tl.reshape(keys, [BLOCK]) - least)


def test_the_key_of_each_token_exceeds_that_of_its_score():
    """Otherwise the kernel could miss the best token. Most keys are too high by 0.12 nats at most.

    This holds for the largest noise of each first word, and for each distance to the best logit.
    """
    num, edge, random = 2**18, 2**16, torch.Generator().manual_seed(0)
    near = [torch.arange(edge), 2**32 - 1 - torch.arange(edge)]
    words = torch.cat([*near, torch.randint(0, 2**32, (num - 2 * edge,), generator=random)])
    words[edge // 2 : edge] <<= torch.randint(0, 16, (edge // 2,), generator=random)
    distances = torch.rand(num, generator=random) ** 4 * -110.0
    distances[::7] = 0.0
    scores = distances + gumbel(words, torch.zeros_like(words))
    slack = to_gpu(torch.zeros(num, dtype=torch.int32))
    write_slack[(num // 4096,)](*map(to_gpu, (words, distances.exp(), scores)), slack, BLOCK=4096)
    octaves = slack.cpu() / 2.0**23
    assert (octaves > 0).all()
    # -log(u) is close to 1 - u for large noise, and floats below 2^-126 have fewer bits.
    usual = (words > 0) & (words < 2**26) & (distances > -87.0)
    assert (octaves[usual] < 0.2).all()


def test_rows_with_not_a_number_draw_from_the_rest():
    """In other rows of the program they change nothing."""
    logits = torch.randn(16, 100, generator=torch.Generator().manual_seed(8))
    logits[::3, 5:40] = torch.nan
    rows = plain_rows(len(logits))
    expected = defined(logits.nan_to_num(-torch.inf), rows)
    assert torch.equal(drawn(logits, rows), expected)
    assert torch.equal(drawn(logits, rows, 64), expected)


def test_rows_with_many_ties_draw_the_first_of_the_best():
    logits, rows = torch.zeros(4, 300), plain_rows(4)
    assert torch.equal(drawn(logits, rows), defined(logits, rows))
    assert (drawn(logits, replace(rows, temperatures=torch.zeros(4))) == 0).all()
