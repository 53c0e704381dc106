"""refrain makes questions with reasoning-gym and scores the answers as reasoning-gym does."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from refrain.engines.answers.builtin import builtin_scorer
from refrain.engines.answers.puzzles import (
    puzzle_scorer,
    read_entry,
    reasoning_gym,
    stated_answer,
    write_entry,
)
from refrain.engines.data.puzzles import check_sets, puzzle_rows
from refrain.flows.cli import main

FEW = ("chain_sum", "gsm_symbolic", "letter_counting", "arc_agi")


def make(names=FEW, levels=(), num_rows=12, seed=0, split="train", used=None) -> list[dict]:
    return puzzle_rows(names, levels, num_rows, seed, split, set() if used is None else used)


def run(*args: str | Path):
    return CliRunner().invoke(main, ["data", "reasoning-gym", *map(str, args)])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("I think <answer> 12 </answer>", "12"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        (r"so \boxed{3}", "3"),
        ("12", None),
        ("</answer>12<answer>", None),
    ],
)
def test_the_last_answer_counts(response, answer):
    assert stated_answer(response) == answer


def assert_scored_as_by_its_own(rows) -> None:
    """Assert that each row's scorer gives the score that reasoning-gym gives to its own entry."""
    for row in rows:
        scorer = builtin_scorer(row["data_source"])
        truth = row["reward_model"]["ground_truth"]
        # Some sets have no single right answer: they accept any that follows the rules.
        answer = str(json.loads(truth)["answer"])
        own = reasoning_gym().get_score_answer_fn(row["data_source"].partition("/")[2])
        expected = own(answer, read_entry(truth))
        assert scorer(f"so <answer>{answer}</answer>", truth)["score"] == pytest.approx(expected)
        assert scorer("I do not know", truth) == {"score": 0.0, "pred": None}


@pytest.mark.usefixtures("with_reasoning_gym")
def test_right_answers_score_as_reasoning_gym_says():
    rows = make()
    assert_scored_as_by_its_own(rows)
    right = (json.loads(row["reward_model"]["ground_truth"])["answer"] for row in rows)
    scores = [
        builtin_scorer(row["data_source"])(
            f"<answer>{answer}</answer>", row["reward_model"]["ground_truth"]
        )
        for row, answer in zip(rows, right, strict=True)
    ]
    assert [score["score"] for score in scores] == [1.0] * 12


@pytest.mark.slow
@pytest.mark.usefixtures("with_reasoning_gym")
def test_every_set_is_made_and_scored():
    names = sorted(reasoning_gym().factory.DATASETS.keys() - {"composite"})
    assert len(names) > 100
    for name in names:
        assert_scored_as_by_its_own(make([name], num_rows=2))


@pytest.mark.usefixtures("with_reasoning_gym")
def test_values_beyond_json_survive_or_are_refused():
    """Tuples survive. If a scorer needs more than JSON can hold, writing the entry fails."""
    entry = {"question": "?", "answer": "1", "metadata": {"grid": ((1, 2), (3,))}}

    def wants_tuples(answer, entry):
        return float(answer == "1" and entry["metadata"]["grid"] == ((1, 2), (3,)))

    assert read_entry(write_entry(entry, wants_tuples))["metadata"] == entry["metadata"]

    def wants_the_very_same(answer, one):
        return float(answer == "1" and one is entry)

    with pytest.raises(ValueError, match="JSON cannot hold"):
        write_entry(entry, wants_the_very_same)


@pytest.mark.usefixtures("with_reasoning_gym")
def test_sets_take_turns_easier_ones_come_first_and_none_comes_twice():
    used = set()
    rows = make(("chain_sum", "letter_counting"), (0, 2), 20, used=used)
    levels = [row["extra_info"]["difficulty"] for row in rows]
    sources = [row["data_source"] for row in rows]
    assert levels == [0] * 10 + [2] * 10
    assert sources == ["reasoning_gym/chain_sum", "reasoning_gym/letter_counting"] * 10
    assert [row["extra_info"]["index"] for row in rows] == list(range(20))
    again = make(("chain_sum", "letter_counting"), (0, 2), 20)
    assert again == rows
    others = make(("chain_sum", "letter_counting"), (0, 2), 20, seed=0, used=used)
    prompts = [row["prompt"][0]["content"] for row in [*rows, *others]]
    assert len(set(prompts)) == 40


@pytest.mark.usefixtures("with_reasoning_gym")
def test_missing_sets_and_levels_are_named():
    with pytest.raises(ValueError, match="no set nonsense: it has ab, acre"):
        check_sets(["chain_sum", "nonsense"], ())
    with pytest.raises(ValueError, match="gsm_symbolic has no difficulty levels"):
        check_sets(["gsm_symbolic"], (1,))
    with pytest.raises(ValueError, match="further questions, but 2000 are needed"):
        make(["chain_sum"], (0,), 2000)


@pytest.mark.usefixtures("with_reasoning_gym")
def test_files_for_training_and_validation(tmp_path):
    done = run("chain_sum,letter_counting", "--size", 20, "--held-out", 6, "--out", tmp_path / "d")
    assert done.exit_code == 0, done.output
    train, held = (
        pq.read_table(tmp_path / "d" / f"{name}.parquet").to_pylist()
        for name in ("train", "validation")
    )
    assert (len(train), len(held)) == (20, 6)
    prompts = {row["prompt"][0]["content"] for row in train}
    assert not prompts & {row["prompt"][0]["content"] for row in held}
    assert f"'data.validation=[{tmp_path}/d/validation.parquet]'" in done.output
    again = run("chain_sum", "--out", tmp_path / "d")
    assert again.exit_code == 2
    assert "exists already" in again.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "give a SET"),
        (("chain_sum", "--question", "a"), "leave out --from"),
    ],
)
def test_unsuitable_arguments_are_refused(args, told, tmp_path):
    done = run(*args, "--out", tmp_path / "d")
    assert done.exit_code == 2
    assert told in done.output
    assert not (tmp_path / "d").exists()


def test_puzzle_options_are_refused_for_other_sets():
    done = CliRunner().invoke(main, ["data", "gsm8k", "--size", "4"])
    assert done.exit_code == 2
    assert "work with reasoning-gym only" in done.output


def test_missing_package_error_explains_installation(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym.cache_clear()
    puzzle_scorer.cache_clear()
    done = run("chain_sum", "--out", tmp_path / "d")
    assert done.exit_code == 2
    assert "pip install reasoning-gym==0.1.25" in done.output
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        builtin_scorer("reasoning_gym/chain_sum")
