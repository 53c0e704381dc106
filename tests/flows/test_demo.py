from pathlib import Path

import pytest

from refrain.flows.demo import copy_shipped, launch_demo
from tests.conftest import REPOSITORY


def test_a_bad_override_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="num_epochs"):
        launch_demo(["num_epochs=0"])
    with pytest.raises(ValueError, match="group_size"):
        launch_demo(["rollout.group_size=1", "data.max_prompt_tokens=1"])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").write_text("mine")
    copy_shipped(Path("prefect.yaml"), tmp_path)
    assert (tmp_path / "prefect.yaml").read_text() == "mine"
    copy_shipped(Path("infra/demo"), tmp_path)
    copied = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("infra/**/*") if f.is_file()}
    shipped = {str(f.relative_to(REPOSITORY)) for f in REPOSITORY.glob("infra/demo/**/*.[jpsy]*")}
    assert copied == {name for name in shipped if not name.endswith((".py", ".pyc"))}
