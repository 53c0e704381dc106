"""`refrain profile` on the shipped model. It measures each point once, even if it is killed."""

import re
from collections import Counter
from pathlib import Path
from typing import ClassVar

import duckdb
import pytest
from click.testing import CliRunner

import refrain.tasks.profile
from refrain.engines.inference.profiling.drafter import ProfilingDrafter
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.reports.profile import draw_curves, paying_lines
from refrain.engines.store.profiles import ProfileStore
from refrain.engines.tracking.mlflow_client import open_client
from refrain.flows.cli import main
from refrain.schemas.drafting import DraftModel
from refrain.schemas.latency import PointKind, Profile, ProfilePoint
from refrain.schemas.profile import MachineFacts, Measurement, ProfileConfig, ProfileRun
from refrain.tasks.profile import (
    STORE_FILE,
    draft_model_points,
    drafting_points,
    fit_profile,
    measure_decode,
    measure_draft_model,
    measure_drafting,
)
from tests.conftest import DEMO
from tests.flows.commands import Command, altered_model
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
        (["--tp", "one"], "'one' is not a list of numbers"),
        (["--max-context", "5000"], "has a context of 1024 tokens, and 992 with draft windows"),
        (["--max-context", "70"], "no room to measure"),
        (["--max-batch", "1"], "max_batch: Input should be greater than or equal to 2"),
        (["--windows", "0,4"], "windows.0: Input should be greater than or equal to 1"),
        (["--name", "a/b"], "name: String should match"),
        (["--draft-model", "small"], "'small' is not NAME=PATH"),
        (["--draft-model", "=models/small"], "'=models/small' is not NAME=PATH"),
        (["--draft-model", "small=nowhere"], "draft_models: nowhere does not exist"),
        (["--draft-model", "a b=nowhere"], "draft_models.0.name: String should match"),
        (
            ["--draft-model", "ngram=nowhere"],
            "a name of its own, other than histospec, head, ngram",
        ),
        (["--draft-model", "histospec=nowhere"], "draft_models: Value error, histospec: each"),
        (["--draft-model", "a=b", "--draft-model", "a=c"], "a, a: each needs a name of its own"),
        (["--draft-model", "a=b", "--windows", ""], "draft_models need windows to draft"),
    ],
)
def test_bad_input_is_named_before_anything_starts(tmp_path, args, message):
    output = refused("--model", DEMO / "model", "--runs-dir", tmp_path, *args)
    assert message in output
    assert not (tmp_path / "profiles").exists()


def test_a_directory_without_a_model_is_refused(tmp_path):
    assert "no config.json" in refused("--model", tmp_path, "--runs-dir", tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 9}, "has no row for tokens from 9 to 35 of"),
        (
            {"max_position_embeddings": 300},
            r"has a context of 300 tokens, but max_context \+ twice the longest of windows is 308",
        ),
    ],
)
def test_a_model_that_cannot_draft_for_this_one_is_refused(tmp_path, values, message):
    drafter = altered_model(tmp_path / "drafter", **values)
    args = ["--model", DEMO / "model", "--runs-dir", tmp_path, "--windows", "1,4"]
    args += ["--max-context", "300", "--draft-model", f"small={drafter}"]
    output = " ".join(refused(*args).split())
    assert re.search(f"draft_models: .*{message}", output)
    assert not (tmp_path / "profiles").exists()


class FakeProfilers:
    """Profilers that answer at once, and fail after `num_points` points."""

    num_points = 10**6
    started: ClassVar[list[tuple]] = []

    def __init__(self, engine: type, arguments, *, num_gpus_each: int, **timeouts: float) -> None:
        del timeouts
        self.num_engines = len(arguments)
        self.started.append((engine, arguments, num_gpus_each))

    async def start(self) -> MachineFacts:
        return FACTS

    async def measure(self, measurement, num_steps, seed) -> list[ProfilePoint]:
        del num_steps
        if seed == "warm-up":
            return []
        if FakeProfilers.num_points == 0:
            raise RuntimeError("killed")
        FakeProfilers.num_points -= 1
        return [point_of(measurement)]

    async def shutdown(self) -> None:
        pass


FACTS = MachineFacts(hardware="none", max_active_tokens=10**6, max_step_tokens=2048, versions={})
SMALL_MODEL = DraftModel(name="small", path=DEMO / "model", num_engines=2)


def point_of(measurement: Measurement) -> ProfilePoint:
    """Return the point that an engine would report. Drafting always has TP degree 1."""
    fields = measurement.model_dump(exclude={"prompt_tokens"})
    if measurement.kind is PointKind.DRAFT:
        return ProfilePoint(**fields | {"tp_degree": 1}, seconds=0.1)
    return ProfilePoint(**fields, context_tokens=measurement.prompt_tokens, seconds=0.1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return an unfinished profile. Its engines are fakes."""
    config = ProfileConfig(
        model=DEMO / "model",
        runs_dir=tmp_path,
        tp_degrees=(2, 4),
        windows=(1, 4, 16),
        draft_models=(SMALL_MODEL,),
    )
    config.run_dir.mkdir(parents=True)
    monkeypatch.setattr(refrain.tasks.profile, "Profilers", FakeProfilers)
    monkeypatch.setattr(FakeProfilers, "started", [])
    return ProfileRun(config=config, max_context=384, num_gpus=8)


@pytest.fixture
def store(run):
    """Open the store that the tasks write to."""
    store = ProfileStore(run.config.run_dir / STORE_FILE)
    yield store
    store.close()


async def test_draft_model_profile_continues_where_it_was(run, store, monkeypatch):
    store.check_facts(FACTS, 2)
    wanted = {m for _, m in draft_model_points(run, "small", FACTS)}
    verified = {m for _, m in drafting_points(run, 2, FACTS) if m.kind is PointKind.VERIFY}
    assert {(m.batch, m.window) for m in wanted} == {(m.batch, m.window) for m in verified}
    monkeypatch.setattr(FakeProfilers, "num_points", 4)
    with pytest.raises(RuntimeError, match="killed"):
        await measure_draft_model.fn(run, SMALL_MODEL)
    assert len(store.measured()) == 4
    monkeypatch.setattr(FakeProfilers, "num_points", 10**6)
    assert await measure_draft_model.fn(run, SMALL_MODEL) == len(wanted) - 4
    assert store.measured() == {(0, m) for m in wanted}
    # With no points left, no engine starts.
    num_started = len(FakeProfilers.started)
    assert await measure_draft_model.fn(run, SMALL_MODEL) == 0
    assert len(FakeProfilers.started) == num_started == 2


def num_wanted(config):
    return sum(one.num_gpus for one in refrain.tasks.profile.gpus_wanted(config))


def test_engines_and_draft_models_take_the_gpus_one_after_the_other():
    config = ProfileConfig(model=DEMO / "model", tp_degrees=(1, 2), num_engines=2)
    assert num_wanted(config) == 4
    model = DraftModel(name="small", path=DEMO / "drafter", num_engines=6)
    assert num_wanted(config.model_copy(update={"draft_models": (model,)})) == 6


async def test_a_draft_model_is_measured_as_a_run_has_it(run):
    await measure_draft_model.fn(run, SMALL_MODEL)
    ((engine, arguments, num_gpus_each),) = FakeProfilers.started
    assert (engine, num_gpus_each, len(arguments)) == (ProfilingDrafter, 1, 2)
    ((config,), _) = arguments
    assert (config.name, config.path) == ("small", DEMO / "model")
    assert config.max_model_len == 384 + 2 * 16
    assert config.max_num_seqs == run.config.max_batch


@pytest.mark.parametrize("tp_degree", [2, 4])
async def test_verification_and_lookups_continue_at_any_tp_degree(run, store, tp_degree):
    num_points = await measure_drafting.fn(run, tp_degree)
    kinds = Counter(m.kind for _, m in store.measured())
    assert kinds[PointKind.DRAFT] == (kinds[PointKind.VERIFY] if tp_degree == 2 else 0)
    assert num_points == kinds.total() > 0
    assert await measure_drafting.fn(run, tp_degree) == 0


async def test_a_profile_has_the_kv_cache_of_each_tp_degree(run, monkeypatch):
    for tp_degree in run.config.tp_degrees:
        of_degree = FACTS.model_copy(update={"max_active_tokens": tp_degree * 10**5})
        monkeypatch.setattr("tests.flows.test_profile.FACTS", of_degree)
        await measure_decode.fn(run, tp_degree)
    profile = (await fit_profile.fn(run, [])).profile
    assert profile.max_active_tokens == profile.kv_capacity_tokens(2) == 200_000
    assert profile.kv_capacity_tokens(4) == 400_000


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_profile_continues_and_measures_nothing_twice(tmp_path):
    args = ["profile", "--model", DEMO / "model", "--runs-dir", tmp_path, "--name", "small"]
    args += [*SMALL, "--draft-model", f"small={DEMO / 'drafter'}"]
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
    assert len(after) == len({row[:-1] for row in after}) == 2 * NUM_DECODE + 3 * 2 * 2
    assert processes(directory) == []

    profile = Profile.model_validate_json((directory / "profile.json").read_text())
    latency = FittedLatency(profile)
    assert 0.0 < latency.decode_s(1, 4, 400) <= latency.verify_s(1, 4, 400, 4) < 1.0
    assert 0.0 < latency.prefill_s(1, 4, 100) < 1.0
    assert 0.0 < latency.draft_s("ngram", 4, 4) < 0.1
    # A lookup is one search. A draft model takes a step for each token.
    assert 10 * latency.draft_s("ngram", 4, 4) < latency.draft_s("small", 4, 4) < 1.0
    assert latency.draft_s("small", 4, 1) < latency.draft_s("small", 4, 4)
    assert "error of the fit" in output
    assert f"profile: {directory / 'profile.json'}" in output
    client, _ = open_client(tmp_path, None)
    (run,) = client.search_runs([client.get_experiment_by_name("refrain profiles").experiment_id])
    assert run.data.metrics["held_out/decode"] >= 0
    assert re.search(r"batch 4 +small +", output)
    assert {"points.json", "decode.png", "speedup-small.png", "ladder.json", "ladder.png"} <= {
        artifact.path for artifact in client.list_artifacts(run.info.run_id)
    }

    other = CliRunner().invoke(main, [*map(str, args), "--seed", "1"])
    assert "was started with other settings" in other.output
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


def test_drafting_that_never_pays_is_reported():
    class CostlyDrafter(AffineMachine):
        def draft_s(self, drafter: str, batch: int, window: int) -> float:
            return 1e3 * super().draft_s(drafter, batch, window)

    (line,) = paying_lines(measure(CostlyDrafter(), tp_degrees=(1,), drafters=("small",)))
    assert line.count("no batch at") == 4
