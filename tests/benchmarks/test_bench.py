"""`refrain bench` from the command line, and the figures of the drafting bench for known traces."""

import importlib
import io
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from refrain.benchmarks.lockstep import PassTime
from refrain.engines.simulate.trace import Trace, write_trace
from refrain.flows.bench import BENCHES
from refrain.flows.cli import main
from refrain.schemas.bench import BenchReport
from refrain.schemas.latency import PointKind
from tests.conftest import REPOSITORY
from tests.flows.test_simulate import point, write_profile

PROMPT = [9, 8, 7]
ANSWER = list(range(10, 21))


@pytest.fixture(autouse=True, name="directory")
def a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture(autouse=True)
def no_arctic(monkeypatch):
    """Hide arctic-inference, so that tests do not depend on whether it is installed."""
    for module in (
        "refrain.benchmarks.arctic",
        "refrain.benchmarks.drafting",
        "refrain.benchmarks.index",
    ):
        monkeypatch.setattr(f"{module}.find_cache_class", lambda: None)


def bench(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, args)])


def succeed(*args: str | Path) -> Result:
    result = bench(*args)
    assert result.exit_code == 0, result.output
    return result


def measured(*args: str | Path) -> dict:
    return json.loads(succeed(*args, "--json", "-").stdout)


def write(epochs, path="t.parquet", **columns) -> str:
    """Write a trace with one step an epoch. Each epoch maps a prompt's last token to responses."""
    rows = [
        (epoch, key, i, response)
        for epoch, groups in enumerate(epochs)
        for key, responses in groups.items()
        for i, response in enumerate(responses)
    ]
    table = {
        "step": [row[0] + 1 for row in rows],
        "epoch": [row[0] for row in rows],
        "prompt_key": [f"prompt/{row[1]}" for row in rows],
        "sample_index": [row[2] for row in rows],
        "prompt_tokens": [3] * len(rows),
        "response_tokens": [len(row[3]) for row in rows],
        "reward": [None if row[2] else 1.0 for row in rows],
        "prompt_token_ids": [[*PROMPT[:2], row[1]] for row in rows],
        "response_token_ids": [row[3] for row in rows],
    }
    write_trace(Trace(pa.table(table | columns), "t"), path)
    return path


def drawn(num_epochs=3):
    """Return responses over three tokens, so that all kinds of matches occur."""
    rng = np.random.default_rng(0)
    return [
        {key: [rng.integers(0, 3, rng.integers(1, 40)).tolist() for _ in "ab"] for key in (5, 6)}
        for _ in range(num_epochs)
    ]


def test_list_describes_each_bench_and_its_duration():
    text = " ".join(succeed("--list").output.split())
    for name, known in BENCHES.items():
        assert name in text
        assert known.takes in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (),
            "give the NAME of a bench; known: chaos, deciding, decoupled, demo, distillation,",
        ),
        (
            ("speed",),
            "there is no bench 'speed'; known: chaos, deciding, decoupled, demo, distillation",
        ),
        (("index", "--fast"), "unrecognized arguments: --fast; `refrain bench index --help` lists"),
        (("index", "--repeats", "0"), "--repeats 0: give at least 1"),
        (("index", "--json", "no/where.json"), "--json no/where.json: there is no such directory"),
        (("drafting",), "the following arguments are required: TRACE; `refrain bench drafting -"),
        (("drafting", "nowhere"), "nowhere does not exist: give a Parquet trace"),
        (("drafting", "bare.parquet"), "lacks token ids"),
        (("drafting", "bare.parquet"), "refrain export RUN FILE --token-ids"),
        (("drafting", "one.parquet"), "one.parquet has one epoch. Give a trace of at least two"),
        (("drafting", "t.parquet", "--epochs", "9"), "t.parquet has no epoch 9; it has 1 to 3"),
        (("drafting", "t.parquet", "--epochs", "two"), "'two' must list epochs, for example"),
        (("drafting", "t.parquet", "--max-num-seqs", "0"), "--max-num-seqs 0: give at least 1"),
        (("drafting", "t.parquet", "--profile", "no"), "no profile at no: give a profile.json"),
        (("drafting", "t.parquet", "--profile", "p.json"), "p.json has no verify and draft points"),
        (("drafting", "nowhere", "--profile", "d.json", "--tp", "2"), "at tp_degree 2; known: 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(directory, args, message):
    write(drawn())
    write(drawn(1), "one.parquet")
    num_rows = sum(len(responses) for groups in drawn() for responses in groups.values())
    write(drawn(), "bare.parquet", response_token_ids=[None] * num_rows)
    write_profile(directory / "p.json")
    drafting_profile(directory / "d.json")
    result = bench(*args)
    assert result.exit_code == 2, result.output
    assert result.output.startswith("error: ")
    assert message in result.output
    assert result.output.count("\n") == 1


def test_the_report_is_one_shape(directory):
    write(drawn())
    result = succeed("drafting", "t.parquet", "--json", "found.json")
    assert "epochs 2 to 3" in result.output
    assert "arctic-inference is not installed" in result.output
    found = json.loads((directory / "found.json").read_text())
    assert list(found) == ["name", "figures", "rows", "command", "versions"]
    report = BenchReport.model_validate(found)
    assert report.name == "drafting"
    assert report.command == "refrain bench drafting t.parquet"
    assert report.versions["numba"] == version("numba")
    names = ["none", "ngram", "histospec_paper", "histospec_counts", "histospec_device"]
    assert [(row["drafter"], row["epoch"]) for row in report.rows] == [
        (name, epoch) for epoch in (2, 3) for name in (*names, "histospec")
    ]


def test_only_the_json_goes_to_standard_output():
    write(drawn())
    result = succeed("drafting", "t.parquet", "--epochs=3", "--json=-")
    found = json.loads(result.stdout)
    assert found["command"] == "refrain bench drafting t.parquet --epochs=3"
    assert {row["epoch"] for row in found["rows"]} == {3}
    assert "accept-" in result.stderr


def test_the_same_answers_again():
    """The answer has 11 tokens. The paper drafts 2, 4 and 2 tokens, and each pass adds one. A draft
    of 10 and its token are the whole answer. Prompt lookup finds nothing in distinct tokens."""
    write([{7: [ANSWER, ANSWER]}] * 6)
    figures = measured("drafting", "t.parquet")["figures"]
    assert (figures["first_epoch"], figures["last_epoch"]) == (5, 6)
    lengths = {name: figures[f"{name}_acceptance_length"] for name in ("none", "ngram")}
    assert lengths == {"none": 1.0, "ngram": 1.0}
    assert figures["histospec_paper_acceptance_length"] == pytest.approx(11 / 3)
    assert figures["histospec_paper_acceptance_rate"] == 1.0
    assert figures["histospec_paper_speculation_rate"] == pytest.approx(8 / 11)
    assert figures["histospec_paper_num_draft_tokens"] == 2 * 2 * 8
    assert figures["histospec_acceptance_length"] == 11.0
    assert "none_rollout_s" not in figures


def test_the_paper_waits_for_a_match_of_three():
    """The first of the 11 tokens is new. A match of two: 3 passes without drafts, then the rest at
    once. The paper's match of three: 4 passes without, then drafts of 2 and 3."""
    figures = measured("drafting", write([{7: [ANSWER]}, {7: [[99, *ANSWER[1:]]]}]))["figures"]
    assert figures["histospec_paper_acceptance_length"] == pytest.approx(11 / 6)
    assert figures["histospec_acceptance_length"] == pytest.approx(11 / 4)


def test_without_rewards_the_most_frequent_answer_is_drafted():
    """Both answers begin alike. The first has the reward, the other occurs three times."""
    rewarded, frequent = [*ANSWER[:5], *range(30, 40)], [*ANSWER[:5], *range(50, 60)]
    write([{7: [rewarded, frequent, frequent, frequent]}, {7: [frequent]}])
    figures = measured("drafting", "t.parquet")["figures"]
    assert figures["histospec_counts_acceptance_length"] > figures["histospec_acceptance_length"]


def test_only_the_last_earlier_group_is_history():
    other = list(range(30, 41))
    epochs = [{7: [ANSWER]}, {5: [other]}, {7: [ANSWER]}, {7: [other]}, {7: [other]}, {4: [other]}]
    rows = measured("drafting", write(epochs))["rows"]
    lengths = [row["acceptance_length"] for row in rows if row["drafter"] == "histospec_paper"]
    assert lengths == pytest.approx([1.0, 11 / 3, 1.0, 11 / 3, 1.0])


def drafting_profile(path: Path) -> Path:
    """Write a profile: 10 ms a step, 10 us a row, 1 ms to verify a draft token, 100 us to draft."""
    points = [
        point(kind, batch=batch, seconds=seconds + 1e-5 * batch * (kind != "draft"), **fields)
        for batch in (1, 128)
        for tokens in (2, 2048)
        for kind, seconds, fields in (
            (PointKind.DECODE, 0.01, {"context_tokens": batch * tokens}),
            (PointKind.PREFILL, 0.01, {"rms_tokens": tokens}),
            *(
                (PointKind.VERIFY, 0.01 + 1e-3 * w, {"context_tokens": batch * tokens, "window": w})
                for w in (1, 2, 16)
            ),
            *((PointKind.DRAFT, 1e-4 * w, {"window": w, "drafter": "ngram"}) for w in (1, 2, 16)),
        )
    ]
    return write_profile(path, points)


def test_rollout_time_is_the_sum_over_passes(directory):
    """Two rows run together: 11 passes without drafts, or 3 passes with drafts of 2, 4 and 2."""
    write([{7: [ANSWER, ANSWER]}] * 2)
    drafting_profile(directory / "p.json")
    figures = measured("drafting", "t.parquet", "--profile", "p.json")["figures"]
    assert figures["none_rollout_s"] == pytest.approx(11 * 0.01002, rel=1e-3)
    paper_s = 3 * 0.01002 + 8 * 0.0011
    assert figures["histospec_paper_rollout_s"] == pytest.approx(paper_s, rel=1e-3)
    speedup = figures["histospec_paper_speedup"]
    assert speedup == pytest.approx(11 * 0.01002 / paper_s, rel=1e-3)
    assert figures["none_speedup"] == 1.0
    alone = measured("drafting", "t.parquet", "--profile", "p.json", "--max-num-seqs", "1")
    assert alone["figures"]["none_rollout_s"] == pytest.approx(22 * 0.01001, rel=1e-3)


def test_between_whole_windows_time_is_linear():
    class Squares:
        def verify_s(self, tp_degree, batch, context_tokens, window):
            return 100.0 * tp_degree + batch + context_tokens + window**2

        def draft_s(self, drafter, batch, window):
            return 250.0 * batch * window * (drafter == "d")

    pass_s = PassTime(Squares(), 2, "d")
    assert pass_s(4, 10, 0) == 214.0
    assert pass_s(4, 10, 8) == 214.0 + 4 + 2000
    assert pass_s(4, 10, 9) == 214.0 + (0.75 * 4 + 0.25 * 9) + 2250


def test_the_gate_of_what_ships_learns_from_the_profile(directory):
    """Drafts that are always right grow longer. Drafts that are always wrong stop."""
    answers = [[1, 2, 3, *range(i, i + 11)] for i in range(10, 170, 20)]
    drafting_profile(directory / "p.json")
    write([{7: [ANSWER]}] * 12, "right.parquet")
    write([{7: [answer]} for answer in answers], "wrong.parquet")
    rows = {}
    for name in ("right", "wrong"):
        found = measured("drafting", f"{name}.parquet", "--profile", "p.json")["rows"]
        rows[name] = [row for row in found if row["drafter"] == "histospec"]
    lengths = [row["acceptance_length"] for row in rows["right"]]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 1.5 * lengths[0]
    assert rows["wrong"][0]["num_draft_tokens"] > rows["wrong"][-1]["num_draft_tokens"] == 0


def test_the_index_bench_at_reduced_size(monkeypatch):
    for name, value in (("NUM_RESPONSES", 3), ("RESPONSE_TOKENS", 256)):
        monkeypatch.setattr(f"refrain.benchmarks.index.{name}", value)
    found = measured("index", "--repeats", "2")
    assert sorted(found["figures"]) == [
        "build_tokens_per_s",
        "bytes_per_token",
        "draft_256_rows_ms",
        "shared_build_tokens_per_s",
        "shared_bytes_per_token",
        "shared_draft_256_rows_ms",
    ]
    assert found["command"] == "refrain bench index --repeats 2"
    assert 16.0 < found["figures"]["bytes_per_token"] < 40.0
    assert [(row["index"], row["repeat"]) for row in found["rows"]] == [
        (name, i) for i in (0, 1) for name in ("refrain", "refrain, shared")
    ]
    assert "not installed" in bench("index", "--repeats", "1").output


OLDER = "pipeline", "pipeline_long_tail"
"""Baselines that lack a column which their bench has by now."""
BASELINES = {
    path.stem: BenchReport.model_validate_json(path.read_text())
    for path in sorted((REPOSITORY / "benchmarks" / "baselines").glob("*.json"))
    if path.stem not in (*OLDER, "gpu") and not path.stem.startswith(("simulate", "profile"))
}


@pytest.mark.parametrize("name", BASELINES)
def test_its_tables_fit_a_terminal(name):
    report, text = BASELINES[name], io.StringIO()
    module = importlib.import_module(f"refrain.benchmarks.{report.name}")
    module.show(report, Console(file=text, width=80))
    assert text.getvalue()
    assert "…" not in text.getvalue()


def test_a_name_imports_only_its_own_bench():
    code = (
        "import sys; from click.testing import CliRunner; from refrain.flows.cli import main\n"
        "assert CliRunner().invoke(main, ['bench', '--list']).exit_code == 0\n"
        "heavy = {'numpy', 'numba', 'benchmarks', 'pyarrow', 'duckdb'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=REPOSITORY)


def test_the_environment_is_set_before_ray_is_imported():
    """Ray reads its token mode on import. If it is set later, Ray's processes refuse each other."""
    code = """
import os, sys
from refrain.flows.bench import launch_bench

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "ray":
            print(os.environ.get("RAY_AUTH_MODE"))

sys.meta_path.insert(0, Finder())
launch_bench("rollout", ["--help"])
"""
    command = ["env", "-u", "RAY_AUTH_MODE", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("token\n"), done.stdout


NUMBERS = ["nan", "inf", "-1", "1e9", "1" + "0" * 30, "9" * 5000, "", "0x10", "1.5", "\u0663"]


@pytest.mark.parametrize("name", BENCHES)
def test_each_bench_option_refuses_invalid_values(name: str, directory: Path) -> None:
    """Numbers out of bounds, pipes and dangling links are refused before the bench measures."""
    os.mkfifo(directory / "pipe")
    (directory / "link").symlink_to("nothing")
    for option, kind in options_of(name):
        bad = NUMBERS if kind is int else ["pipe", "link", "x" * 300, "/dev/zero"]
        for value in bad:
            result = bench(name, f"{option}={value}")
            assert result.exit_code == 2, (option, value, result.output)
            assert isinstance(result.exception, SystemExit), (option, value)
            assert result.output.startswith("error: ")
            assert len(result.output.splitlines()) == 1


def options_of(name: str) -> list[tuple[str, type]]:
    parser = ArgumentParser()
    importlib.import_module(f"refrain.benchmarks.{name}").add_arguments(parser)
    actions = [action for action in parser._actions if action.option_strings]
    return [(one.option_strings[-1], one.type) for one in actions if one.type in (int, Path)]
