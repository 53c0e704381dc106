"""`refrain profile` on the shipped model: measured once, whatever interrupts it."""

from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner

from engines.latency.fitted import FittedLatency
from engines.report.profile import draw_curves, paying_lines
from engines.report.tracking import open_client
from flows.cli import main
from schemas.latency import PointKind, Profile
from tests.conftest import DEMO
from tests.flows.commands import Command
from tests.flows.test_train import processes
from tests.latency.machines import AffineMachine, measure

SMALL = ["--dtype", "float32", "--max-context", "220", "--max-batch", "4", "--windows", "1,4"]
NUM_DECODE = 3 * 5


def refused(*args: str | Path) -> str:
    result = CliRunner().invoke(main, ["profile", *map(str, args)])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", "3"], "tp_degree 3 does not divide the 4 attention heads"),
        (["--tp", "2,1"], r"tp_degrees must ascend"),
        (["--tp", "one"], "'one' is no list of numbers"),
        (["--max-context", "5000"], "has a context of 1024 tokens, 992 beside draft windows"),
        (["--max-context", "70"], "no room to measure"),
        (["--max-batch", "1"], "max_batch: Input should be greater than or equal to 2"),
        (["--windows", "0,4"], "windows.0: Input should be greater than or equal to 1"),
        (["--name", "a/b"], "name: String should match"),
    ],
)
def test_bad_input_is_named_before_anything_starts(tmp_path, args, message):
    output = refused("--model", DEMO / "model", "--runs-dir", tmp_path, *args)
    assert message in output
    assert not (tmp_path / "profiles").exists()


def test_a_directory_without_a_model_is_refused(tmp_path):
    assert "no config.json" in refused("--model", tmp_path, "--runs-dir", tmp_path)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_killed_profile_goes_on_and_measures_nothing_twice(tmp_path):
    args = ["profile", "--model", DEMO / "model", "--runs-dir", tmp_path, "--name", "small"]
    args += SMALL
    first = Command(*args)
    try:
        first.wait_for_line(f"TP 1, decode and prefill: {NUM_DECODE} points")
        first.wait_for_line(f"/{NUM_DECODE} points")
        first.kill()
    finally:
        first.close()
    directory = tmp_path / "profiles" / "small"
    before = points_of(directory)
    assert 0 < len(before) < 2 * NUM_DECODE

    again = Command(*args)
    try:
        output = again.finish()
    finally:
        again.close()
    todo = NUM_DECODE - len(before) // 2
    assert f"TP 1, decode and prefill: {todo} points" in output
    after = points_of(directory)
    assert set(before) <= set(after)
    assert len(after) == len({row[:-1] for row in after}) == 2 * NUM_DECODE + 2 * 2 * 2
    assert processes(directory) == []

    profile = Profile.model_validate_json((directory / "profile.json").read_text())
    latency = FittedLatency(profile)
    assert 0.0 < latency.decode_s(1, 4, 400) <= latency.verify_s(1, 4, 400, 4) < 1.0
    assert 0.0 < latency.prefill_s(1, 4, 100) < 1.0
    assert 0.0 < latency.draft_s("ngram", 4, 4) < 0.1
    assert "error of the fit" in output
    assert f"profile: {directory / 'profile.json'}" in output
    client, _ = open_client(tmp_path, None)
    (run,) = client.search_runs([client.get_experiment_by_name("refrain profiles").experiment_id])
    assert run.data.metrics["held_out/decode"] >= 0
    assert {"points.json", "decode.png", "speedup-ngram.png"} <= {
        artifact.path for artifact in client.list_artifacts(run.info.run_id)
    }

    other = CliRunner().invoke(main, [*map(str, args), "--seed", "1"])
    assert "was made with another config" in other.output
    assert "seed: 0 -> 1" in other.output


def points_of(directory: Path) -> list[tuple]:
    columns = 'pass, prompt_tokens, kind, batch, "window", drafter, seconds'
    with duckdb.connect(str(directory / "profile.duckdb"), read_only=True) as con:
        return con.sql(f"SELECT {columns} FROM points").fetchall()


def test_pictures_and_words_of_a_profile(tmp_path):
    profile = measure(AffineMachine(), tp_degrees=(1,))
    draw_curves(profile, PointKind.DECODE, tmp_path / "decode.png")
    draw_curves(profile, PointKind.PREFILL, tmp_path / "prefill.png")
    assert (tmp_path / "decode.png").read_bytes() != (tmp_path / "prefill.png").read_bytes()
    lines = paying_lines(profile)
    assert [line.split(" pays ")[0] for line in lines] == [
        "drafting with lookup",
        "drafting with small",
    ]


def test_drafting_that_never_pays_is_said_so():
    class CostlyDrafter(AffineMachine):
        def draft_s(self, drafter: str, batch: int, window: int) -> float:
            return 1e3 * super().draft_s(drafter, batch, window)

    (line,) = paying_lines(measure(CostlyDrafter(), tp_degrees=(1,), drafters=("small",)))
    assert line.count("no batch at") == 4
