"""Experts of rollouts in the store: they come back as they went in, and go after their training."""

from dataclasses import replace
from pathlib import Path

import pytest

from refrain.engines.learn.rollouts import read_rollouts
from refrain.engines.store import archive
from refrain.engines.store.archive import query_all
from refrain.engines.store.ddl import CREATE
from refrain.engines.store.open_database import RUN, connect
from refrain.engines.store.store import Store
from refrain.schemas.rollout import Rollout, Split
from tests.store.test_store import add_rollouts, make_report, make_rewards, make_rollout

EXPERTS = bytes([1, 255, 3, 0] * 4)


def recorded(step: int, sample: int, experts: bytes = EXPERTS) -> Rollout:
    rollout = make_rollout(step=step, sample=sample)
    return replace(rollout, generated=replace(rollout.generated, experts=experts))


def experts_of(store: Store, step: int) -> list[bytes | None]:
    return store.rollouts(Split.TRAIN, step, ["experts"])["experts"].to_pylist()


def test_the_trainer_reads_what_was_recorded(tmp_path: Path) -> None:
    with Store(tmp_path / "run.duckdb") as store:
        add_rollouts(store, recorded(1, 0), recorded(1, 1, b""))
        assert experts_of(store, 1) == [EXPERTS, None]
        key = store.rollouts(Split.TRAIN, 1, ["prompt_key"])["prompt_key"][0].as_py()
        store.add_rewards(Split.TRAIN, 1, make_rewards([(key, 0, 1.0), (key, 1, 0.0)]))
        rollouts = read_rollouts(store.training_rows(1))
        assert [one.experts for one in rollouts] == [EXPERTS, b""]


def test_experts_go_after_their_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the archive nor the files for users have them."""
    monkeypatch.setattr(archive, "CHUNK_STEPS", 1)
    path = tmp_path / "run.duckdb"
    with Store(path) as store:
        for step in (1, 2, 3):
            add_rollouts(store, recorded(step, 0))
            store.add_step(make_report(step))
        store.forget_experts(1)
        assert [experts_of(store, step) for step in (1, 2, 3)] == [[None], [EXPERTS], [EXPERTS]]
        store.write_step(3)
        assert store.archive_before(2 + archive.KEPT_STEPS)
        assert [experts_of(store, step) for step in (1, 2, 3)] == [[None], [None], [EXPERTS]]
        files = sorted((tmp_path / "run.archive").rglob("rollouts*.parquet"))
        assert len(files) == 2
        for file in files:
            names = [name for name, *_ in store._con.execute(f"DESCRIBE FROM '{file}'").fetchall()]
            assert "response_token_ids" in names
            assert "experts" not in names


def test_an_older_store_has_no_experts(tmp_path: Path) -> None:
    path = tmp_path / "run.duckdb"
    lines = [line for line in CREATE.splitlines() if not line.strip().startswith("experts BLOB")]
    assert len(lines) == len(CREATE.splitlines()) - 1
    connect(
        path,
        read_only=False,
        lock_timeout_s=0,
        format=replace(RUN, create="\n".join(lines), added=""),
    ).close()
    assert query_all(path, "SELECT experts FROM rollouts").num_rows == 0
    with Store(path) as store:
        add_rollouts(store, recorded(1, 0))
        assert experts_of(store, 1) == [EXPERTS]
