"""Keys of Prefect's artifacts."""

import pytest

from tasks.run.artifacts import artifact_key


def test_runs_have_keys_of_their_own() -> None:
    names = ("demo", "Demo", "de.mo", "de_mo", "de-mo", "DE-MO", "a" * 64)
    keys = {artifact_key(name, "step") for name in names}
    assert len(keys) == len(names)
    for key in keys:
        assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize("name", ["demo", "a-b-1"])
def test_a_name_that_prefect_takes_stays(name: str) -> None:
    assert artifact_key(name, "step") == f"{name}-step"
