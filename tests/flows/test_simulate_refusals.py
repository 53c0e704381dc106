"""`refrain simulate` refuses bad input in one line that says what to do."""

import pytest

from refrain.engines.store.store import Store
from refrain.schemas.latency import PointKind, Profile
from tests.flows.test_simulate import (
    H100,
    a_directory,  # noqa: F401
    refrain,
    write_profile,
)

T = ("trace.parquet",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either a TRACE or --paper NAME"),
        ((*T, "--paper", "pat"), "give either a TRACE or --paper NAME, and not both"),
        (T, "give the number of engines by --engines"),
        ((*T, "--engines", "4"), "give either --profile, or both --hardware and --shape"),
        ((*T, "--engines", "4", "--hardware", "H100"), "or both --hardware and --shape"),
        ((*T, *H100, "--profile", "x"), "give either --profile, or both --hardware and --shape"),
        ((*T, "--engines", "4", "--profile", "x", "--shape", "Qwen3-8B"), "give either --profile"),
        (("--paper", "grpo"), "--paper 'grpo' is unknown; known: pat, rhymerl, specactor"),
        (("--paper", "pat", "--engines", "4"), "--engines is set by --paper: leave it out"),
        (("--paper", "pat", "--kv-tokens", "4"), "--kv-tokens is set by --paper: leave it out"),
        (("--paper", "pat", "--policies", "ranked"), "begin --policies with even"),
        (("--paper", "pat", "--policies", "even,even+ngram:4"), "leave the drafter out"),
        (
            ("--paper", "pat", "--steps", "101"),
            "pat has no step 101; its steps are 1 to 100",
        ),
        ((*T, *H100, "--seed", "1"), "leave it out with a TRACE"),
        ((*T, *H100, "--hardware", "TPU"), "--hardware 'TPU' is unknown; known: A40, H100"),
        ((*T, *H100, "--shape", "GPT"), "--shape 'GPT' is unknown; known: LLaMA3.1-8B"),
        ((*T, *H100, "--tp", "3"), "32 attention heads, which tp_degree 3 does not divide"),
        ((*T, *H100, "--shape", "Qwen2.5-32B", "--hardware", "A40"), "do not fit at TP 1: raise"),
        (
            (*T, *H100, "--policies", "odd"),
            "'odd' has no known placement; known: even, ranked, h",
        ),
        ((*T, *H100, "--policies", "even,even"), "--policies names even twice"),
        ((*T, *H100, "--policies", "even+ngram"), "write even+DRAFTER:WINDOW"),
        ((*T, *H100, "--policies", "even+ngram:0"), "the window at least 1"),
        ((*T, *H100, "--policies", "even+guess:2"), "drafter 'guess' is unknown; known: ngram"),
        ((*T, *H100, "--policies", "even+ngram:2"), "step 1, has no acceptance, so"),
        (
            (*T, *H100, "--policies", "even+histospec:4"),
            "policy '4' is unknown; known: goodput, paper, doub",
        ),
        ((*T, *H100, "--policies", "even+histospec:"), "window policy '' is unknown"),
        ((*T, *H100, "--policies", "ranked+histospec"), "trace.parquet lacks token ids, which"),
        (("--paper", "pat", "--policies", "even,even+histospec"), "leave the drafter out"),
        ((*T, *H100, "--acceptance", "0.5"), "--acceptance: no policy set drafts by it"),
        ((*T, *H100, "--steps", "9"), "trace.parquet has no step 9; its steps are 1 to 4"),
        ((*T, *H100, "--steps", "5-9"), "trace.parquet has no step 5-9"),
        ((*T, *H100, "--steps", "4-1"), "trace.parquet has no step 4-1"),
        ((*T, *H100, "--steps", "one"), "'one' is no step: write for example 1-10,20"),
        ((*T, *H100, "--tp", "16"), "error: TP 16 does not fit a node of 8 GPUs: lower the TP"),
        ((*T, *H100, "--num-gpus", "3"), "error: 4 engines of TP 1 do not fit 3 GPUs"),
        (
            (*T, *H100, "--kv-tokens", "500"),
            "the KV cache of an engine holds 500: raise --kv-tokens",
        ),
        (("nowhere", *H100), "nowhere does not exist: give a Parquet trace"),
        ((".", *H100), "is not a run's directory: it has no refrain.duckdb"),
        (("text.txt", *H100), "text.txt is not a Parquet file"),
        (("text.duckdb", *H100), "text.duckdb is not a refrain store"),
        (("empty.duckdb", *H100), "empty.duckdb has no finished rollouts of split train"),
        (
            (*T, "--engines", "4", "--profile", "nowhere"),
            "no profile at nowhere: give a profile.json",
        ),
        (
            (*T, "--engines", "4", "--profile", "text.txt"),
            "text.txt is not a profile: Invalid JSON",
        ),
        (
            (*T, *H100, "--json", "no/where.json"),
            "--json no/where.json: there is no such directory",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(directory, args, message):
    for name in ("text.txt", "text.duckdb"):
        (directory / name).write_text("x" * 100)
    Store(directory / "empty.duckdb").close()
    result = refrain(*args)
    assert result.exit_code == 2, result.output
    assert result.output.startswith("error: ")
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not (directory / "runs").exists()


@pytest.mark.parametrize(
    ("points", "tp_degree", "message"),
    [
        ((), 1, "p.json is empty: a profile has decode and prefill points"),
        (
            None,
            2,
            "p.json has no decode points at TP 2, only at TP 1; no prefill points at TP 2, only at "
            "TP 1: give another --tp",
        ),
        ((PointKind.PREFILL,), 1, "p.json has no decode points at TP 1, only at TP none"),
        ((PointKind.DECODE,), 1, "p.json has no prefill points at TP 1, only at TP none"),
    ],
)
def test_a_profile_without_what_it_takes(directory, points, tp_degree, message):
    whole = Profile.model_validate_json(write_profile(directory / "p.json").read_text())
    if points is not None:
        write_profile(directory / "p.json", [p for p in whole.points if p.kind in points])
    args = ("--engines", "4", "--profile", "p.json", "--tp", tp_degree)
    result = refrain("trace.parquet", *args)
    assert result.exit_code == 2
    assert message in result.output


def test_a_profile_without_drafting(directory):
    write_profile(directory / "p.json")
    args = ("--policies", "even+ngram:4", "--acceptance", "0.5", "--profile", "p.json")
    result = refrain("trace.parquet", "--engines", "4", *args)
    assert result.exit_code == 2
    assert "has no verify points at tp_degree 1; known: none" in result.output
