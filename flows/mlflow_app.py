"""MLflow's server behind a password: `mlflow server --app-name refrain`.

Everyone who can reach MLflow's server can read and write files as the user who started it. MLflow's
own app with passwords needs another package, and keeps its users in a separate database.
"""

import hmac
import os
from base64 import b64encode

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from refrain.flows.auth import MLFLOW_ASKED

_OPEN = "/health"
"""The only path that needs no password. Health probes call it."""
_REFUSAL = (
    "MLflow needs a user and a password: log in, or set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD\n"
)


def create_app() -> ASGIApp:
    """Return MLflow's app behind a password. Raise ValueError when the environment has none."""
    user, _, password = os.environ.get(MLFLOW_ASKED, "").partition(":")
    if not (user and password):
        raise ValueError(f"set {MLFLOW_ASKED} to USER:PASSWORD, the login of MLflow's server")
    from mlflow.server.fastapi_app import app
    from mlflow.server.fastapi_security import get_allowed_origins

    return PasswordGate(app, f"{user}:{password}", get_allowed_origins())


class PasswordGate:
    """An ASGI app that passes requests on when they have the password (HTTP Basic). Requests of
    pages must come from the same origin or an allowed one."""

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
            refusal = PlainTextResponse("Requests from pages of other origins are refused\n", 403)
            await _refuse(refusal, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_own(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether the request comes from no page, from our own or from an allowed one.

        A logged-in browser sends the password with the requests of other pages too, and MLflow
        trusts every page on localhost.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        host = headers.get(b"host", b"").decode("latin-1")
        allowed = {f"http://{host}", f"https://{host}", *self._origins}
        return not origin or origin in allowed or "*" in allowed


async def _refuse(refusal: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await refusal(scope, receive, send)
