"""Only its user can read a run's files. Places that another user has taken are refused."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from refrain.engines.private import (
    UMASK,
    private_dir,
    private_path,
    require_own,
    tighten,
    use_private_kernels,
    use_private_umask,
)
from refrain.engines.tracking.mlflow_client import open_client
from refrain.flows.auth import password_file, read_password
from refrain.flows.environment import quieten, use_embedded_services
from refrain.schemas.config import TrainConfig
from refrain.tasks.run import ray_cluster
from refrain.tasks.run.run_dir import claim_run_dir

NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of another user")


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Restore the umask and the environment after each test."""
    before = os.umask(0o022)
    with mock.patch.dict(os.environ):
        os.environ.pop(UMASK, None)
        yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def claim(runs_dir: Path) -> Path:
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": runs_dir, "name": "r"}
    config = TrainConfig.model_validate(values)
    claim_run_dir(config, resume=(config.run_dir / "config.json").exists()).release()
    return config.run_dir


def test_files_of_a_run_are_private(tmp_path: Path) -> None:
    run_dir = claim(tmp_path / "runs")
    assert mode(run_dir) == mode(run_dir.parent) == 0o700
    assert {mode(path) for path in run_dir.iterdir()} <= {0o600}
    (run_dir / "later").touch()
    assert mode(run_dir / "later") == 0o600


def test_files_of_earlier_versions_become_private(tmp_path: Path) -> None:
    run_dir = claim(tmp_path)
    run_dir.chmod(0o755)
    claim(tmp_path)
    assert mode(run_dir) == 0o700


def test_a_live_runs_directory_is_refused_unchanged(tmp_path: Path) -> None:
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "runs_dir": tmp_path, "name": "r"}
    config = TrainConfig.model_validate(values)
    lock = claim_run_dir(config, resume=False)
    config.run_dir.chmod(0o750)
    with pytest.raises(ValueError, match="used by a live run"):
        claim_run_dir(config, resume=True)
    assert mode(config.run_dir) == 0o750
    lock.release()


def test_a_directory_that_is_no_run_is_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir(0o755)
    (tmp_path / "r" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not a run's directory"):
        claim(tmp_path)
    assert mode(tmp_path / "r") == 0o755


def test_group_may_read_if_the_user_allows(tmp_path: Path) -> None:
    os.environ[UMASK] = "027"
    run_dir = claim(tmp_path)
    run_dir.chmod(0o755)
    claim(tmp_path)
    assert mode(run_dir) == 0o750
    use_embedded_services(tmp_path)
    assert mode(tmp_path / ".prefect") == 0o700, "a group could read the inputs of forms"


@pytest.mark.parametrize("umask", ["x", "-1", "777", "8"])
def test_invalid_umask_is_refused(umask: str) -> None:
    os.environ[UMASK] = umask
    with pytest.raises(ValueError, match=rf"{UMASK} is '{umask}': give an octal umask"):
        use_private_umask()


def test_prefects_database_and_password_are_private(tmp_path: Path) -> None:
    password_file(tmp_path).parent.mkdir(mode=0o755)
    password_file(tmp_path).write_text("me:mine\n")
    assert mode(password_file(tmp_path)) == 0o644
    assert read_password(tmp_path) == "me:mine"
    assert mode(password_file(tmp_path)) == 0o600
    use_embedded_services(tmp_path)
    assert mode(tmp_path / ".prefect") == 0o700
    (tmp_path / ".prefect" / "prefect.db").touch()
    assert mode(tmp_path / ".prefect" / "prefect.db") == 0o600


def test_mlflows_files_of_an_earlier_version_become_so(tmp_path: Path) -> None:
    (tmp_path / "mlflow-artifacts").mkdir(mode=0o755)
    file = tmp_path / "mlflow.db"
    file.touch(0o644)
    with mock.patch("mlflow.MlflowClient"):
        open_client(tmp_path, None)
    assert (mode(file), mode(tmp_path / "mlflow-artifacts")) == (0o600, 0o700)


@NEEDS_ROOT
def test_files_of_other_users_are_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o644)
    os.chown(file, NOBODY, NOBODY)
    tighten(file, tmp_path / "missing")
    assert mode(file) == 0o644


def test_a_private_directory_stays_and_is_closed_again(tmp_path: Path) -> None:
    place = private_dir("ray", str(tmp_path))
    assert place == private_path("ray", str(tmp_path))
    assert mode(place.parent) == 0o700
    place.parent.chmod(0o777)
    (place / "kept").touch()
    assert private_dir("ray", str(tmp_path)) == place
    assert mode(place.parent) == 0o700
    assert (place / "kept").exists()


def in_the_way(path: Path) -> None:
    path.mkdir(0o777)
    path.chmod(0o777)


def link_in_the_way(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    path.symlink_to(elsewhere)


def use_private_kernels_in(shared: Path, *, make: bool) -> None:
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    with mock.patch("tempfile.gettempdir", return_value=str(shared)):
        use_private_kernels(make=make)


USES: list[Callable[[Path], Any]] = [
    lambda shared: private_dir("ray", str(shared)),
    lambda shared: use_private_kernels_in(shared, make=True),
    lambda shared: use_private_kernels_in(shared, make=False),
    lambda shared: claim(shared / "runs"),
    lambda shared: require_own(shared / "runs" / "index" / "shared"),
]


@NEEDS_ROOT
@pytest.mark.parametrize("use", USES, ids=["private_dir", "kernels", "check", "run", "index"])
@pytest.mark.parametrize("put", [in_the_way, link_in_the_way])
def test_a_place_that_another_user_took_first_is_refused(
    use: Callable[[Path], Any], put: Callable[[Path], None], tmp_path: Path
) -> None:
    tmp_path.chmod(0o1777)
    # The code under test uses one of these names.
    taken = [tmp_path / name for name in ("runs", f"refrain-{os.getuid()}")]
    for path in taken:
        put(path)
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    before = sorted(tmp_path.rglob("*")) if put is in_the_way else None
    with pytest.raises(RuntimeError, match=rf"belongs to user {NOBODY}, who could read"):
        use(tmp_path)
    if before is not None:
        assert sorted(tmp_path.rglob("*")) == before


def test_kernels_are_in_it_unless_another_place_is_named(tmp_path: Path) -> None:
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    with mock.patch("tempfile.gettempdir", return_value=str(tmp_path)):
        quieten()
    kernels = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))
    assert kernels.parent == tmp_path / f"refrain-{os.getuid()}"
    assert list(tmp_path.iterdir()) == [], "a check created a file"
    with mock.patch("tempfile.gettempdir", return_value=str(tmp_path)):
        use_private_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(kernels)
    assert mode(kernels.parent) == 0o700
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/named"
    use_private_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/named"


def test_a_ray_of_ones_own_has_a_private_place_and_token(tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"):
        os.environ.pop(name, None)
    with mock.patch("tempfile.gettempdir", return_value=str(tmp_path)):
        with mock.patch.object(ray_cluster, "_MAX_PLACE_BYTES", 200):
            options = ray_cluster._where("local")
        token = ray_cluster.token_file()
        assert token is not None
        assert (mode(token), mode(token.parent)) == (0o600, 0o700)
        assert (
            Path(options["_temp_dir"]).parent == token.parent == tmp_path / f"refrain-{os.getuid()}"
        )
        assert len(token.read_text()) == 64
        assert ray_cluster._temporary() == "/tmp", "Ray's socket names do not fit into a long path"


def test_the_token_and_the_place_of_ones_own_cluster_stay(tmp_path: Path) -> None:
    os.environ |= {"RAY_ADDRESS": "head:6379", "TMPDIR": str(tmp_path)}
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    options = ray_cluster._where("head:6379")
    assert options.keys() == {"address", "runtime_env"}
    assert ray_cluster.token_file() is None
    assert ray_cluster.ray_files() == Path("/tmp/ray")
    assert list(tmp_path.iterdir()) == []
