"""MLflow's server behind a password: `mlflow server --app-name refrain`.

MLflow lets whoever reaches it read and write files as the user who started it. Its own app with
passwords wants another package, and keeps its users in a database of its own.
"""

import hmac
import os
from base64 import b64encode

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.auth import MLFLOW_ASKED

_OPEN = "/health"
"""The one path that asks for nothing: probes call it."""
_REFUSAL = (
    "MLflow asks for a user and a password: log in, or set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD\n"
)


def create_app() -> ASGIApp:
    """Return MLflow's app for those who know the password. Raises ValueError where the environment
    has none."""
    user, _, password = os.environ.get(MLFLOW_ASKED, "").partition(":")
    if not (user and password):
        raise ValueError(f"set {MLFLOW_ASKED} to USER:PASSWORD, which MLflow is to ask for")
    from mlflow.server.fastapi_app import app
    from mlflow.server.fastapi_security import get_allowed_origins

    return PasswordGate(app, f"{user}:{password}", get_allowed_origins())


class PasswordGate:
    """An ASGI app that lets requests through which carry the password (HTTP Basic), from pages of
    the same origin or of those that are allowed."""

    def __init__(self, app: ASGIApp, password: str, origins: list[str]) -> None:
        self._app, self._origins = app, origins
        self._expected = b"Basic " + b64encode(password.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == _OPEN:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            realm = {"WWW-Authenticate": 'Basic realm="MLflow"'}
            await _refuse(PlainTextResponse(_REFUSAL, 401, realm), scope, receive, send)
        elif not self._is_own(headers):
            refusal = PlainTextResponse("Pages of other origins get nothing\n", 403)
            await _refuse(refusal, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_own(self, headers: dict[bytes, bytes]) -> bool:
        """Whether no page of another origin asks: a browser that is logged in sends the password
        along with its requests too, and MLflow trusts every page on localhost."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        host = headers.get(b"host", b"").decode("latin-1")
        allowed = {f"http://{host}", f"https://{host}", *self._origins}
        return not origin or origin in allowed or "*" in allowed


async def _refuse(refusal: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await refusal(scope, receive, send)
