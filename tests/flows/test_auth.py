"""A Prefect server that refrain starts answers only with its password. Pages of other sites cannot
read its answers."""

import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from unittest import mock

import pytest

from refrain.flows.auth import ASKED, GIVEN, password_file, password_place, read_password
from refrain.flows.environment import use_embedded_services
from tests.conftest import REPOSITORY

STRANGER = "http://example.com"
ASK_SLOWLY = """
import sys, time
from pathlib import Path
from refrain.engines import private
from refrain.flows import auth

def write_slowly(*args, write=private.write_durably):
    time.sleep(1.0)
    write(*args)

private.write_durably = write_slowly
print(auth.read_password(Path(sys.argv[1])))
"""
EMBEDDED = """
import sys
from pathlib import Path
from refrain.flows.environment import use_embedded_services
from tests.flows.test_auth import assert_closed

use_embedded_services(Path(sys.argv[1]))
from prefect.client.orchestration import get_client

with get_client(sync_client=True) as client:
    assert client.read_flows() == []
    assert_closed(str(client.api_url).rstrip("/"))
"""


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Remove Prefect's variables from the environment, and return the others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield kept


def auth_header() -> dict[str, str]:
    """Return the HTTP header with the password that Prefect's clients send."""
    return {"Authorization": f"Basic {b64encode(os.environ[GIVEN].encode()).decode()}"}


def answer(url: str, body: bytes | None = b"{}", **headers: str) -> tuple[int, Message]:
    """Return the status and the headers of the answer, also of an error."""
    json = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, json | headers)) as given:
            return given.status, given.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def assert_closed(api: str) -> None:
    """Assert that Prefect answers only with the password, and lets no other site read it."""
    flows, allowed = f"{api}/flows/filter", "Access-Control-Allow-Origin"
    assert answer(flows)[0] == 401
    assert answer(flows, Authorization="Basic cmVmcmFpbjo=")[0] == 401
    assert answer(f"{api}/health", None)[0] == 200
    status, headers = answer(flows, Origin=STRANGER, **auth_header())
    assert (status, headers[allowed]) == (200, None)


def test_password_is_made_once_and_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        password = read_password(tmp_path)
    finally:
        os.umask(old)
    file = password_file(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_password(tmp_path) == password == file.read_text().strip()
    user, _, secret = password.partition(":")
    assert (user, len(secret)) == ("refrain", 43)
    assert read_password(tmp_path / "other") != password


def test_two_at_once_have_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK_SLOWLY, str(tmp_path)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for _ in range(2)
    ]
    one, other = (process.communicate(timeout=60.0)[0] for process in both)
    assert one == other == password_file(tmp_path).read_text()


@pytest.mark.usefixtures("environment")
def test_a_password_of_ones_own_is_used(tmp_path: Path) -> None:
    password_file(tmp_path).parent.mkdir()
    password_file(tmp_path).write_text("me:mine\n")
    use_embedded_services(tmp_path)
    assert (os.environ[ASKED], os.environ[GIVEN]) == ("me:mine", "me:mine")
    assert password_place(tmp_path) == str(password_file(tmp_path))


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", [ASKED, GIVEN])
def test_password_in_the_environment_is_kept(name: str, tmp_path: Path) -> None:
    # Compose passes unset variables on as empty ones.
    os.environ.update({ASKED: "", GIVEN: "", name: "me:mine"})
    use_embedded_services(tmp_path)
    assert (os.environ[ASKED], os.environ[GIVEN]) == ("me:mine", "me:mine")
    assert password_place(tmp_path) == ASKED
    assert not password_file(tmp_path).exists()


@pytest.mark.usefixtures("environment")
def test_another_server_gets_no_password_of_this_machine(tmp_path: Path) -> None:
    os.environ["PREFECT_API_URL"] = "http://prefect:4200/api"
    use_embedded_services(tmp_path)
    assert not {ASKED, GIVEN} & os.environ.keys()
    assert not password_file(tmp_path).exists()


@pytest.mark.parametrize("text", ["", "\n", "one\ntwo", "naïve:é"])
def test_a_file_without_a_password_is_named(text: str, tmp_path: Path) -> None:
    password_file(tmp_path).parent.mkdir()
    password_file(tmp_path).write_text(text)
    with pytest.raises(ValueError, match=r"\.prefect/auth has no password"):
        read_password(tmp_path)


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_runs_own_server_is_closed(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=360.0,
        cwd=REPOSITORY,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
