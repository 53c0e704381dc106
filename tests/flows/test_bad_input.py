"""Bad input is refused before anything starts. The error says what is wrong and how to fix it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.engines.gpus.placement import GpuPlacement
from refrain.flows.cli import main
from refrain.flows.config_file import load_config
from refrain.flows.launch import launch_train
from refrain.schemas.profile import ProfileConfig
from refrain.tasks.profile_inputs import read_profile_inputs
from refrain.tasks.run.engines import make_generation
from refrain.tasks.run.run_dir import claim_run_dir, delete_run, stop_leftovers
from tests.conftest import REPOSITORY
from tests.flows.commands import altered_model, write_config
from tests.flows.malformed import ALIASES

PROFILE = REPOSITORY / "benchmarks" / "baselines" / "profile_demo.json"
PRESETS = REPOSITORY / "infra" / "presets"


def check(config: Path | str, *overrides: str, resume: str | None = None) -> None:
    launch_train(config, overrides, resume, overwrite=False, check=True)


def test_good_input_passes(tmp_path, capsys):
    check(write_config(tmp_path))
    assert "24 train, 8 validation prompts, 4 steps" in capsys.readouterr().out


def test_a_check_says_what_a_mixture_gives(tmp_path, capsys):
    config = write_config(tmp_path)
    files = [tmp_path / "train.parquet", tmp_path / "validation.parquet"]
    one, two = (
        f"{{name: {file.stem}, files: {file}, weight: {3 - at}}}" for at, file in enumerate(files)
    )
    check(config, f"data.train=[{one}, {two}]", "data.validation=[]", "prompts_per_step=8")
    out = capsys.readouterr().out
    assert "source train: 24 prompts, 59.4% of each step; an epoch draws each 0.79 times" in out
    assert "source validation: 8 prompts, 40.6% of each step; an epoch draws each 1.6 times" in out
    with pytest.raises(
        ValueError, match=r"source 'validation' of data.train or data.validation: rew"
    ):
        check(
            config,
            f"data.train=[{one}, {two[:-1]}, reward: {{type: function, path: nowhere.py}}}}]",
        )


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_preset_names_missing_settings(preset: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"^model Qwen/Qwen3-\S* is not in this machine's cache,"):
        check(preset)
    write_config(tmp_path)
    sizes = ("data.max_prompt_tokens=128", "data.max_response_tokens=256", "num_epochs=1")
    files = (f"data.{split}=[{tmp_path / split}.parquet]" for split in ("train", "validation"))
    check(preset, f"model.path={REPOSITORY / 'infra' / 'demo' / 'model'}", *sizes, *files)
    assert "24 train, 8 validation prompts, 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=nowhere", r"nowhere.*(no|not)"),
        ("data.train=[nowhere.parquet]", "nowhere.parquet"),
        ("data.max_prompt_tokens=4", r"train.parquet.*row 1(?s:.*)4"),
        ("trainer.learning_rate=-1", r"trainer.learning_rate: .*greater than 0"),
        ("rollout.group_size=1", r"rollout.group_size: .*greater than or equal to 2"),
        ("rollout.temprature=1", r"rollout.temprature: Extra inputs"),
        ("rollout.temperature=0", "every response of a group would be the same"),
        ("trainer.minibatches_per_step=99", "a minibatch holds whole groups"),
        ("trainer.decay=linear", "trainer: .*decay_steps is not given"),
        ("algorithm.file=nowhere.py", "there is no Python file .*nowhere.py"),
        ("trainer.micro_batch_tokens=100", "one sample must fit"),
        (
            "trainer.num_replicas=2",
            r"num_replicas \(2\) does not divide trainer.num_processes \(1\)",
        ),
        (
            "trainer.context_parallel=2",
            r"context_parallel \(2\) does not divide trainer.num_processes \(1\)",
        ),
        (
            "trainer={num_processes: 3, context_parallel: 3}",
            r"model.path: .* \(3\) does not divide the 4 attention heads of the model: .* 2",
        ),
        ("trainer.lora.target_modules=[qkv_proj]", "called qkv_proj; it has .*, q_proj"),
        ("reward={type: function, path: nowhere.py}", "nowhere.py"),
        ("data.max_response_tokens=9000", "has a context of 1024 tokens"),
        ("rollout.tp_degree=3", "does not divide the 4 attention heads"),
        ("rollout.max_num_batched_tokens=255", "is less than rollout.max_num_seqs"),
        ("drafting.min_match=17", "drafting.min_match is gone: .* Leave it out"),
        ("drafting.max_draft=0", "drafting.max_draft: .*greater than or equal to 1"),
        ("profile=nowhere", "no profile at nowhere"),
        ("profile=pyproject.toml", "pyproject.toml is not a profile"),
        ("pat.tp_degrees=[2]", "but profile is not: .* refrain profile --model .* --tp 1,2,"),
        ("pat.tp_degrees=[3]", "has 4 attention heads, which 3 does not divide"),
        (
            "pat={tp_degrees: [2], gpus_per_node: 1}",
            "pat.tp_degrees: engines of TP degree 2 do not",
        ),
        ("name=a/b", "name: String should match"),
        ("trainer.learning_rate", "has no '='"),
    ],
)
def test_a_bad_value_is_named(tmp_path, override, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check(write_config(tmp_path), override)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 9}, "has no row for tokens from 9 to"),
        (
            {"max_position_embeddings": 100},
            r"a context of 100 tokens, but data.max_prompt_tokens \+ data.max_response_tokens is",
        ),
    ],
)
def test_a_draft_model_must_be_of_this_vocabulary_and_length(tmp_path, values, message):
    drafter = altered_model(tmp_path / "drafter", **values)
    with pytest.raises(ValueError, match=f"specactor.draft_models: .*{message}"):
        check(write_config(tmp_path), f"specactor.draft_models=[{{name: small, path: {drafter}}}]")


def test_models_must_match_their_tokenizer_and_config(
    tmp_path,
):
    config = write_config(tmp_path)
    small = altered_model(tmp_path / "small", vocab_size=9)
    with pytest.raises(ValueError, match=r"small has a tokenizer of \d+ tokens, but .* 9 rows"):
        check(config, f"model.path={small}")
    unfit = altered_model(tmp_path / "unfit", hidden_size=1024)
    with pytest.raises(ValueError, match=r"model.path: .*does not belong to the weights beside it"):
        check(config, f"model.path={unfit}")
    drafters = f"specactor.draft_models=[{{name: small, path: {unfit}}}]"
    with pytest.raises(ValueError, match=r"specactor.draft_models: .*does not belong to the wei"):
        check(config, drafters)
    with pytest.raises(ValueError, match=r"--model: .*does not belong to the weights beside it"):
        read_profile_inputs(ProfileConfig(model=unfit))


def test_a_dynamic_rope_is_not_stretched(tmp_path: Path) -> None:
    """With a dynamic rope, vLLM has no positions beyond `max_position_embeddings`."""
    config, ropes = write_config(tmp_path), ("linear", "dynamic")
    ropes = {kind: {"rope_type": kind, "factor": 40.0, "rope_theta": 1e4} for kind in ropes}
    paths = {
        kind: altered_model(tmp_path / kind, rope_parameters=rope) for kind, rope in ropes.items()
    }
    for path in paths.values():
        check(config, f"model.path={path}")
    check(config, f"model.path={paths['linear']}", "data.max_response_tokens=9000")
    with pytest.raises(ValueError, match="has a context of 1024 tokens"):
        check(config, f"model.path={paths['dynamic']}", "data.max_response_tokens=9000")


@pytest.mark.parametrize("section", ["drafting", "specactor", "histopipe", "pat"])
def test_a_section_has_no_profile_of_its_own(tmp_path: Path, section: str) -> None:
    config = write_config(tmp_path)
    for value in ("mine", "null"):
        with pytest.raises(ValueError, match=rf"{section}\.profile is gone: there is one profile"):
            check(config, f"{section}.profile={value}")


def test_the_profile_must_be_of_this_model_and_layout(tmp_path):
    config, profile = write_config(tmp_path), json.loads(PROFILE.read_text())
    check(config, f"profile={PROFILE}")
    message = (
        r"has no decode points at TP 2, only at TP 1; no verify points at TP 2, only at TP 1: make "
        r"it again with refrain profile --model \S+ --dtype float32 --tp 2, or switch off"
    )
    with pytest.raises(ValueError, match=message):
        check(config, f"profile={PROFILE}", "rollout.tp_degree=2")
    other = tmp_path / "profile.json"
    other.write_text(json.dumps(profile | {"model_hash": "0" * 16}))
    with pytest.raises(ValueError, match="is of another model, "):
        check(config, f"profile={other}")


SMALL = f"specactor.draft_models=[{{name: small, path: {REPOSITORY / 'infra/demo/drafter'}}}]"


@pytest.mark.parametrize(
    ("overrides", "missing", "fix"),
    [
        (
            ["pat.tp_degrees=[2]", "drafting.enabled=false"],
            ["decode points at TP 2, only at TP 1", "prefill points at TP 2, only at TP 1"],
            "--tp 1,2, or",
        ),
        (
            ["pat.tp_degrees=[2]", SMALL],
            ["decode points at", "prefill points at", "verify points at", "draft points of small"],
            r"--tp 1,2 --draft-model small=\S+, or",
        ),
        ([SMALL], ["draft points of small"], r"--tp 1 --draft-model small=\S+, or"),
    ],
)
def test_points_that_the_profile_lacks_are_named(tmp_path, overrides, missing, fix):
    """The error lists the points that the enabled features need, and no others."""
    lacks = "; ".join(f"no {points}[^;]*" for points in missing)
    with pytest.raises(
        ValueError, match=f"profile_demo.json has {lacks}: make it again with .*{fix}"
    ):
        check(write_config(tmp_path), f"profile={PROFILE}", *overrides)


def test_disabled_techniques_need_no_profile_points(tmp_path):
    decoding = tmp_path / "profile.json"
    profile = json.loads(PROFILE.read_text())
    points = [point for point in profile["points"] if point["kind"] == "decode"]
    decoding.write_text(json.dumps(profile | {"points": points}))
    config = write_config(tmp_path)
    check(config, f"profile={decoding}", "drafting.enabled=false")
    with pytest.raises(ValueError, match="no verify points at TP 1, only at TP none: make"):
        check(config, f"profile={decoding}")


def write_rows(directory: Path, *rows: dict) -> str:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train=[{path}]"


GOOD_ROW = {
    "data_source": "refrain/arithmetic",
    "prompt": [{"role": "user", "content": "a=1 b=a+2 b=?"}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, r"(?s)rows\.jsonl.*row 2.*`prompt`"),
        ({"reward_model": {"style": "rule"}}, r"(?s)rows\.jsonl.*row 2.*ground_truth"),
        (
            {"data_source": "unheard/of", "prompt": [{"role": "user", "content": "b=?"}]},
            r"(?s)unheard/of.*refrain/arithmetic",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        check(write_config(tmp_path), write_rows(tmp_path, GOOD_ROW, GOOD_ROW | change))


def test_missing_scorer_is_found_before_reading_data(tmp_path):
    scorer = "reward={type: function, path: nowhere.py}"
    with pytest.raises(ValueError, match=r"^reward\.path: there is no file nowhere\.py"):
        check(write_config(tmp_path), scorer, "data.train=[nowhere.parquet]")


def test_a_value_that_has_an_alias_is_read(tmp_path):
    config = write_config(tmp_path)
    check(config, "trainer={warmup_steps: &steps 2, keep_checkpoints: *steps}")


def test_aliases_that_make_much_of_little_are_refused(tmp_path):
    bomb, config = tmp_path / "bomb.yaml", write_config(tmp_path)
    bomb.write_bytes(config.read_bytes() + ALIASES)
    with pytest.raises(ValueError, match=r"bomb\.yaml cannot be read: with its aliases .*100,000"):
        check(bomb)
    inner = "&a0 [1]"
    for n in range(1, 7):
        inner = f"&a{n} [{inner}{f', *a{n - 1}' * 8}]"
    with pytest.raises(ValueError, match=r"override 'seed=.* cannot be read: with its aliases"):
        check(config, f"seed={inner}")


def test_no_config(tmp_path):
    with pytest.raises(ValueError, match="no config file at"):
        check(tmp_path / "nowhere.yaml")


def test_a_run_directory_of_a_live_run(tmp_path):
    config = load_config(write_config(tmp_path))
    lock = claim_run_dir(config, resume=False)
    try:
        with pytest.raises(ValueError, match=r"used by a live run \(process \d+\)"):
            claim_run_dir(config, resume=True)
        with pytest.raises(ValueError, match="used by a live run"):
            delete_run(config.run_dir)
    finally:
        lock.release()


def test_run_directory_of_a_killed_process_is_free(tmp_path):
    path = write_config(tmp_path)
    code = (
        "import sys, time; from pathlib import Path;"
        "from refrain.flows.config_file import load_config;"
        "from refrain.tasks.run.run_dir import claim_run_dir;"
        "lock = claim_run_dir(load_config(Path(sys.argv[1])), False); print(1, flush=True);"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    config = load_config(path)
    with pytest.raises(ValueError, match="used by a live run"):
        claim_run_dir(config, resume=True)
    process.kill()
    process.wait(30)
    claim_run_dir(config, resume=True).release()


def test_processes_of_a_killed_run_are_stopped(tmp_path):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    left, kept = (
        subprocess.Popen(sleeper, env={**os.environ, "REFRAIN_RUN_DIR": str(d)})
        for d in (run_dir, other)
    )
    # Children of this process belong to its own run, so they are not leftovers.
    stop_leftovers(run_dir)
    assert left.poll() is None
    code = (
        "import sys; from pathlib import Path;"
        "from refrain.tasks.run.run_dir import stop_leftovers; stop_leftovers(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, run_dir], check=True, timeout=60)
    assert left.wait(30) < 0
    assert kept.poll() is None
    kept.kill()
    kept.wait(30)


def resumed(capsys, config, *overrides: str) -> str:
    check(*overrides, resume=str(config.run_dir))
    return capsys.readouterr().out


def test_run_resumes_with_other_timeouts_memory_and_engines(tmp_path, capsys):
    config = load_config(write_config(tmp_path))
    claim_run_dir(config, resume=False).release()
    overrides = (
        *("rollout.num_engines=1", "rollout.stall_timeout_s=9", "rollout.kv_cache_bytes=99"),
        *("trainer.micro_batch_tokens=999", "reward.timeout_s=7", "num_epochs=3"),
    )
    said = resumed(capsys, config, *overrides)
    assert "resumed with rollout.num_engines: 2 -> 1\n" in said
    assert said.count("resumed with") == 6
    assert "micro_batch_tokens: 16384 -> 999, weights differ by rounding" in said
    with pytest.raises(ValueError, match=r"(?s)Different:\n  seed: 0 -> 1$"):
        check("rollout.num_engines=1", "seed=1", resume=str(config.run_dir))
    with pytest.raises(ValueError, match=r"rollout.num_engines: .*greater than 0"):
        check("rollout.num_engines=0", resume=str(config.run_dir))


def test_a_command_line_that_resumes_takes_overrides(tmp_path):
    config = load_config(write_config(tmp_path))
    claim_run_dir(config, resume=False).release()
    url = "trainer.checkpoint_url=s3://bucket/folder"
    command = ["train", "--resume", str(config.run_dir), url, "rollout.tp_degree=2", "--check"]
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stdout.count("resumed with")) == (0, 2), done.output
    assert "trainer.checkpoint_url: None -> 's3://bucket/folder'" in done.stdout


def test_a_directory_that_is_no_run_is_not_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="is not a run's directory"):
        delete_run(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_help_is_fast_and_imports_nothing_heavy():
    code = (
        "import sys, refrain.flows.cli\n"
        "heavy = {'torch', 'vllm', 'ray', 'prefect', 'mlflow', 'duckdb', 'transformers', 'numpy'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "refrain.flows.cli", "--help"], check=True, timeout=60)
    assert time.monotonic() - started < 5.0  # It takes 0.1 s, but test machines are busy.


async def test_engines_of_several_tp_degrees_need_memory(tmp_path):
    config = load_config(write_config(tmp_path, pat={"tp_degrees": [2]}))
    rollout = config.rollout.model_copy(update={"kv_cache_bytes": 10**12})
    large = config.model_copy(update={"rollout": rollout})
    with pytest.raises(ValueError, match=r"need 40\d\d.\d GB .* only .* rollout.kv_cache_bytes"):
        await make_generation(large, None, 0, GpuPlacement(), print)
    made = await make_generation(config, None, 0, GpuPlacement(), print)
    assert [engine.tp_degree for engine in made.drafters._engines] == [1, 1, 2]
