"""`refrain profile --shards` measures a TP degree on one GPU, with one shard of the model."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import refrain.tasks.profile
from refrain.engines.latency.shards import whole_latency
from refrain.schemas.latency import PointKind, Profile
from refrain.schemas.profile import PROFILE_FILE, ProfileConfig
from refrain.tasks.profile import fit_profile, gpus_wanted, measure_decode, open_profile
from tests.conftest import DEMO
from tests.flows.commands import Command, altered_model
from tests.flows.test_profile import SMALL, FakeProfilers, refused
from tests.flows.test_remeasure_profile import no_ray


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileConfig:
    monkeypatch.setattr(refrain.tasks.profile, "Profilers", FakeProfilers)
    monkeypatch.setattr(refrain.tasks.profile, "ray_cluster", no_ray)
    monkeypatch.setattr(FakeProfilers, "num_points", 10**6)
    monkeypatch.setattr(FakeProfilers, "started", [])
    return ProfileConfig(
        model=DEMO / "model",
        runs_dir=tmp_path,
        tp_degrees=(1, 2),
        max_context=200,
        windows=(),
        shards="H100",
    )


async def test_an_engine_of_one_gpu_has_the_shard(config: ProfileConfig) -> None:
    with open_profile(config, overwrite=False) as run:
        for tp_degree in config.tp_degrees:
            await measure_decode.fn(run, tp_degree)
        report = await fit_profile.fn(run, [])
    (whole, shard) = (arguments[0][1] for _, arguments, _ in FakeProfilers.started)
    assert [num_gpus for _, _, num_gpus in FakeProfilers.started] == [1, 1]
    assert [of.rollout.tp_degree for of in (whole, shard)] == [1, 1]
    assert whole.model.path == DEMO / "model"
    shape = json.loads((shard.model.path / "config.json").read_text())
    assert shape["num_attention_heads"] == 2
    assert (shard.model.path / "tokenizer.json").exists()
    profile = report.profile
    assert profile.links == "H100"
    latency = whole_latency(json.loads((DEMO / "model" / "config.json").read_text()), "H100")
    for point in profile.of_kind(PointKind.DECODE):
        more_s = 2 * 3 * latency.collective_s(point.tp_degree, point.batch)
        assert point.seconds == pytest.approx(0.1 + more_s, rel=1e-12)
        assert (more_s > 0) == (point.tp_degree == 2)


def test_shards_need_only_one_gpu(config: ProfileConfig) -> None:
    assert [one.num_gpus for one in gpus_wanted(config)] == [1]
    engines = config.model_copy(update={"shards": None})
    assert [one.num_gpus for one in gpus_wanted(engines)] == [2]


def test_bad_input_is_named_before_anything_starts(tmp_path: Path) -> None:
    args = ("--runs-dir", tmp_path / "runs", *SMALL, "--tp", "1,2", "--shards")
    output = refused("--model", DEMO / "model", *args, "abacus")
    assert "no data sheet of 'abacus'" in output
    other = altered_model(tmp_path / "model", model_type="qwen2")
    shape = AutoConfig.from_pretrained(other)
    AutoModelForCausalLM.from_config(shape).save_pretrained(other)
    assert "shards of qwen2 models cannot be measured" in refused("--model", other, *args, "H100")
    assert not (tmp_path / "runs" / "profiles").exists()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_shards_are_measured(tmp_path: Path) -> None:
    args = ["--model", DEMO / "model", "--runs-dir", tmp_path, "--name", "shards", *SMALL]
    output = Command("profile", *args, "--tp", "1,2", "--shards", "H100").finish(800)
    profile = Profile.model_validate_json(
        (tmp_path / "profiles" / "shards" / PROFILE_FILE).read_bytes()
    )
    assert {point.tp_degree for point in profile.of_kind(PointKind.DECODE)} == {1, 2}
    assert profile.active_tokens_of[2] == 2 * profile.active_tokens_of[1]
    assert "shards with the links of H100" in output
