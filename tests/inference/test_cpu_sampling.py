"""The compiled CPU sampler draws the tokens of the definition."""

from dataclasses import replace

import pytest
import torch

from refrain.engines.inference.sampling import cpu
from tests.inference.random_steps import check, from_few, make_step


@pytest.mark.parametrize(
    "changes",
    [{}, {"drafted": False}, {"truncated": True}, {"greedy_only": True}, {"dtype": torch.bfloat16}],
    ids=str,
)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(20_000, 36), (2_000, 1_100), (1, 5)])
def test_every_token_is_the_definitions(num_rows, vocab_size, changes):
    step = make_step(num_rows, num_rows, vocab_size, **changes)
    check(step, *cpu.sample(step.logits, step.drawn_from, step.rows))


def test_another_noise_would_be_noticed():
    """Negative control: with other keys, the comparison fails."""
    step = make_step(0, 300, 36)
    step.rows.keys.add_(1)
    with pytest.raises(AssertionError):
        check(step, *cpu.sample(step.logits, step.drawn_from, step.rows))


def test_no_row_is_read_but_its_own():
    """Other rows may hold nan, as padding does. They change no token of this row."""
    step = make_step(3, 50, 36, drafted=False)
    tokens, _ = cpu.sample(step.logits, step.drawn_from, step.rows)
    step.logits[1:] = torch.nan
    again, _ = cpu.sample(step.logits, step.drawn_from, step.rows)
    assert again[0] == tokens[0]


@pytest.mark.parametrize("truncated", [False, True])
def test_logits_of_few_tokens_draw_as_if_the_others_had_none(truncated):
    few, rows, expected = from_few(make_step(4, 2_000, 1_100, drafted=False, truncated=truncated))
    assert torch.equal(cpu.foresee(few, rows), expected)
    wrong = replace(rows, columns=rows.columns._replace(token_ids=rows.columns.token_ids + 1))
    assert not torch.equal(cpu.foresee(few, wrong), expected + 1)
