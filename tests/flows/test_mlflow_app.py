"""Without the password, MLflow's server answers on no path but /health."""

from base64 import b64encode
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest

from refrain.flows.auth import ASKED, MLFLOW_ASKED, mlflow_login, mlflow_password
from refrain.flows.mlflow_app import PasswordGate, create_app
from refrain.flows.ui import mlflow_command

PASSWORD = "refrain:Zm9v-bar_b4z"
OWN, STRANGER = "http://127.0.0.1:5000", "http://127.0.0.1:9999"


def basic(password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {b64encode(password.encode()).decode()}"}


async def mlflow(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a secret"})


async def status(path: str, *origins: str, **headers: str) -> int:
    transport = httpx.ASGITransport(PasswordGate(mlflow, PASSWORD, list(origins)))
    async with httpx.AsyncClient(transport=transport, base_url=OWN) as client:
        answer = await client.get(path, headers=headers)
    assert ("a secret" in answer.text) == (answer.status_code == 200)
    return answer.status_code


WRONG = [
    {},
    basic("refrain:"),
    basic("refrain:guessed"),
    basic("other:Zm9v-bar_b4z"),
    basic(PASSWORD + "x"),
    {"Authorization": "Basic"},
    {"Authorization": "Bearer Zm9v-bar_b4z"},
    {"Cookie": "session=1"},
]
PATHS = [
    "/",
    "/version",
    "/health/",
    "/health/../version",
    "/HEALTH",
    "//health",
    "/api/2.0/mlflow/experiments/search",
    "/ajax-api/2.0/mlflow/runs/search",
    "/get-artifact?path=authorized_keys&run_uuid=1",
    "/ajax-api/2.0/mlflow/upload-artifact",
    "/api/2.0/mlflow-artifacts/artifacts/x",
    "/graphql",
    "/v1/traces",
]


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_answers_without_the_password(path: str) -> None:
    for headers in WRONG:
        assert await status(path, **headers) == 401
    assert await status(path, **basic(PASSWORD)) == 200


async def test_a_probe_needs_none() -> None:
    assert await status("/health") == 200


async def test_pages_of_others_get_nothing_from_a_browser_that_is_logged_in() -> None:
    known = basic(PASSWORD)
    for origin in (STRANGER, "http://localhost:5000", "http://example.com", "null"):
        assert await status("/", Origin=origin, **known) == 403
    assert await status("/", Origin=OWN, **known) == 200
    assert await status("/", "http://example.com", Origin="http://example.com", **known) == 200


async def test_no_web_socket_is_opened() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/", "headers": []}
    await PasswordGate(mlflow, PASSWORD, [])(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("password", ["", "refrain", "refrain:", ":word"])
def test_without_a_password_it_does_not_start(
    password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MLFLOW_ASKED, password)
    with pytest.raises(ValueError, match=f"set {MLFLOW_ASKED} to USER:PASSWORD"):
        create_app()


@pytest.mark.parametrize(
    ("prefects", "own", "expected"),
    [
        ("me:mine", "", "me:mine"),
        ("me:mine", "you:yours", "you:yours"),
        ("mine", "", "refrain:mine"),
    ],
)
def test_password_is_prefects_unless_set(
    prefects: str, own: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ASKED, prefects)
    monkeypatch.setenv(MLFLOW_ASKED, own)
    assert mlflow_password() == expected
    assert ":".join(mlflow_login().values()) == expected


def test_server_exposes_neither_files_nor_its_password(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MLFLOW_ASKED, PASSWORD)
    command = mlflow_command(tmp_path, 5000)
    assert "--no-serve-artifacts" in command
    assert command[command.index("--app-name") + 1] == "refrain"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert PASSWORD not in " ".join(command)
