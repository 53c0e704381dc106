"""The task `demo_tools`: the shipped model learnt from conversations as a run has them."""

from collections.abc import AsyncIterator, Callable
from itertools import islice
from random import Random

import pytest
import pytest_asyncio
import torch
import yaml
from click.testing import CliRunner
from transformers import Qwen3ForCausalLM

from infra.demo.build import DATA_SOURCE
from infra.demo_tools.build import corpus_of, written
from infra.demo_tools.calculator import tools
from infra.demo_tools.task import SolverTurn, SumOfProducts, draw_problems, solve
from infra.small_model import IGNORED
from infra.splits import split_of
from refrain.engines.answers.builtin import compute_score
from refrain.engines.data.dataset import load_tokenizer, read_rows
from refrain.engines.data.messages import tokenize
from refrain.engines.environment import hermes
from refrain.engines.environment.actor import EnvironmentActor, split_turns
from refrain.engines.environment.tools import declared_tools
from refrain.engines.inference.tool_parsers import open_parser
from refrain.flows.cli import main
from refrain.flows.config_file import load_config
from refrain.schemas.environment import EnvironmentTask
from refrain.schemas.rollout import Generated, RequestId, Split, Turn
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "infra" / "demo_tools"
TASK = EnvironmentTask("cafe", DATA_SOURCE, "", {}, 0)
SCHEMAS = {"tools": [tool.schema for tool in declared_tools(tools).values()]}
MAX_TURNS = 4
NUM_GREEDY = 16
"""Held-out problems that the shipped model solves greedily."""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER / "model")


@pytest.fixture(scope="module")
def solved() -> list[tuple[SumOfProducts, list[SolverTurn]]]:
    """Problems with conversations of all kinds."""
    rng = Random(1)
    return [(one, solve(one, rng)) for one in islice(draw_problems("corpus", Random(0)), 200)]


@pytest_asyncio.fixture
async def actor(monkeypatch) -> AsyncIterator[EnvironmentActor]:
    """The actor of a run, in this process."""
    monkeypatch.chdir(REPOSITORY)
    actor = EnvironmentActor(
        load_config(FOLDER / "train.yaml", ["environment.processes=1"]), open_parser
    )
    yield actor
    await actor.shutdown()


def score(text: str, problem: SumOfProducts) -> float:
    return compute_score(DATA_SOURCE, text, str(problem.answer))["score"]


def prompt_of(tokenizer, problem: SumOfProducts) -> list[int]:
    return list(tokenize([{"role": "user", "content": problem.prompt}], tokenizer, SCHEMAS))


async def converse(
    actor: EnvironmentActor, sample: str, next_turn: Callable[[list[int]], list[int]]
) -> tuple[list[int], list[Turn]]:
    """Return the tokens after the prompt, and the turns. `next_turn`: returns the turn that follows
    the tokens so far."""
    ids: list[int] = []
    turns: list[Turn] = []
    while len(turns) < MAX_TURNS:
        sampled = next_turn(ids)
        ids, turns = [*ids, *sampled], [*turns, Turn(len(sampled))]
        talk = Generated(ids, [], (), turns=tuple(turns))
        answer = await actor.answer(RequestId(Split.TRAIN, 1, sample, 0), TASK, talk)
        assert not answer.failed
        if answer.observed is None:
            break
        ids, turns[-1] = [*ids, *answer.observed], Turn(len(sampled), len(answer.observed))
    return ids, turns


def sampled_in(ids: list[int], turns: list[Turn]) -> list[int]:
    return [id for sampled, _ in split_turns(ids, turns) for id in sampled]


def test_solvers_call_in_all_ways_and_those_who_call_once_are_mostly_right(solved):
    calls = [[hermes.parse(turn.text, 8) for turn in turns] for _, turns in solved]
    assert {len(one.calls) for turns in calls for one in turns} == {0, 1, 2}
    assert not any(one.problem for turns in calls for one in turns)
    assert {len(turns) for turns in calls} == {1, 2, 3}
    scores: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for (problem, turns), parsed in zip(solved, calls, strict=True):
        num_calls = max(len(one.calls) for one in parsed)
        scores[num_calls].append(score("".join(turn.text for turn in turns), problem))
    head, whole, apart = (sum(one) / len(one) for one in scores.values())
    assert head < 0.2 < apart < 0.7 < whole < 1.0


def test_shipped_prompts_are_the_builders_and_fit(tokenizer):
    limits = yaml.safe_load((FOLDER / "train.yaml").read_text())["data"]
    for split in ("train", "validation"):
        rows = list(read_rows(FOLDER / "data" / f"{split}.parquet"))
        for row, problem in zip(
            rows, islice(draw_problems(split, Random(0)), len(rows)), strict=True
        ):
            assert row["prompt"][0]["content"] == problem.prompt
            assert row["reward_model"]["ground_truth"] == str(problem.answer)
            assert split_of(problem.prompt) == split
            assert len(prompt_of(tokenizer, problem)) <= limits["max_prompt_tokens"]
    assert limits["max_prompt_tokens"] + limits["max_response_tokens"] == tokenizer.model_max_length


async def test_conversations_of_the_corpus_have_a_runs_tokens(actor, solved, tokenizer):
    corpus, _ = corpus_of(tokenizer, seed=0)
    by_kind = {tuple(len(turn.answers) for turn in turns): (one, turns) for one, turns in solved}
    assert len(by_kind) == 5
    for number, (problem, turns) in enumerate(by_kind.values()):
        encoded = [[*tokenizer.encode(turn.text), tokenizer.eos_token_id] for turn in turns]
        texts = iter(encoded)
        after, parts = await converse(actor, str(number), lambda _, texts=texts: next(texts))
        ids, labels = corpus.encode(problem.prompt, written(turns))
        assert ids == prompt_of(tokenizer, problem) + after
        assert tokenizer.unk_token_id not in ids
        assert [id for id in labels if id != IGNORED] == sampled_in(after, parts)
        assert max(map(len, encoded)) <= 2 * 18 + 1


async def test_the_shipped_model_calls_and_answers_with_what_it_reads(actor, tokenizer):
    model = Qwen3ForCausalLM.from_pretrained(FOLDER / "model", local_files_only=True).eval()

    def greedy(prompt: list[int], before: list[int]) -> list[int]:
        given = torch.tensor([[*prompt, *before]])
        out = model.generate(given, do_sample=False, max_new_tokens=60)
        return out[0, given.shape[1] :].tolist()

    num_right = num_with_calls = 0
    for number, problem in enumerate(islice(draw_problems("validation", Random(0)), NUM_GREEDY)):
        prompt = prompt_of(tokenizer, problem)
        ids, turns = await converse(
            actor, str(number), lambda before, prompt=prompt: greedy(prompt, before)
        )
        num_with_calls += len(turns) > 1
        text = tokenizer.decode(sampled_in(ids, turns), skip_special_tokens=True)
        num_right += score(text, problem) == 1.0
    assert num_with_calls >= NUM_GREEDY - 2
    assert num_right >= NUM_GREEDY // 2


def test_the_config_passes_the_check(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    command = ["train", "infra/demo_tools/train.yaml", f"runs_dir={tmp_path}", "--check"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "All is well" in done.output
    assert "does not show tools" not in done.output
