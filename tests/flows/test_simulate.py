"""`refrain simulate` from the command line: what it prints, writes and refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from refrain.benchmarks.papers.generate import generate, rhymerl
from refrain.benchmarks.papers.settings import SETTINGS
from refrain.engines.simulate.trace import Trace, measured_s, read_trace, write_trace
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.flows.cli import main
from refrain.flows.simulate_input import read_policies
from refrain.schemas.latency import PointKind, Profile, ProfilePoint
from refrain.schemas.rollout import DraftSetting
from refrain.schemas.simulate import ClusterLayout
from tests.simulate.test_trace import changed
from tests.store.test_store import make_rollout

H100 = ("--engines", "4", "--hardware", "h100", "--shape", "qwen3-8b")
SPEC = rhymerl().model_copy(update={"num_prompts": 32, "prompts_per_step": 16, "group_size": 4})
"""An epoch has two steps."""


@pytest.fixture(autouse=True, name="directory")
def a_directory(tmp_path, monkeypatch):
    """Change to a new directory that has a trace. The command writes runs/ there."""
    monkeypatch.chdir(tmp_path)
    write_trace(generate(SPEC, 0, range(1, 5)), "trace.parquet")
    return tmp_path


@pytest.fixture(autouse=True)
def sketches(request, monkeypatch):
    """Skip drawing, unless a test uses `pictures`: it takes longer than all the rest."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(
            "refrain.flows.simulate.draw_gantt", lambda *args: Path(args[2]).touch()
        )


@pytest.fixture
def pictures():
    """Have the pictures drawn."""


@pytest.fixture
def papers(monkeypatch):
    """Reduce RhymeRL's setting to five steps: two epochs of two steps, and one step more."""
    (setting,) = SETTINGS["rhymerl"]
    layout = ClusterLayout(num_engines=4)
    spec = SPEC.model_copy(update={"num_steps": 5})
    small = replace(setting, spec=spec, layout=layout, steps=(3, 4), overlap=None)
    monkeypatch.setitem(SETTINGS, "rhymerl", (small,))


def refrain(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, args)])


def succeed(*args: str | Path) -> Result:
    result = refrain(*args)
    assert result.exit_code == 0, result.output
    return result


def simulated(*args: str | Path) -> dict:
    return json.loads(succeed(*args, "--json", "-").stdout)


def point(kind: PointKind, **fields) -> ProfilePoint:
    return ProfilePoint(kind=kind, num_repeats=60, **fields)


def write_profile(path: Path, points=None, tp_degree=1) -> Path:
    """Write a profile of batches up to 128 sequences of 2K tokens. A step takes 10 ms, plus 10 us a
    sequence."""
    if points is None:
        points = [
            point(kind, tp_degree=tp_degree, batch=batch, seconds=0.01 + 1e-5 * batch, **length)
            for batch in (1, 128)
            for tokens in (2, 2048)
            for kind, length in (
                (PointKind.DECODE, {"context_tokens": batch * tokens}),
                (PointKind.PREFILL, {"rms_tokens": tokens}),
            )
        ]
    profile = Profile(
        model_name="toy",
        model_hash="0",
        hardware="made up",
        dtype="float32",
        max_active_tokens=100_000,
        points=tuple(points),
        created_s=0.0,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.model_dump_json())
    return path


def write_store(path: Path) -> Path:
    """Write a store with two steps of 2 x 8 rollouts. Each step took a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with Store(path) as store:
        for step in (1, 2):
            rollouts = [
                make_rollout(step, prompt, sample, tokens=10 + sample)
                for prompt in "ab"
                for sample in range(8)
            ]
            store.add_rollouts(rollout_rows(rollouts), epoch=step - 1)
    return path


def test_policy_sets_side_by_side(directory):
    result = succeed("trace.parquet", *H100, "--out", "pictures", "--json", "found.json")
    assert "SIMULATION of trace.parquet: 4 engines of TP 1" in result.output
    assert "formula for Qwen3-8B on H100" in result.output
    for word in ("even", "ranked", "speed-up", "idle share by engine"):
        assert word in result.output
    pictures = sorted(file.name for file in (directory / "pictures").iterdir())
    assert pictures == ["even.png", "ranked.png"]
    found = json.loads((directory / "found.json").read_text())
    assert list(found) == ["name", "simulation", "figures", "rows", "command", "versions"]
    assert found["name"] == "trace"
    assert found["simulation"] is True
    assert found["figures"]["ranked_speedup"] > 1.0
    assert found["figures"]["baseline_idle_share"] > found["figures"]["ranked_idle_share"] > 0.0
    assert [(r["step"], r["policy_set"]) for r in found["rows"]] == [
        (step, name) for step in range(1, 5) for name in ("even", "ranked")
    ]
    assert found["command"] == (
        "refrain simulate trace.parquet --hardware h100 --shape qwen3-8b --engines 4 "
        "--policies even,ranked"
    )


@pytest.mark.usefixtures("papers", "pictures")
def test_same_arguments_same_bytes(directory):
    for name in "ab":
        succeed("trace.parquet", *H100, "--out", name, "--json", f"{name}.json")
        where = ("--out", f"{name}-paper", "--json", f"{name}-paper.json")
        succeed("--paper", "rhymerl", "--policies", "even", *where)
    for name in ("{}.json", "{}-paper.json", "{}/even.png", "{}/ranked.png", "{}-paper/even.png"):
        one, two = ((directory / name.format(n)).read_bytes() for n in "ab")
        assert one == two
        assert len(one) > 1000


def test_the_pictures_share_step_and_axis(monkeypatch):
    drawn = []

    def draw(_, axis_s, file, title):
        file.touch()
        drawn.append((axis_s, title))

    monkeypatch.setattr("refrain.flows.simulate.draw_gantt", draw)
    found = simulated("trace.parquet", *H100, "--out", "here", "--steps", "3,4")
    times = [row["step_s"] for row in found["rows"] if row["policy_set"] == "even"]
    step = times.index(max(times)) + 3
    ((axis_s, title), (other_axis_s, other_title)) = drawn
    assert sorted(Path("here").iterdir()) == [Path("here/even.png"), Path("here/ranked.png")]
    assert title.startswith(f"SIMULATION trace, step {step}, even: ")
    assert other_title.startswith(f"SIMULATION trace, step {step}, ranked: ")
    assert axis_s == other_axis_s
    longest_s, shortest_s = (row["step_s"] for row in found["rows"] if row["step"] == step)
    assert longest_s > shortest_s
    assert axis_s == pytest.approx(longest_s, rel=1e-5)


def test_only_the_json_goes_to_standard_output():
    result = succeed("trace.parquet", *H100, "--json", "-")
    assert json.loads(result.stdout)["simulation"] is True
    assert "SIMULATION" in result.stderr


def test_some_steps():
    rows = simulated("trace.parquet", *H100, "--steps", "3-9, 1")["rows"]
    assert sorted({row["step"] for row in rows}) == [1, 3, 4]


def test_a_layout_is_taken_as_given():
    fast = simulated("trace.parquet", *H100, "--policies", "even")
    slow = simulated("trace.parquet", *H100, "--policies", "even", "--max-num-seqs", "2")
    tight = simulated("trace.parquet", *H100, "--policies", "even", "--kv-tokens", "9000")
    split = simulated("trace.parquet", *H100, "--policies", "even", "--tp", "2")
    assert slow["figures"]["baseline_step_s"] > fast["figures"]["baseline_step_s"]
    assert tight["figures"]["baseline_step_s"] > fast["figures"]["baseline_step_s"]
    assert split["figures"]["baseline_step_s"] < fast["figures"]["baseline_step_s"]


@pytest.mark.parametrize(
    "place", ["p.json", "mine/profile.json", "runs/profiles/mine/profile.json"]
)
def test_a_profile_is_found_by_path_or_name(directory, place):
    file = write_profile(directory / place)
    name = "p.json" if place == "p.json" else "mine"
    result = succeed("trace.parquet", "--engines", "4", "--profile", name)
    assert "100,000 tokens each; latency: profile of toy on made up" in result.output
    same = succeed("trace.parquet", "--engines", "4", "--profile", file)
    assert same.output == result.output


def test_every_tp_degree_has_its_own_kv_cache(directory):
    """In a profile of an earlier version, all TP degrees have the KV cache of the lowest."""
    file = write_profile(directory / "p.json", tp_degree=2)
    args = ("trace.parquet", "--engines", "4", "--profile", file, "--tp", "2")
    assert "100,000 tokens each" in succeed(*args).output
    profile = Profile.model_validate_json(file.read_text())
    own = profile.model_copy(update={"active_tokens_of": {1: 100_000, 2: 230_000}})
    file.write_text(own.model_dump_json())
    assert "230,000 tokens each" in succeed(*args).output


def test_extrapolation_is_reported_in_one_line(directory):
    write_profile(directory / "p.json")
    inside = Trace(changed(prompt_tokens=[3, 3, 4, 4]).drop_columns(["prompt_token_ids"]), "t")
    write_trace(inside, "short.parquet")
    args = ("--engines", "1", "--profile", "p.json")
    assert "warning" not in succeed("short.parquet", *args).output
    output = succeed("trace.parquet", *args).output
    (line,) = [line for line in output.splitlines() if "warning" in line]
    assert "times were extrapolated: decoding was profiled up to batch 128 and 262,144" in line
    assert "but 64 and " in line


@pytest.mark.parametrize("name", ["mine", "runs/mine", "runs/mine/refrain.duckdb"])
def test_a_run_is_compared_with_itself(directory, name):
    store = write_store(directory / "runs/mine/refrain.duckdb")
    assert measured_s(store) == {1: 1.0, 2: 1.0}
    assert simulated(name, *H100)["name"] == "mine"
    write_profile(directory / "p.json")
    args = (name, "--engines", "2", "--profile", "p.json")
    found = simulated(*args)
    assert {row["measured_s"] for row in found["rows"]} == {1.0}
    # The longest response of each engine takes 17 steps of at most 10.16 ms.
    assert found["rows"][0]["step_s"] == pytest.approx(0.172, abs=0.001)
    assert found["figures"]["median_error_even"] == pytest.approx(0.828, abs=0.001)
    assert found["figures"]["median_ratio_ranked"] == pytest.approx(0.172, abs=0.001)
    output = succeed(*args).output
    assert "compared with the measured run, which places by `ranked`: median of 2 steps" in output


def test_an_exported_run_simulates_as_the_run(directory):
    write_store(directory / "runs/mine/refrain.duckdb")
    result = CliRunner().invoke(main, ["export", "mine", "mine.parquet", "--token-ids"])
    assert result.output == "mine.parquet: 32 rollouts of 2 steps\n"
    steps = [
        [row["step_s"] for row in simulated(name, *H100)["rows"]]
        for name in ("mine", "mine.parquet")
    ]
    assert steps[0] == steps[1]
    assert read_trace("mine.parquet").table["response_token_ids"].null_count == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nobody", "x.parquet"), "nobody does not exist"),
        (("mine", "no/where.parquet"), "no/where.parquet: there is no such directory"),
    ],
)
def test_impossible_exports_are_reported(directory, args, message):
    write_store(directory / "runs/mine/refrain.duckdb")
    result = CliRunner().invoke(main, ["export", *args])
    assert result.exit_code == 2
    assert f"error: {message}" in result.output


def test_drafting_pays_when_it_is_accepted():
    policies = ("--policies", "even,even+ngram:4")
    found = simulated("trace.parquet", *H100, *policies, "--acceptance", "0.8")
    assert found["figures"]["even_ngram_4_speedup"] > 1.5
    wrong = simulated("trace.parquet", *H100, *policies, "--acceptance", "0")
    assert wrong["figures"]["even_ngram_4_speedup"] < 1.0


def test_a_draft_model_drafts_ahead_and_ngrams_in_turn():
    model, ngram = read_policies("even+small:4,even+ngram:4")
    assert model.drafting == DraftSetting("small", 4, coupled=False)
    assert ngram.drafting == DraftSetting("ngram", 4, coupled=True)


def test_a_paper_beside_its_facts(directory):
    result = succeed("--paper", "PAT", "--steps", "1-2", "--json", "pat.json")
    found = json.loads((directory / "pat.json").read_text())
    figures = found["figures"]
    assert found["command"] == "refrain simulate --paper PAT --policies even,ranked --steps 1-2"
    # No prompt returns within these steps, so ranking has no history.
    assert figures["ranked_speedup"] == 1.0
    assert figures["baseline_last_alone_share"] < 0.1
    assert "paper 46.29 to 81.58 %" in result.output
    assert "does not follow from the printed lengths" in result.output
    assert len(list((directory / "runs/simulations/pat").iterdir())) == 2


@pytest.mark.usefixtures("papers")
def test_a_paper_with_one_setting_has_plain_figures():
    found = simulated("--paper", "rhymerl")
    assert {row["step"] for row in found["rows"]} == {3, 4}
    assert 0.0 < found["figures"]["baseline_idle_share"] < 1.0
    # The previous epoch was simulated too, so ranking has a history.
    assert found["figures"]["ranked_speedup"] != 1.0
    other = simulated("--paper", "rhymerl", "--seed", "1")
    assert other["figures"] != found["figures"]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from refrain.flows.cli import main\n"
        "assert 'TRACE' in CliRunner().invoke(main, ['simulate', '--help']).output\n"
        "heavy = {'numpy', 'scipy', 'pyarrow', 'duckdb', 'matplotlib', 'pydantic', 'rich'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)
