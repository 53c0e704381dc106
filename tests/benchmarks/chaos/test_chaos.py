"""A campaign goes on where it stopped, its runs suit what is struck, and a part of it is run."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.chaos import figures, go_on, measure
from benchmarks.chaos.faults import RunMode, Strike, Target, draw
from benchmarks.chaos.small_run import small_run
from benchmarks.chaos.strikes import NUM_STEPS, damage
from flows.config_file import load_config
from tests.flows.test_bad_input import check


def row_of(strike: Strike) -> dict[str, Any]:
    found = ["a hole"] if strike.number == 1 else []
    return strike.model_dump(mode="json") | {"ends": [1, 0], "complaints": found, "seconds": 1.0}


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, made = tmp_path / "chaos.json", []

    def make(strike: Strike) -> dict[str, Any]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(strike.number)
        return row_of(strike)

    with pytest.raises(KeyboardInterrupt):
        go_on(draw(5, 0), make, file)
    assert [row["number"] for row in json.loads(file.read_text())["rows"]] == [0, 1, 2]
    rows = go_on(draw(5, 0), lambda strike: row_of(strike) | {"later": True}, file)
    assert [row["number"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.get("later", False) for row in rows] == [False] * 3 + [True] * 2
    assert figures(rows) == {"faults": 5, "failures": 1, "resumes": 5}
    # What it knows is still there when it is stopped again.
    with pytest.raises(KeyboardInterrupt):
        go_on(draw(9, 0), make, file)
    assert len(json.loads(file.read_text())["rows"]) == 5
    # Of another seed nothing is known.
    other = [strike for strike in draw(5, 1) if strike not in draw(5, 0)]
    assert all("later" in row for row in go_on(other, lambda s: row_of(s) | {"later": 1}, file))


def test_every_drawn_run_has_a_config_that_is_accepted(tmp_path: Path) -> None:
    seen = set()
    for strike in draw(60, 0):
        kind = (strike.mode, strike.moment == "switch", strike.target)
        if kind in seen or strike.target not in (Target.TP_WORKER, Target.DRAFTER, Target.STORE):
            continue
        seen.add(kind)
        with small_run(tmp_path / str(strike.number), strike.mode, strike) as run:
            check(run.config)
            config = load_config(run.config)
            assert config.run_dir == run.run_dir
            assert config.mode == strike.mode
            if strike.target is Target.TP_WORKER:
                assert max(config.tp_degrees) == 2
    assert len(seen) >= 5


def test_the_undisturbed_run_has_as_many_steps(tmp_path: Path, capsys: Any) -> None:
    with small_run(tmp_path / "it", RunMode.SYNC) as run:
        check(run.config)
    assert f"{NUM_STEPS} steps" in capsys.readouterr().out
    assert not run.temporary.exists()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_part_of_the_campaign(tmp_path: Path) -> None:
    """An engine's death in mid-rollout, and the store's disk full while it takes rewards."""
    args = Namespace(faults=60, seed=0, only=[28, 17], dir=tmp_path, json=None)
    found, rows = measure(args, Console())
    assert found["faults"] == 2
    assert [row["complaints"] for row in rows] == [[], []], rows


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
