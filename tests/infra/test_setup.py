"""`infra/setup.sh` picks a Python. The lists of requirements fit every Python that it may pick."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.conftest import REPOSITORY

TAKEN = 7
"""Exit status of a fake Python that is asked to make the environment."""
PYTHON = f"""#!/bin/sh
case "$1" in
  -c) [ -n "$VERSION" ] && exec {sys.executable} -c "import sys; sys.version_info = $VERSION; $2" ;;
  -m) echo "$0 $*" >&2; [ "$2" = venv ] && exit {TAKEN}; exit "$PIP" ;;
esac
exit 127
"""
SHIM = "#!/bin/sh\necho 'the command exists in these versions' >&2\nexit 127\n"
"""A pyenv shim of a Python that is not active."""
UV = f'#!/bin/sh\necho "uv $*" >&2\nexit {TAKEN}\n'


def python(version: str, pip: int = 1) -> str:
    return PYTHON.replace("$VERSION", version).replace("$PIP", str(pip))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that the script reads before it installs anything. Return their directory."""
    (tmp_path / "infra" / "requirements").mkdir(parents=True)
    for name in ("infra/setup.sh", "infra/requirements/cpu.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def set_up(checkout: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script where PATH has only these programs and some tools of the system."""
    path = checkout / "bin"
    path.mkdir()
    for tool in ("dirname", "cat", "sha256sum", "cut", "grep", "sh"):
        (path / tool).symlink_to(shutil.which(tool) or tool)
    for name, text in programs.items():
        program = path / name.replace("_", ".")
        program.write_text(text)
        program.chmod(0o755)
    return subprocess.run(
        [shutil.which("bash") or "bash", str(checkout / "infra" / "setup.sh")],
        env={"PATH": str(path), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("programs", "taken"),
    [
        ({"python3_11": python("(3, 11)"), "python3_12": python("(3, 12)")}, "python3.11"),
        ({"python3_11": SHIM, "python3_12": python("(3, 12)")}, "python3.12"),
        ({"python3_11": SHIM, "python3_12": SHIM, "python3_13": python("(3, 13)")}, "python3.13"),
        ({"python3": python("(3, 12)")}, "python3"),
        ({"python3": python("(3, 11)"), "uv": UV}, "python3"),
    ],
)
def test_the_first_python_that_runs_and_is_allowed(
    checkout: Path, programs: dict[str, str], taken: str
) -> None:
    done = set_up(checkout, **programs)
    assert done.returncode == TAKEN, done.stderr
    assert done.stderr.strip().endswith(f"bin/{taken} -m venv .venv")


@pytest.mark.parametrize("version", ["(3, 10)", "(3, 14)", ""])
def test_uv_installs_a_missing_python(checkout: Path, version: str) -> None:
    done = set_up(checkout, python3=python(version), uv=UV)
    assert done.returncode == TAKEN, done.stderr
    assert "--python 3.11 .venv" in done.stderr.strip().splitlines()[-1]


def test_uv_itself_comes_from_the_registry(checkout: Path) -> None:
    done = set_up(checkout, python3=python("(3, 10)", pip=0))
    assert done.returncode == 127, "the fake pip installs no uv, so bash must not find it"
    assert "--target .venv/bootstrap uv" in done.stderr


def test_setup_without_python_explains_what_to_install(checkout: Path) -> None:
    done = set_up(checkout, python3=python("(3, 10)"))
    assert done.returncode == 2
    assert "install Python 3.11, 3.12 or 3.13, or uv" in done.stderr


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_requirements_fit_every_python(variant: str, minor: int) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(f"3.{minor}.5")
    text = (REPOSITORY / "infra" / "requirements" / f"{variant}.txt").read_text()
    python = {"python_full_version": f"3.{minor}.5", "python_version": f"3.{minor}"}
    lines = [Requirement(line) for line in text.splitlines()]
    pinned = [line for line in lines if line.marker is None or line.marker.evaluate(dict(python))]
    names = [line.name for line in pinned]
    assert len(set(names)) == len(names), "a package has two versions"
    versions = {line.name: str(line.specifier).removeprefix("==") for line in pinned}
    asked = [*project["dependencies"], *project["optional-dependencies"][variant]]
    for wanted in map(Requirement, asked):
        assert wanted.specifier.contains(versions[wanted.name])
    assert not {"torchaudio", "torchcodec"} & set(versions), "they need another torch"
    if variant == "gpu":
        # vLLM requires another version from Python 3.12 on.
        assert SpecifierSet("<81").contains(versions["setuptools"]) == (minor >= 12)
