"""Check that this version can be released: `make release-check`.

Reads the changelog, the citation and the licences of shipped data. Builds sdist and wheel from the
files that git has, installs each in a new virtual environment, runs every command's help and a few
commands, and trains the demo for two steps. The environment is clean but for packages of others:
those it takes from the Python that runs this. `--full` installs them anew, as a user does.

Exits with 1 and a list of problems, and with 0 if there are none.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.metadata import Metadata

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("flows/", "tasks/", "engines/", "schemas/")
"""Folders that the wheel must have whole, wherever it puts them."""
DATA = (".parquet", ".safetensors")
"""Name endings of files that need a licence of their own."""
LICENCES = ("Apache-2.0",)
"""SPDX names of licences under which data may be shipped with refrain."""
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
"""Groups of a changelog that say how the code changed, not what a user can do now."""
INSTALL_S, COMMAND_S, DEMO_S = 1800.0, 120.0, 900.0
"""Time limits: for installing, for a command, and for the demo."""
NUM_STEPS = 2
SHORT = ("num_epochs=1", "prompts_per_step=128", "rollout.group_size=2", "data.validation=[]")
"""Overrides that leave the demo two steps: it has 256 prompts."""
QUESTIONS = '{"question": "1+1=?", "answer": "2"}\n' * 2


class NotReleasable(Exception):
    """A step of the check failed, so that later steps have nothing to look at."""


def read_project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def changelog_problems(text: str, version: str) -> Iterator[str]:
    """Yield what is wrong with a version's section: it needs a date and groups of entries."""
    found = re.search(
        rf"^## \[{re.escape(version)}\](.*)\n((?:(?!## \[).*\n?)*)", text, re.MULTILINE
    )
    if found is None:
        yield f"CHANGELOG.md: no section `## [{version}] - DATE`. Write one."
        return
    date, body = found.groups()
    if not re.fullmatch(r" - \d{4}-\d\d-\d\d", date):
        yield f"CHANGELOG.md, {version}: no date. Write `## [{version}] - 2026-01-31`."
    groups = re.findall(r"^### (.+)\n((?:(?!###? ).*\n?)*)", body, re.MULTILINE)
    if not groups:
        yield f"CHANGELOG.md, {version}: no groups. Group entries by what a user does: `### Train`."
    for name, entries in groups:
        if name in KINDS:
            yield f"CHANGELOG.md, {version}: `### {name}` names no use. Write `### Train`, say."
        if not re.search(r"^- \S", entries, re.MULTILINE):
            yield f"CHANGELOG.md, {version}: `### {name}` has no entry. Remove it."


def citation_problems(file: Path, project: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a CITATION.cff: by its schema, and beside pyproject.toml."""
    schema = "--builtin-schema=vendor.citation-file-format"
    command = [sys.executable, "-m", "check_jsonschema", schema, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        yield f"{file.name}: not valid. {done.stdout.strip()} {done.stderr.strip()}"
    citation = yaml.safe_load(file.read_text())
    for name in ("version", "license", "authors"):
        own, wanted = citation.get(name), project[name]
        if own != wanted:
            yield f"{file.name}: {name} is {own!r}, in pyproject.toml {wanted!r}."


def licence_problems(files: Sequence[str], notice: str) -> Iterator[str]:
    """Yield the data files of a listing for which NOTICE has no row `FOLDER  LICENCE  ORIGIN`, and
    the rows that are of no use."""
    rows = [line.split(maxsplit=2) for line in notice.splitlines() if line.startswith("infra/")]
    folders = {row[0]: row[1:] for row in rows}
    data = [name for name in files if name.endswith(DATA)]
    for name in data:
        if not any(name.startswith(f"{folder}/") for folder in folders):
            yield f"NOTICE: no licence of {name}. Add a row: its folder, licence and origin."
    for folder, rest in folders.items():
        if len(rest) != 2 or rest[0] not in LICENCES:
            yield f"NOTICE, {folder}: give one of {', '.join(LICENCES)}, then who made it."
        if not any(name.startswith(f"{folder}/") for name in data):
            yield f"NOTICE, {folder}: no data there. Remove the row."


def metadata_problems(text: str, project: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a package index would refuse in a wheel's METADATA, or show wrongly."""
    try:
        metadata = Metadata.from_email(text)
    except ExceptionGroup as group:
        yield from (f"METADATA: {error}" for error in group.exceptions)
        return
    shown = {
        "name": (metadata.name, project["name"]),
        "version": (str(metadata.version), project["version"]),
        "license": (metadata.license_expression, project["license"]),
        "requires-python": (str(metadata.requires_python), str(project["requires-python"])),
    }
    for name, (built, wanted) in shown.items():
        if set(str(built).split(",")) != set(wanted.split(",")):
            yield f"METADATA: {name} is {built!r}, in pyproject.toml {wanted!r}."
    if not (metadata.description or "").strip():
        yield "METADATA: no description. Set `readme` in pyproject.toml."
    if (metadata.description_content_type or "").partition(";")[0] != "text/markdown":
        yield "METADATA: the description is not text/markdown."


def content_problems(wheel: Sequence[str], tracked: Sequence[str]) -> Iterator[str]:
    """Yield files of our packages that a wheel lacks, and files that it should not have."""
    for name in tracked:
        if name.startswith(PACKAGES) and not any(
            one == name or one.endswith(f"/{name}") for one in wheel
        ):
            yield f"wheel: no {name}. Add it to [tool.setuptools.package-data]."
    for name in wheel:
        if name.startswith("tests/") or "/tests/" in name:
            yield f"wheel: {name} is a test. Leave it out of [tool.setuptools.packages]."
    for name in ("LICENSE", "NOTICE"):
        if not any(one.endswith(f"/licenses/{name}") for one in wheel):
            yield f"wheel: no {name}. Add it to `license-files` in pyproject.toml."


def run(*command: str | Path, cwd: Path, env: Mapping[str, str], timeout_s: float) -> str:
    """Return a command's output. Raise NotReleasable when it fails or takes too long."""
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            [*map(str, command)],
            cwd=cwd,
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise NotReleasable(f"`{shown}` took over {timeout_s:.0f} s.") from error
    if done.returncode:
        raise NotReleasable(f"`{shown}` failed:\n{done.stdout[-3000:]}")
    return done.stdout


def tracked_files(root: Path) -> list[str]:
    env = os.environ
    return run("git", "ls-files", "-z", cwd=root, env=env, timeout_s=60.0).strip("\0").split("\0")


def copy_tracked(root: Path, files: Sequence[str], target: Path) -> None:
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name, follow_symlinks=False)


def uv(*args: str | Path, cwd: Path, timeout_s: float = INSTALL_S) -> str:
    """Run uv, which `make setup` installs beside this Python."""
    program = Path(sys.executable).parent / "uv"
    return run(program, *args, "--quiet", cwd=cwd, env=os.environ, timeout_s=timeout_s)


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it. Return both files."""
    options = ("--no-build-isolation", "--python", sys.executable, "--out-dir", out)
    uv("build", *options, source, cwd=source)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def read_wheel(wheel: Path) -> tuple[list[str], str]:
    """Return the names of a wheel's files, and its METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, archive.read(metadata).decode()


def install(archive: Path, venv: Path, full: bool) -> Path:
    """Install an archive in a new environment, and return the folder of its programs."""
    uv("venv", "--python", sys.executable, venv, cwd=venv.parent)
    into = ("--python", venv / "bin" / "python")
    if full:
        lists = REPOSITORY / "infra" / "requirements"
        overrides = [f"--overrides={lists / name}.txt" for name in ("overrides", "overrides-cpu")]
        pins = f"--constraints={lists / 'cpu.txt'}"
        links = os.environ.get("PIP_FIND_LINKS")
        links = [f"--find-links={links}"] if links else ["--torch-backend=cpu"]
        what = [f"{archive}[cpu]", pins, *overrides, *links]
        uv("pip", "install", *into, *what, cwd=venv)
    else:
        others = next(venv.glob("lib/python3.*/site-packages")) / "others.pth"
        others.write_text(sysconfig.get_path("purelib") + "\n")
        uv("pip", "install", *into, "--no-deps", "--no-build-isolation", archive, cwd=venv)
    return venv / "bin"


def bare_environment(programs: Path, home: Path) -> dict[str, str]:
    """Return the variables of a user who has nothing but the environment's programs."""
    return {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}


def commands_of(text: str) -> list[str]:
    """Return the commands that a group's help lists."""
    return re.findall(r"^  (\w[\w-]*)  ", text.partition("Commands:")[2], re.MULTILINE)


def smoke(refrain: Path, home: Path, env: Mapping[str, str]) -> list[str]:
    """Run every command's help, and those that need no engine. Return the commands' names."""

    def call(*args: str) -> str:
        return run(refrain, *args, cwd=home, env=env, timeout_s=COMMAND_S)

    commands = commands_of(call("--help"))
    for name in commands:
        for inner in commands_of(call(name, "--help")):
            call(name, inner, "--help")
    call("--version")
    call("config", "--reference")
    (home / "mine.jsonl").write_text(QUESTIONS.replace("1+1", "2+0", 1))
    columns = ("--question", "question", "--answer", "answer", "--data-source", "openai/gsm8k")
    call("data", "mine.jsonl", *columns, "--out", "data")
    return commands


def demo_command(commands: Sequence[str]) -> tuple[str, ...]:
    """Return the command that trains the demo: `refrain demo` where the wheel has it."""
    return ("demo",) if "demo" in commands else ("train", "infra/demo/train.yaml")


def train_demo(refrain: Path, commands: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
    """Train the demo. Raise NotReleasable unless it says that it made its steps."""
    command = demo_command(commands)
    run(refrain, *command, *SHORT, cwd=cwd, env=env, timeout_s=DEMO_S)
    found = list((cwd / "runs").glob("*/summary.json"))
    steps = [json.loads(file.read_text())["steps"] for file in found]
    if steps != [NUM_STEPS]:
        raise NotReleasable(f"`refrain {' '.join(command)}` made {steps} steps, not {NUM_STEPS}.")
    for args in (("runs",), ("show", found[0].parent), ("samples", found[0].parent)):
        run(refrain, *args, cwd=cwd, env=env, timeout_s=COMMAND_S)


def check_text(root: Path, files: Sequence[str]) -> Iterator[str]:
    """Yield the problems of what people read: changelog, citation, licences."""
    project = read_project(root)
    yield from changelog_problems((root / "CHANGELOG.md").read_text(), project["version"])
    yield from citation_problems(root / "CITATION.cff", project)
    yield from licence_problems(files, (root / "NOTICE").read_text())


def check_packages(root: Path, files: Sequence[str], work: Path, full: bool) -> Iterator[str]:
    """Yield the problems of the wheel's content. Raise NotReleasable when it does not work."""
    source, home = work / "source", work / "home"
    home.mkdir()
    copy_tracked(root, files, source)
    sdist, wheel = timed("build", lambda: build(source, work / "dist"))
    names, metadata = read_wheel(wheel)
    yield from metadata_problems(metadata, read_project(root))
    yield from content_problems(names, files)
    timed("install the sdist", lambda: install(sdist, work / "from_sdist", False))
    programs = timed("install the wheel", lambda: install(wheel, work / "from_wheel", full))
    env = bare_environment(programs, home)
    commands = timed("commands", lambda: smoke(programs / "refrain", home, env))
    # Beside the shipped model and data, as long as the wheel has none.
    shutil.copytree(source / "infra" / "demo", home / "infra" / "demo")
    timed("demo", lambda: train_demo(programs / "refrain", commands, home, env))


def timed(name: str, step: Callable[[], Any]) -> Any:
    print(f"release-check: {name}", end=" ", flush=True)
    started_s = time.monotonic()
    result = step()
    print(f"{time.monotonic() - started_s:.1f} s", flush=True)
    return result


def check(root: Path, full: bool) -> list[str]:
    """Return everything that is wrong. The work's files are gone afterwards."""
    files = tracked_files(root)
    problems = list(check_text(root, files))
    with tempfile.TemporaryDirectory(prefix="refrain-release-") as work:
        try:
            problems.extend(check_packages(root, files, Path(work), full))
        except NotReleasable as error:
            problems.append(str(error))
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="install all packages anew")
    problems = check(REPOSITORY, parser.parse_args().full)
    for problem in problems:
        print(f"- {problem}")
    if problems:
        sys.exit(f"release-check: {len(problems)} problems")
    print("release-check: all is well")


if __name__ == "__main__":
    main()
