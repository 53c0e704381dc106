"""The task `long_tail`: careful solutions are right, and lengths have a long tail."""

import re
from itertools import islice
from random import Random

import numpy as np
import pytest
import yaml

from infra.long_tail.task import (
    CARE,
    SLIP_SHARE,
    draw_problems,
    solve,
)
from infra.splits import split_of
from refrain.engines.answers.builtin import compute_score
from refrain.engines.data.dataset import load_tokenizer, read_rows
from tests.conftest import REPOSITORY

TASK = REPOSITORY / "infra" / "long_tail"
DATA_SOURCE = "refrain/arithmetic"
NUM_PROBLEMS = 600
NUMBER = re.compile(r"[+-]?\d+")


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
