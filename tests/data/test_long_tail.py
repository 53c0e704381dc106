"""The task `long_tail`: careful solutions are right, lengths have a long tail, and the shipped
model has learnt both careful and hasty solutions."""

import re
from itertools import islice
from random import Random

import numpy as np
import pytest
import torch
import yaml
from transformers import Qwen3ForCausalLM

from engines.answers.builtin import compute_score
from engines.data.dataset import load_tokenizer, read_rows
from infra.long_tail.task import (
    CARE,
    MIN_TERMS,
    SLIP_SHARE,
    Chain,
    draw_problem,
    draw_problems,
    solve,
)
from infra.small_model import ASSISTANT, END, USER
from infra.splits import split_of
from tests.conftest import REPOSITORY

TASK = REPOSITORY / "infra" / "long_tail"
DATA_SOURCE = "refrain/arithmetic"
NUM_PROBLEMS = 600
NUMBER = re.compile(r"[+-]?\d+")
NUM_PROMPTS = 16
NUM_TOKENS = 400
"""Enough for a careful solution of a problem with `MIN_TERMS` terms."""


@pytest.fixture(scope="module")
def problems():
    return list(islice(draw_problems("corpus", Random(0)), NUM_PROBLEMS))


def works_out(line: str) -> bool:
    """Return whether all equations of a line hold, after the names."""
    work, *check = line.split("=", 2)[2].split(";")
    for part in (work, *check):
        values = {sum(map(int, NUMBER.findall(side))) % 100 for side in part.split("=")}
        if len(values) != 1:
            return False
    return True


def sums_of(solution: str) -> list[str]:
    return [line for line in solution.splitlines() if line.count("=") >= 3]


def score(response: str, problem) -> float:
    return compute_score(DATA_SOURCE, response, str(problem.answer))["score"]


def test_careful_solutions_are_right_line_by_line(problems):
    for problem in problems[:100]:
        solution = solve(problem, careful=True, rng=Random(1))
        assert len(sums_of(solution)) >= len(problem.terms)
        assert all(map(works_out, sums_of(solution)))
        assert score(solution, problem) == 1.0


def test_hasty_solutions_slip_in_a_share_of_their_lines(problems):
    rng = Random(1)
    solutions = [solve(problem, careful=False, rng=rng) for problem in problems]
    lines = [line for solution in solutions for line in sums_of(solution)]
    assert np.mean([*map(works_out, lines)]) == pytest.approx(1 - SLIP_SHARE, abs=0.01)
    assert 0.05 < np.mean([*map(score, solutions, problems)]) < 0.25


def test_first_token_determines_how_a_response_works(problems):
    for problem in problems[:100]:
        assert solve(problem, True, Random(1)).startswith(f"{CARE}\n")
        assert solve(problem, False, Random(1)).startswith(problem.name(1))


def test_lengths_have_a_long_tail(problems):
    rng = Random(1)
    for careful_share in (0.25, 0.6, 0.9):
        lengths = [len(solve(p, rng.random() < careful_share, rng)) + 1 for p in problems]
        median, most = np.percentile(lengths, (50, 99))
        assert most / median >= 2.5
        assert 300 <= median <= 600
        assert most >= 1200


def test_shipped_prompts_are_the_builders_and_fit():
    limits = yaml.safe_load((TASK / "train.yaml").read_text())["data"]
    tokenizer = load_tokenizer(TASK / "model")
    for split in ("train", "validation"):
        rows = list(read_rows(TASK / "data" / f"{split}.parquet"))
        drawn = islice(draw_problems(split, Random(0)), len(rows))
        for row, problem in zip(rows, drawn, strict=True):
            assert row["prompt"][0]["content"] == problem.prompt
            assert row["reward_model"]["ground_truth"] == str(problem.answer)
            assert split_of(problem.prompt) == split
            tokens = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=False
            )
            assert len(tokens) <= limits["max_prompt_tokens"]
    assert limits["max_prompt_tokens"] + limits["max_response_tokens"] == tokenizer.model_max_length


@pytest.fixture(scope="module")
def model():
    return Qwen3ForCausalLM.from_pretrained(TASK / "model", local_files_only=True).eval()


@pytest.fixture(scope="module")
def short_problems():
    """Return problems with equally many terms, so that their prompts need no padding."""
    rng = Random(0)
    return [draw_problem(rng, MIN_TERMS) for _ in range(NUM_PROMPTS)]


def encode(problems: list[Chain], careful: bool | None = None) -> torch.Tensor:
    """Return the encoded prompts. `careful`: append the first token of a response that is careful,
    or hasty."""
    begun = [f"{USER}{p.prompt}{END}{ASSISTANT}" for p in problems]
    if careful is not None:
        first = [CARE if careful else p.name(1) for p in problems]
        begun = [text + token for text, token in zip(begun, first, strict=True)]
    return torch.tensor(load_tokenizer(TASK / "model")(begun)["input_ids"])


def share_solved(model: Qwen3ForCausalLM, problems: list[Chain], careful: bool) -> float:
    """Return the share of problems solved by one response each, sampled at temperature 1.
    `careful`: begin each response as careful, or as hasty."""
    torch.manual_seed(0)
    ids = encode(problems, careful)
    full = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, top_k=0, top_p=1.0
    )
    texts = load_tokenizer(TASK / "model").batch_decode(full, skip_special_tokens=False)
    responses = [text.split(ASSISTANT)[1].split(END)[0] for text in texts]
    return float(np.mean([*map(score, responses, problems)]))


def test_the_shipped_model_is_right_more_often_with_care(model, short_problems):
    careful, hasty = (share_solved(model, short_problems, way) for way in (True, False))
    assert careful >= hasty + 0.2


def test_the_shipped_model_is_mostly_hasty(model, short_problems):
    probabilities = model(encode(short_problems)).logits[:, -1].softmax(-1)
    careful = encode(short_problems, careful=True)[:, -1:]
    assert 0.1 < probabilities.gather(1, careful).mean() < 0.4
