"""A profile stays in use while it is measured again. If that is interrupted, it continues where it
was."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

import refrain.tasks.profile
from refrain.engines.gpus.placement import GpuPlacement
from refrain.schemas.latency import Profile
from refrain.schemas.profile import PROFILE_FILE, MachineFacts, ProfileConfig, ProfileReport
from refrain.tasks.profile import (
    beside,
    fit_profile,
    measure_decode,
    measure_drafting,
    open_profile,
    put_in_place,
)
from refrain.tasks.run.run_dir import CONFIG_FILE, claim_run_dir
from tests.conftest import DEMO
from tests.flows.test_profile import FACTS, FakeProfilers

BEFORE = "the one before"


@contextmanager
def no_ray(*_: object) -> Generator[GpuPlacement]:
    yield GpuPlacement(8)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileConfig:
    """Return the config of a finished profile."""
    config = ProfileConfig(model=DEMO / "model", runs_dir=tmp_path, max_context=200, windows=(1, 4))
    monkeypatch.setattr(refrain.tasks.profile, "Profilers", FakeProfilers)
    monkeypatch.setattr(refrain.tasks.profile, "ray_cluster", no_ray)
    monkeypatch.setattr(FakeProfilers, "num_points", 10**6)
    claim_run_dir(config, resume=False).release()
    (config.run_dir / PROFILE_FILE).write_text(BEFORE)
    return config


async def measure_again(config: ProfileConfig) -> tuple[list[int], ProfileReport]:
    """Run the flow without Prefect and MLflow. Return the number of points that each task measured,
    and the report."""
    with open_profile(config, overwrite=True) as run:
        num_measured = [await measure_decode.fn(run, 1), await measure_drafting.fn(run, 1)]
        report = await put_in_place.fn(config, await fit_profile.fn(run, num_measured))
    return num_measured, report


async def killed_after(num_points: int, config: ProfileConfig, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeProfilers, "num_points", num_points)
    with pytest.raises(RuntimeError, match="killed"):
        await measure_again(config)
    patch.setattr(FakeProfilers, "num_points", 10**6)
    assert (config.run_dir / PROFILE_FILE).read_text() == BEFORE


async def test_measured_points_are_not_measured_again(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killed_after(4, config, monkeypatch)
    await killed_after(3, config, monkeypatch)
    whole, _ = await measure_again(config.model_copy(update={"name": "other"}))
    rest, report = await measure_again(config)
    assert rest == [whole[0] - 7, whole[1]]
    assert report.profile_file == config.run_dir / PROFILE_FILE
    assert Profile.model_validate_json(report.profile_file.read_text()) == report.profile
    assert not beside(config).run_dir.exists()
    stored = (config.run_dir / CONFIG_FILE).read_text()
    assert "measuring" not in stored
    # After a complete measurement, the next one starts from scratch.
    assert (await measure_again(config))[0] == whole


async def test_other_settings_restart_the_measurement(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killed_after(4, config, monkeypatch)
    whole, _ = await measure_again(config.model_copy(update={"seed": 5}))
    again, _ = await measure_again(config.model_copy(update={"seed": 5}))
    assert whole == again


async def test_another_driver_restarts_the_measurement(
    config: ProfileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killed_after(4, config, monkeypatch)

    async def start(_: FakeProfilers) -> MachineFacts:
        return FACTS.model_copy(update={"versions": {"driver": "new"}})

    monkeypatch.setattr(FakeProfilers, "start", start)
    whole, _ = await measure_again(config)
    again, report = await measure_again(config)
    assert whole == again
    assert report.profile.versions == {"driver": "new"}


def test_profile_of_a_live_run_is_not_changed(config: ProfileConfig) -> None:
    lock = claim_run_dir(config, resume=True)
    with pytest.raises(ValueError, match="used by a live run"), open_profile(config, True):
        pass
    lock.release()
    assert (config.run_dir / PROFILE_FILE).read_text() == BEFORE
