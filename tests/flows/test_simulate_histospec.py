"""`refrain simulate` of a run with history drafting."""

import json

import pytest
from click.testing import CliRunner

from refrain.engines.simulate.history import PAPER
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.flows.cli import main
from refrain.flows.simulate_input import read_policies
from refrain.schemas.drafting import DraftingConfig
from tests.flows.test_simulate import (
    H100,
    a_directory,  # noqa: F401
    refrain,
    simulated,
    sketches,  # noqa: F401
)
from tests.latency.machines import AffineMachine, measure
from tests.store.test_store import make_rewards, make_rollout

POLICIES = ("--policies", "even,even+histospec,even+HistoSpec:paper,ranked+histospec:doubling")


@pytest.fixture(autouse=True)
def run(directory):
    """Write a store with three steps of 2 x 4 rollouts. Steps 2 and 3 repeat step 1."""
    path = directory / "runs/mine/refrain.duckdb"
    path.parent.mkdir(parents=True)
    with Store(path) as store:
        for step in (1, 2, 3):
            rollouts = [
                make_rollout(step, prompt, sample, tokens=60 + sample, token=token)
                for prompt, token in (("a", 7), ("b", 8))
                for sample in range(4)
            ]
            store.add_rollouts(rollout_rows(rollouts), epoch=step - 1)
            store.add_rewards("train", step, make_rewards([("a", 0, 1.0)]))
    return path


def test_responses_that_come_again_are_drafted_from_history():
    found = simulated("mine", *H100, *POLICIES)
    rows = {(row["step"], row["policy_set"]): row for row in found["rows"]}
    plain, drafting, paper = (
        [rows[step, name] for step in (1, 2, 3)]
        for name in ("even", "even+histospec", "even+HistoSpec:paper")
    )
    assert drafting[0]["step_s"] == paper[0]["step_s"] == plain[0]["step_s"]
    for step in (1, 2):
        assert drafting[step]["step_s"] < paper[step]["step_s"] < plain[step]["step_s"] / 2
        assert drafting[step]["num_tokens"] == plain[step]["num_tokens"]
    assert found["figures"]["even_histospec_speedup"] > 1.5


def test_by_default_it_drafts_as_a_run_does():
    default, named, paper = read_policies(
        "even+histospec,even+HISTOSPEC:Goodput,even+histospec:paper"
    )
    assert default.histospec == named.histospec == DraftingConfig()
    assert paper.histospec == PAPER


def test_an_exported_run_is_drafted_for_as_the_run():
    assert CliRunner().invoke(main, ["export", "mine", "mine.parquet", "--token-ids"]).output
    of_run, of_file = (simulated(name, *H100, *POLICIES) for name in ("mine", "mine.parquet"))
    assert [row["step_s"] for row in of_run["rows"]] == [row["step_s"] for row in of_file["rows"]]
    CliRunner().invoke(main, ["export", "mine", "bare.parquet"])
    result = refrain("bare.parquet", *H100, *POLICIES)
    assert result.exit_code == 2
    assert "Make the trace with `refrain export RUN FILE --token-ids`, or give the" in result.output


def test_history_drafting_takes_n_grams_time_unless_it_was_measured_itself(directory):
    profile = measure(AffineMachine())
    names = {"ngram": {"lookup": "ngram"}, "own": {"lookup": "ngram", "small": "histospec"}}
    names["neither"] = {}
    seconds = {}
    for name, renamed in names.items():
        points = tuple(
            p.model_copy(update={"drafter": renamed.get(str(p.drafter), p.drafter)})
            for p in profile.points
        )
        text = profile.model_copy(update={"points": points}).model_dump_json()
        (directory / f"{name}.json").write_text(text)
        args = ("--profile", f"{name}.json", "--policies", "even+histospec", "--json", "found.json")
        result = refrain("mine", "--engines", "2", *args)
        if name == "neither":
            assert result.exit_code == 2
            assert "has no drafter 'histospec'; known: lookup, small" in result.output
            continue
        assert result.exit_code == 0, result.output
        rows = json.loads((directory / "found.json").read_text())["rows"]
        seconds[name] = [row["step_s"] for row in rows]
    assert seconds["ngram"][0] == seconds["own"][0]
    assert seconds["ngram"][1] < seconds["own"][1]
