"""Keys of Prefect's artifacts. A page that Prefect refuses does not end a run."""

from pathlib import Path
from typing import Any, Never

import pytest

from refrain.engines.failures import Failures
from refrain.tasks.run.artifacts import ProgressPage, artifact_key


def test_runs_have_keys_of_their_own() -> None:
    names = ("demo", "Demo", "de.mo", "de_mo", "de-mo", "DE-MO", "a" * 64)
    keys = {artifact_key(name, "step") for name in names}
    assert len(keys) == len(names)
    for key in keys:
        assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize("name", ["demo", "a-b-1"])
def test_a_name_that_prefect_takes_stays(name: str) -> None:
    assert artifact_key(name, "step") == f"{name}-step"


def test_a_page_of_progress_that_prefect_refuses_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_failures: list
) -> None:
    def refuse(*_: Any) -> Never:
        raise ValueError("404 Not Found")

    monkeypatch.setattr(ProgressPage, "_send", refuse)
    said: list[str] = []
    with ProgressPage("demo", "rollouts", Failures(tmp_path, said.append)) as page:
        page._thread.join(20.0)
    assert [what for what, _ in record_failures] == ["Prefect's page of progress"]
    assert len(said) == 1
    record_failures.clear()
