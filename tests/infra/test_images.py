"""Read the Dockerfile without a builder: its files, stages and user. Run its command in a copy of
what it copies, as a plain process."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.infra.test_cluster_files import CLUSTER, KUBERNETES, containers

DIGEST = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
BUILT = {"/opt/refrain/.venv"}
"""What instructions make that other stages copy."""
NOT_IN_IMAGES = {"tests"}
SCRIPT = CLUSTER / "images.sh"
LOADED = """import sys, refrain
refrain.load_config("infra/demo/train.yaml")
print(*(one.__file__ for name, one in sys.modules.items() if name.partition(".")[0] in sys.argv))
"""
"""Prints the files of the packages that its arguments name."""


@dataclass
class Stage:
    """A stage of a Dockerfile: its base and its instructions."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, name: str) -> list[str]:
        return [rest for other, rest in self.instructions if other == name]

    @property
    def copies(self) -> list[list[str]]:
        return [shlex.split(rest) for rest in self.of("COPY")]

    @property
    def sources(self) -> set[str]:
        """Paths that it copies from the repository."""
        own = [words for words in self.copies if not words[0].startswith("--from=")]
        return {source for words in own for source in words[:-1]}


def stages() -> list[Stage]:
    found: list[Stage] = []
    text = re.sub(r"\\\n", " ", (CLUSTER / "Dockerfile").read_text())
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, own = rest.partition(" AS ")
            found.append(Stage(base, own))
        elif line and not line.startswith("#"):
            found[-1].instructions.append((name, rest.strip()))
    return found


def is_sent(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a builder gets the file: the last pattern that matches it or a folder above
    it decides. `**/` stands for any folder, as in .dockerignore."""
    places = [path, *map(str, PurePosixPath(path).parents)]
    sent = True
    for pattern in patterns:
        name = pattern.removeprefix("!")
        if name.startswith("**/"):
            matches = any(part == name[3:] for part in PurePosixPath(path).parts)
        else:
            matches = any(fnmatch(place, name) for place in places)
        if matches:
            sent = pattern.startswith("!")
    return sent


def ignore_patterns() -> list[str]:
    lines = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def files_of(source: str) -> list[str]:
    """Return the files that git has at a path, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", source],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=30.0,
    )
    return listed.stdout.split()


def packages() -> set[str]:
    """Return the packages and modules of the repository's root, as they are called there."""
    folders = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")}
    return folders - NOT_IN_IMAGES | {path.name for path in REPOSITORY.glob("*.py")}


def test_every_source_exists_and_is_sent_to_the_builder() -> None:
    patterns = ignore_patterns()
    copied = set().union(*(stage.sources for stage in stages()))
    for source in copied:
        found = files_of(source)
        assert found, f"COPY {source}: no such file"
        assert [name for name in found if not is_sent(name, patterns)] == []
    allowed = {line[1:] for line in patterns if line.startswith("!")}
    assert allowed == copied, "what a builder gets is what some stage copies"


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("flows/cli.py", True),
        ("flows/__pycache__/cli.pyc", False),
        ("infra/cluster/.env", False),
        ("infra/pretrained.py", False),
        (".venv/bin/python", False),
        ("runs/demo/config.json", False),
    ],
)
def test_builders_get_no_secrets_and_no_caches(path: str, sent: bool) -> None:
    assert is_sent(path, ignore_patterns()) == sent


def test_the_image_has_every_package_and_what_installing_them_reads() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert len(packages()) >= 5
    assert {*packages(), project["readme"], *project["license-files"]} <= stages()[-1].sources


def test_images_begin_at_a_digest_and_stages_at_earlier_ones() -> None:
    known: set[str] = set()
    for stage in stages():
        assert stage.base in known or DIGEST.fullmatch(stage.base), stage.base
        for words in stage.copies:
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in known
                assert set(words[1:-1]) <= BUILT
        known.add(stage.name)
    assert len(known) == 3


def test_postgres_begins_at_a_digest_too() -> None:
    compose = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    (kubernetes,) = [one["image"] for one in containers() if one["name"] == "postgres"]
    assert DIGEST.fullmatch(kubernetes)
    assert compose["postgres"]["image"] == kubernetes


def test_the_image_runs_as_a_user_without_rights() -> None:
    last = stages()[-1]
    assert last.of("USER") == ["10001"]
    assert [name for name, _ in last.instructions][-2:] == ["USER", "CMD"]
    assert not last.of("ENTRYPOINT"), "commands of Compose and Kubernetes are run as they are"


def test_compose_and_kubernetes_run_what_make_images_makes() -> None:
    made = re.findall(r"^for variant in (.*); do", SCRIPT.read_text(), re.MULTILINE)
    assert made == ["cpu gpu"]
    plain, gpu = (
        yaml.safe_load((CLUSTER / name).read_text())["services"]
        for name in ("compose.yaml", "compose.gpu.yaml")
    )
    assert {one["image"] for name, one in plain.items() if name != "postgres"} == {
        "${REFRAIN_IMAGE:-refrain:cpu}"
    }
    assert gpu.keys() == plain.keys() - {"postgres"}, "no service may stay on the CPU image"
    assert {one["image"] for one in gpu.values()} == {"${REFRAIN_IMAGE:-refrain:gpu}"}
    (image,) = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["images"]
    assert (image["name"], image["newTag"]) == ("refrain", "gpu")
    assert {one["image"] for one in containers() if one["name"] != "postgres"} == {"refrain"}


def test_commands_and_probes_name_programs_and_files_of_the_image() -> None:
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    commands = [one["command"] for name, one in services.items() if name != "postgres"]
    commands += [one["healthcheck"]["test"][1:] for one in services.values()]
    commands += [one["command"] for one in containers() if "command" in one]
    sent = ignore_patterns()
    for program, *arguments in commands:
        if "pg_isready" in program:
            continue
        programs = REPOSITORY / ".venv" / "bin"
        assert (programs / program).exists() or program == "bash", program
        files = [word for word in arguments if word.startswith("infra/")]
        assert all((REPOSITORY / name).exists() and is_sent(name, sent) for name in files)


def test_the_command_runs_as_a_plain_process_on_the_copied_files_alone(tmp_path: Path) -> None:
    """The packages are those of this Python, and so is the installed script's module."""
    last, root = stages()[-1], tmp_path / "root"
    for source in last.sources:
        for name in files_of(source):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, root / name, follow_symlinks=False)
    (line,) = last.of("ENV")
    given = dict(item.split("=", 1) for item in shlex.split(line))
    bin_dir = str(Path(sys.executable).parent)
    environment = given | {
        "PATH": given["PATH"].replace("/opt/refrain/.venv/bin", bin_dir).replace("$PATH", "/bin"),
        "HOME": str(tmp_path),
        # Before the checkout that is installed in .venv.
        "PYTHONPATH": str(root),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=60.0
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    loaded = run("python", "-c", LOADED, *(name.removesuffix(".py") for name in packages())).split()
    assert len(loaded) > 10
    assert [file for file in loaded if not file.startswith(str(root))] == []
    assert "Commands:" in run(*json.loads(last.of("CMD")[0]))


def build(path: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script where PATH has only these programs, which are shell scripts."""
    path.mkdir()
    for tool in ("dirname", "timeout"):
        (path / tool).symlink_to(shutil.which(tool) or tool)
    for name, text in programs.items():
        (path / name).write_text(f"#!{shutil.which('sh')}\n{text}\n")
        (path / name).chmod(0o755)
    return subprocess.run(
        [shutil.which("bash") or "bash", SCRIPT, "somewhere/refrain"],
        env={"PATH": str(path), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60.0,
    )


NO_DAEMON = "exit 1"
RECORDS = 'echo "$0 $*"'


@pytest.mark.parametrize(
    ("programs", "taken"),
    [
        ({"docker": RECORDS, "podman": RECORDS}, "docker"),
        ({"docker": NO_DAEMON, "podman": RECORDS, "buildah": RECORDS}, "podman"),
        ({"buildah": RECORDS}, "buildah"),
    ],
)
def test_both_images_are_built_by_what_is_there(
    tmp_path: Path, programs: dict[str, str], taken: str
) -> None:
    done = build(tmp_path / "bin", **programs)
    assert done.returncode == 0, done.stderr
    calls = [line for line in done.stdout.splitlines() if f"bin/{taken} build" in line]
    assert [re.findall(r"VARIANT=(\w+) --tag (\S+) \.$", line) for line in calls] == [
        [("cpu", "somewhere/refrain:cpu")],
        [("gpu", "somewhere/refrain:gpu")],
    ]


def test_without_a_builder_the_message_says_what_to_install(tmp_path: Path) -> None:
    done = build(tmp_path / "bin", docker=NO_DAEMON)
    assert done.returncode == 3
    assert "no Docker daemon answers" in done.stderr
    assert "install podman" in done.stderr


def test_hadolint_has_nothing_against_the_file() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint here")
    # Debian's packages have no versions here: the base image's digest fixes them well enough.
    command = [hadolint, "--ignore", "DL3008", str(CLUSTER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stdout
