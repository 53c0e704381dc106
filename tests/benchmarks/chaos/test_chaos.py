"""A campaign continues where it stopped. Each of its runs has a valid config for its faults."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from refrain.benchmarks.chaos import figures, go_on, measure
from refrain.benchmarks.chaos.faults import (
    PAIRS,
    Moment,
    RunMode,
    Strike,
    Target,
    draw,
    of_environments,
    on_runs,
)
from refrain.benchmarks.chaos.small_run import small_run
from refrain.benchmarks.chaos.strikes import NUM_STEPS, damage, damage_line
from refrain.flows.config_file import load_config
from tests.flows.test_bad_input import check


def row_of(strike: Strike) -> dict[str, Any]:
    found = ["a hole"] if strike.number == 1 else []
    made = {"run": strike.number, "ends": [1, 0], "complaints": found, "seconds": 1.0}
    return strike.model_dump(mode="json") | made


def test_campaign_continues_where_it_stopped(tmp_path: Path) -> None:
    file, made = tmp_path / "chaos.json", []

    def strike_run(run: Sequence[Strike]) -> list[dict[str, Any]]:
        if len(made) >= 3:
            raise KeyboardInterrupt
        made.extend(strike.number for strike in run)
        return [row_of(strike) for strike in run]

    def strike_later(run: Sequence[Strike]) -> list[dict[str, Any]]:
        return [row_of(strike) | {"later": True} for strike in run]

    with pytest.raises(KeyboardInterrupt):
        go_on(draw(9, 0), strike_run, file)
    known = [row["number"] for row in json.loads(file.read_text())["rows"]]
    assert known == sorted(made)
    assert 3 <= len(known) < 9
    rows = go_on(draw(9, 0), strike_later, file)
    assert [row["number"] for row in rows] == [*range(9)]
    assert [row["number"] for row in rows if not row.get("later", False)] == known
    pairs = {
        "pairs_defined": len(PAIRS),
        "pairs_drawn": len({(s.target, s.fault) for s in draw(9, 0)}),
    }
    assert figures(rows) == {"faults": 9, "failures": 1, "runs": 9, "resumes": 9} | pairs
    # When the campaign is stopped again, the file still has all known rows.
    with pytest.raises(KeyboardInterrupt):
        go_on(draw(12, 0), strike_run, file)
    assert len(json.loads(file.read_text())["rows"]) == 9
    # A campaign with another seed reuses none of them.
    other = [strike for strike in draw(5, 1) if strike not in draw(5, 0)]
    assert all("later" in row for row in go_on(other, strike_later, file))


@pytest.mark.slow
def test_every_drawn_run_has_a_config_that_is_accepted(tmp_path: Path) -> None:
    for run in on_runs(draw(60, 0)):
        with small_run(tmp_path / str(run[0].number), run[0].mode, run) as made:
            check(made.config)
            config = load_config(made.config)
            assert config.run_dir == made.run_dir
            assert config.staleness == (run[0].mode == "pipelined")
            if any(Target.TP_WORKER is s.target or Moment.SWITCH is s.moment for s in run):
                assert max(config.tp_degrees) == 2
            if any(Target.DRAFTER is s.target for s in run):
                assert config.specactor is not None


def test_a_run_with_an_environment_has_a_config_that_is_accepted(tmp_path: Path) -> None:
    (run, *_) = on_runs(of_environments())
    with small_run(tmp_path / "it", run[0].mode, run) as made:
        check(made.config)
        assert load_config(made.config).environment is not None


def test_the_undisturbed_run_has_as_many_steps(tmp_path: Path, capsys: Any) -> None:
    with small_run(tmp_path / "it", RunMode.SYNC) as run:
        check(run.config)
    assert f"{NUM_STEPS} steps" in capsys.readouterr().out
    assert not run.temporary.exists()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_part_of_the_campaign(tmp_path: Path) -> None:
    """An engine dies during the rollout, and the store's disk is full while it takes rewards."""
    given = {"only": [28, 17], "apart": False, "dir": tmp_path, "json": None}
    args = Namespace(faults=60, seed=0, stale=False, environment=False, **given)
    found, rows = measure(args, Console())
    assert (found["faults"], found["runs"]) == (2, 1)
    assert [row["complaints"] for row in rows] == [[], []], rows


def test_one_line_is_damaged_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    lines = [f'{{"step": {number}, "reward_mean": 0.5}}' for number in range(1, 5)]
    file.write_text("\n".join(lines) + "\n")
    damage_line(file, seed=3)
    found = file.read_bytes().decode().splitlines()
    assert sum(one != other for one, other in zip(lines, found, strict=True)) == 1
    with pytest.raises(ValueError, match="control character"):
        [json.loads(line) for line in found]


def test_damage_is_repeatable_and_leaves_nothing_whole(tmp_path: Path) -> None:
    contents = []
    for name in "ab":
        file = tmp_path / name
        file.write_bytes(bytes(range(256)) * 4)
        damage(file, seed=3)
        contents.append(file.read_bytes())
    assert contents[0] == contents[1]
    assert len(contents[0]) == 768
    assert contents[0] != (bytes(range(256)) * 4)[:768]
