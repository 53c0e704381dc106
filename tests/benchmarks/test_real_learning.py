"""The figures of the bench in which a real model learns, from made-up rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from refrain.benchmarks.real_learning import draw, epoch_row, figures, held_out_rows, moved
from tests.conftest import DEMO


def rewards(version: int, *of: float) -> list[dict[str, Any]]:
    return [{"version": version, "prompt_key": str(i), "reward": one} for i, one in enumerate(of)]


def test_the_error_of_a_rise_is_of_differences_by_prompt() -> None:
    """Prompts differ more than they rise. Pairs by prompt remove that difference."""
    first, last = (0.0, 0.25, 0.5, 0.75), (0.25, 0.5, 0.75, 0.75)
    one, other = held_out_rows([*rewards(0, *first), *rewards(12, *last)])
    assert one == {"version": 0, "held_out": 0.375, "rise": 0.0, "rise_error": 0.0}
    assert other["rise"] == pytest.approx(0.1875)
    assert other["rise_error"] == pytest.approx(0.125 / 2)


def step(number: int, num_accepted: int) -> dict[str, Any]:
    counts = {"num_tokens": 100, "num_drafted": 50, "num_verifications": 20}
    row = {"step": number, "epoch": 1, "reward": 0.1 * number, "nats": 1.0}
    return row | counts | {"num_accepted": num_accepted}


def test_an_epoch_is_the_sum_of_its_steps() -> None:
    row = epoch_row([step(2, 10), step(4, 30)])
    assert row["reward"] == pytest.approx(0.3)
    assert row["from_drafts"] == 40 / 200
    assert row["acceptance_rate"] == 40 / 100
    assert row["acceptance_length"] == 1 + 40 / 40


def test_figures_and_a_plot(tmp_path: Path) -> None:
    held_out = held_out_rows([*rewards(0, 0, 0, 1), *rewards(2, 1, 0, 1)])
    rows = [
        *({"kind": "step"} | step(n, 10) for n in range(2)),
        *({"kind": "held_out"} | row for row in held_out),
        {"kind": "epoch", "kl": 0.02} | epoch_row([step(0, 10), step(1, 10)]),
    ]
    found = figures(rows)
    assert found["num_steps"] == 2
    assert found["rise"] == pytest.approx(1 / 3)
    assert found["rise_over_error"] == pytest.approx(1.0)
    assert found["kl_epoch_2"] == 0.02
    draw([{"algorithm": "grpo"} | row for row in rows], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5_000


def test_a_policy_that_stood_still_has_not_moved() -> None:
    """Zero for the policy's own logprobs. Logprobs that are higher by 0.1 give 0.1."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    tokens = torch.randint(model.config.vocab_size, (1, 12), generator=torch.manual_seed(0))
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)
    own = [logprobs[i, tokens[0, i + 1]].item() for i in range(3, 11)]
    row = {"prompt_token_ids": tokens[0, :4].tolist(), "response_token_ids": tokens[0, 4:].tolist()}
    assert moved(DEMO / "model", [row | {"inference_logprobs": own}]) == pytest.approx(0, abs=1e-4)
    higher = (np.array(own) + 0.1).tolist()
    found = moved(DEMO / "model", [row | {"inference_logprobs": higher}])
    assert found == pytest.approx(0.1, abs=1e-4)
