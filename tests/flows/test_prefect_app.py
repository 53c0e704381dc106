"""The run's own Prefect server repeats requests that SQLite refuses."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from refrain.flows import prefect_app
from refrain.flows.prefect_app import PatientApp


class Refusing:
    """An app that refuses the first requests, and then echoes them."""

    def __init__(self, num_refused: int, status: int = 503) -> None:
        self.bodies: list[bytes] = []
        self.num_refused = num_refused
        self.status = status

    async def serve(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        if len(self.bodies) <= self.num_refused:
            raise OSError("database is locked")
        return Response(self.bodies[-1], 201)

    def client(self) -> TestClient:
        async def explain(_: Request, error: Exception) -> Response:
            return JSONResponse({"exception_message": str(error)}, self.status)

        routes = [Route("/api/flow_runs", self.serve, methods=["POST"])]
        app = Starlette(routes=routes, exception_handlers={Exception: explain})
        return TestClient(PatientApp(app), raise_server_exceptions=False)


def test_a_refused_request_is_repeated_with_its_body() -> None:
    app = Refusing(2)
    body = b"x" * 300_000
    response = app.client().post("/api/flow_runs", content=body)
    assert (response.status_code, response.content) == (201, body)
    assert app.bodies == [body] * 3


def test_other_errors_are_not_repeated() -> None:
    app = Refusing(1, status=500)
    assert app.client().post("/api/flow_runs", content=b"x").status_code == 500
    assert len(app.bodies) == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_app, "PATIENCE_S", 0.2)
    app = Refusing(10**6)
    response = app.client().post("/api/flow_runs", content=b"x")
    assert response.status_code == 503
    assert response.json() == {"exception_message": "database is locked"}
    assert 2 <= len(app.bodies) <= 6


def test_events_of_a_websocket_pass_through() -> None:
    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": scope["type"]})

    async def sent() -> list[str]:
        messages: list[str] = []

        async def send(message) -> None:
            messages.append(message["type"])

        async def receive() -> dict[str, str]:
            return {"type": "websocket.connect"}

        await PatientApp(app)({"type": "websocket"}, receive, send)
        return messages

    assert asyncio.run(sent()) == ["websocket"]
